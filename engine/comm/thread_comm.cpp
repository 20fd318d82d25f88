#include "comm/thread_comm.h"

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "base/error.h"

namespace kdt {
namespace {

using Clock = std::chrono::steady_clock;

// A round meets more than a hundred times within milliseconds: a rank looks for the others for a while before it sleeps.
constexpr int kSpins = 500, kYields = 50;

enum class Call : uint8_t { barrier, broadcast, all_gather, all_to_all };
constexpr const char* kCallNames[] = {"barrier", "broadcast", "all_gather", "all_to_all"};

// What the ranks share. A rank arrives at its e-th meeting by publishing e, which is the sense of the barrier: nobody
// resets anything, and who has not come is known by name.
struct Meeting {
  Meeting(int n, Communicator::Deadline limit) : ranks(static_cast<size_t>(n)), deadline_ms(limit.count()) {}

  // What a rank brings along. Those of two meetings running lie apart: a rank may arrive at the next one while others
  // still look at this one's, but nobody arrives at the one after.
  struct Offer {
    Call call = Call::barrier;
    const std::byte* data = nullptr;
    size_t bytes = 0;
  };
  struct alignas(64) Rank {
    std::atomic<uint64_t> arrived{0};
    Offer offers[2];
  };

  std::vector<Rank> ranks;
  std::atomic<int64_t> deadline_ms;
  std::atomic<bool> failed{false};
  std::atomic<int> sleepers{0};
  std::mutex mutex;
  std::condition_variable moved;
  std::string failure;   // under the mutex; the first one

  void give_up(const std::string& message) {
    {
      std::lock_guard lock(mutex);
      if (failure.empty()) failure = message;
      failed = true;
    }
    moved.notify_all();
  }

  // The first rank that has not come, or -1.
  int missing(uint64_t epoch) const {
    for (size_t r = 0; r < ranks.size(); ++r)
      if (ranks[r].arrived.load() < epoch) return static_cast<int>(r);
    return -1;
  }
};

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Meeting> meeting, int rank) : meeting_(std::move(meeting)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(meeting_->ranks.size()); }
  Deadline deadline() const override { return Deadline(meeting_->deadline_ms.load()); }
  void set_deadline(Deadline deadline) override { meeting_->deadline_ms = deadline.count(); }

  void barrier() override { meet(Call::barrier, nullptr, 0); }

  void broadcast(void* data, size_t bytes, int root) override {
    meet(Call::broadcast, data, bytes);
    if (rank_ != root) copy(data, at(root).data, bytes);
    meet(Call::broadcast, data, bytes);
  }

  void all_gather(const void* mine, size_t bytes, void* all) override {
    meet(Call::all_gather, mine, bytes);
    for (int r = 0; r < size(); ++r)
      copy(static_cast<std::byte*>(all) + static_cast<size_t>(r) * bytes, at(r).data, bytes);
    meet(Call::all_gather, mine, bytes);
  }

  void all_to_all(const void* from, size_t bytes, void* to) override {
    meet(Call::all_to_all, from, bytes);
    for (int r = 0; r < size(); ++r)
      copy(static_cast<std::byte*>(to) + static_cast<size_t>(r) * bytes,
           at(r).data + static_cast<size_t>(rank_) * bytes, bytes);
    meet(Call::all_to_all, from, bytes);
  }

  void fail(const std::string& why) noexcept override {
    try {
      meeting_->give_up("rank " + std::to_string(rank_) + ": " + printable(why, 400) + ": expected it to go on");
    } catch (...) {   // no memory for the message: the deadline will tell
    }
  }

 private:
  const Meeting::Offer& at(int rank) const { return meeting_->ranks[static_cast<size_t>(rank)].offers[epoch_ % 2]; }

  static void copy(void* to, const std::byte* from, size_t bytes) {
    if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
  }

  void meet(Call call, const void* data, size_t bytes) {
    Meeting& m = *meeting_;
    Meeting::Rank& mine = m.ranks[static_cast<size_t>(rank_)];
    ++epoch_;
    mine.offers[epoch_ % 2] = {call, static_cast<const std::byte*>(data), bytes};
    mine.arrived.store(epoch_);
    if (m.sleepers.load() > 0) {
      { std::lock_guard lock(m.mutex); }
      m.moved.notify_all();
    }
    wait(call);
    if (m.failed) throw_failure();
    for (int r = 0; r < size(); ++r)
      if (at(r).call != call || at(r).bytes != bytes)
        refuse("rank " + std::to_string(r), std::string(kCallNames[static_cast<size_t>(at(r).call)]) + " of " +
               std::to_string(at(r).bytes) + " bytes", call, std::to_string(bytes) + " bytes, as rank " +
               std::to_string(rank_));
  }

  void wait(Call call) {
    Meeting& m = *meeting_;
    const auto done = [&] { return m.failed.load() || m.missing(epoch_) < 0; };
    for (int i = 0; i < kSpins; ++i) {
      if (done()) return;
      __builtin_ia32_pause();
    }
    for (int i = 0; i < kYields; ++i) {
      if (done()) return;
      std::this_thread::yield();
    }
    std::unique_lock lock(m.mutex);
    ++m.sleepers;
    const bool met = m.moved.wait_until(lock, Clock::now() + deadline(), done);
    --m.sleepers;
    if (met) return;
    const int missing = m.missing(epoch_);
    lock.unlock();
    refuse("rank " + std::to_string(missing), "no answer within " + std::to_string(deadline().count()) + " ms", call,
           "of every rank");
  }

  [[noreturn]] void refuse(const std::string& subject, const std::string& found, Call call, const std::string& rest) {
    meeting_->give_up(subject + ": " + found + ": expected " + kCallNames[static_cast<size_t>(call)] + " " + rest);
    throw_failure();
  }

  [[noreturn]] void throw_failure() const {
    std::lock_guard lock(meeting_->mutex);
    throw Error(Status::engine_failed, meeting_->failure);
  }

  std::shared_ptr<Meeting> meeting_;
  int rank_;
  uint64_t epoch_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int n_ranks, Communicator::Deadline deadline) {
  check_argument(n_ranks >= 1 && n_ranks <= 64, "ranks", std::to_string(n_ranks), "1 to 64");
  const auto meeting = std::make_shared<Meeting>(n_ranks, deadline);
  std::vector<std::unique_ptr<Communicator>> out;
  for (int rank = 0; rank < n_ranks; ++rank) out.push_back(std::make_unique<ThreadCommunicator>(meeting, rank));
  return out;
}

}  // namespace kdt
