// A pool of compute threads with a fixed partition of work.
//
// run(f) calls f(t) once for every share t in [0, size) and returns when all are done. What a share computes is a function
// of t and the sizes alone, so results never depend on timing. Worker t takes share t; the caller takes share 0 and then
// every share whose worker has not begun, so a busy machine costs threads, not stalls. Between runs the workers spin for a
// short while (a round forks dozens of times a millisecond), then sleep. One caller at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace kdt {

class ThreadPool {
 public:
  explicit ThreadPool(int n_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return n_threads_; }

  // f must not throw.
  template <class F>
  void run(F&& f) {
    run_erased([](void* context, int t) { (*static_cast<std::remove_reference_t<F>*>(context))(t); }, &f);
  }

  // The t-th of size() contiguous shares of [0, n).
  struct Range {
    int64_t begin, end;
  };
  Range share(int64_t n, int t) const { return {n * t / n_threads_, n * (t + 1) / n_threads_}; }

  // CPUs this process may run on (its affinity mask), at least 1.
  static int available_cpus();

 private:
  void run_erased(void (*call)(void*, int), void* context);
  void work(int t);
  bool claim(int t, uint32_t epoch);

  // The last run in which share t was taken by somebody.
  struct alignas(64) Claim {
    std::atomic<uint32_t> epoch{0};
  };

  int n_threads_;
  void (*call_)(void*, int) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> pending_{0};
  std::atomic<bool> stop_{false};
  std::vector<Claim> claims_;
  std::vector<std::thread> workers_;
};

}  // namespace kdt
