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

ThreadPool::ThreadPool(int n_threads) : n_threads_(n_threads < 1 ? 1 : n_threads) {
  for (int t = 1; t < n_threads_; ++t) workers_.emplace_back([this, t] { work(t); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::run_erased(void (*call)(void*, int), void* context) {
  if (n_threads_ == 1) return call(context, 0);
  call_ = call;
  context_ = context;
  pending_.store(n_threads_ - 1, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  call(context, 0);
  for (int spins = 0; pending_.load(std::memory_order_acquire) != 0; ++spins) {
    if (spins < kSpins) pause();
    else std::this_thread::yield();
  }
}

void ThreadPool::work(int t) {
  uint32_t seen = 0;
  for (;;) {
    int spins = 0;
    while (epoch_.load(std::memory_order_acquire) == seen) {
      if (++spins < kSpins) pause();
      else epoch_.wait(seen, std::memory_order_acquire);
    }
    ++seen;
    if (stop_.load(std::memory_order_relaxed)) return;
    call_(context_, t);
    pending_.fetch_sub(1, std::memory_order_release);
  }
}

int ThreadPool::available_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  int n = CPU_COUNT(&set);
  return n < 1 ? 1 : n;
}

}  // namespace kdt
