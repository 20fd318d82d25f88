#include "base/thread_pool.h"

#include <sched.h>

#include <chrono>

namespace kdt {
namespace {

// About 100 µs: longer than any gap inside a round, short enough not to burn a CPU between requests.
constexpr int kSpins = 4000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int n_threads) : n_threads_(n_threads < 1 ? 1 : n_threads), claims_(static_cast<size_t>(n_threads_)) {
  for (int t = 1; t < n_threads_; ++t) workers_.emplace_back([this, t] { work(t); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (auto& worker : workers_) worker.join();
}

bool ThreadPool::claim(int t, uint32_t epoch) {
  uint32_t before = epoch - 1;
  return claims_[static_cast<size_t>(t)].epoch.compare_exchange_strong(before, epoch, std::memory_order_acq_rel);
}

void ThreadPool::run_erased(void (*call)(void*, int), void* context) {
  if (n_threads_ == 1) return call(context, 0);
  call_ = call;
  context_ = context;
  pending_.store(n_threads_ - 1, std::memory_order_relaxed);
  const uint32_t epoch = epoch_.fetch_add(1, std::memory_order_release) + 1;
  epoch_.notify_all();
  call(context, 0);
  for (int t = 1; t < n_threads_; ++t) {
    if (!claim(t, epoch)) continue;
    call(context, t);
    pending_.fetch_sub(1, std::memory_order_relaxed);
  }
  for (int spins = 0;; ++spins) {
    const int left = pending_.load(std::memory_order_acquire);
    if (left == 0) return;
    if (spins < kSpins) pause();
    else pending_.wait(left, std::memory_order_acquire);
  }
}

void ThreadPool::work(int t) {
  uint32_t seen = 0;
  for (;;) {
    uint32_t epoch;
    for (int spins = 0; (epoch = epoch_.load(std::memory_order_acquire)) == seen;) {
      if (++spins < kSpins) pause();
      else epoch_.wait(seen, std::memory_order_acquire);
    }
    seen = epoch;
    if (stop_.load(std::memory_order_relaxed)) return;
    // A claim of this run proves that it still goes on: its context is alive until the claimed share is done.
    if (!claim(t, epoch)) continue;
    call_(context_, t);
    if (pending_.fetch_sub(1, std::memory_order_release) == 1) pending_.notify_one();
  }
}

int ThreadPool::available_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  int n = CPU_COUNT(&set);
  return n < 1 ? 1 : n;
}

}  // namespace kdt
