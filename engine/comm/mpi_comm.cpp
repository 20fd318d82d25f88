#include "comm/mpi_comm.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/mpi_library.h"

namespace kdt {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMostOfOne = size_t{1} << 30;   // bytes of a message: MPI counts in int
constexpr size_t kMostOfFailure = 1000;
constexpr int kFailureTag = 1, kFirstTag = 2;
constexpr uint64_t kTags = 30000;                // MPI promises 32767
// Polling: at first without a pause, so that small messages cost microseconds; an idle rank then costs little.
constexpr int kEagerPolls = 20000, kPollsPerLook = 64;
constexpr std::chrono::microseconds kPause{200};

// Every collective is messages between pairs: who has not answered is then known by name, and no library adds anything.
class MpiCommunicator : public Communicator {
 public:
  explicit MpiCommunicator(Deadline deadline) : mpi_(MpiLibrary::get()), deadline_(deadline) {
    int already = 0, provided = 0;
    check(mpi_.initialized(&already), "MPI_Initialized");
    if (already) kdt::fail(Status::unsupported, "MPI", "started before", "one communicator a process");
    check(mpi_.init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
    if (provided < MPI_THREAD_SERIALIZED)
      kdt::fail(Status::unsupported, "MPI", "thread level " + std::to_string(provided), "MPI_THREAD_SERIALIZED");
    check(mpi_.comm_set_errhandler(mpi_.world, mpi_.errors_return), "MPI_Comm_set_errhandler");
    check(mpi_.comm_rank(mpi_.world, &rank_), "MPI_Comm_rank");
    check(mpi_.comm_size(mpi_.world, &size_), "MPI_Comm_size");
    check_argument(size_ <= kMostRanks, "ranks", std::to_string(size_), "1 to " + std::to_string(kMostRanks));
  }

  // MPI_Finalize waits for every rank for ever: only when all of them have come here alive.
  ~MpiCommunicator() override {
    try {
      barrier();
      mpi_.finalize();
    } catch (const Error&) {   // the process ends without
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Deadline deadline() const override { return deadline_; }
  void set_deadline(Deadline deadline) override { deadline_ = deadline; }

  void barrier() override {
    std::lock_guard lock(mutex_);
    begin();
    const std::byte mine{0};
    std::byte theirs[kMostRanks];
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      receive(theirs + r, 1, r);
      send(&mine, 1, r);
    }
    finish("barrier");
  }

  void broadcast(void* data, size_t bytes, int root) override {
    std::lock_guard lock(mutex_);
    begin();
    if (rank_ != root) receive(data, bytes, root);
    for (int r = 0; r < size_; ++r)
      if (rank_ == root && r != root) send(data, bytes, r);
    finish("broadcast");
  }

  void all_gather(const void* mine, size_t bytes, void* all) override {
    std::lock_guard lock(mutex_);
    begin();
    for (int r = 0; r < size_; ++r) {
      std::byte* place = static_cast<std::byte*>(all) + static_cast<size_t>(r) * bytes;
      if (r != rank_) {
        receive(place, bytes, r);
        send(mine, bytes, r);
      } else if (place != mine && bytes > 0) {
        std::memcpy(place, mine, bytes);
      }
    }
    finish("all_gather");
  }

  void all_to_all(const void* from, size_t bytes, void* to) override {
    std::lock_guard lock(mutex_);
    begin();
    for (int r = 0; r < size_; ++r) {
      const std::byte* given = static_cast<const std::byte*>(from) + static_cast<size_t>(r) * bytes;
      std::byte* place = static_cast<std::byte*>(to) + static_cast<size_t>(r) * bytes;
      if (r != rank_) {
        receive(place, bytes, r);
        send(given, bytes, r);
      } else if (bytes > 0) {
        std::memcpy(place, given, bytes);
      }
    }
    finish("all_to_all");
  }

  void fail(const std::string& why) noexcept override {
    try {
      std::lock_guard lock(mutex_);   // another thread's call ends within the deadline
      if (failure_.empty()) give_up("rank " + std::to_string(rank_), printable(why, 400), "it to go on");
    } catch (...) {   // no memory for the message: the deadline will tell
    }
  }

 private:
  static constexpr int kMostRanks = 64;

  struct Message {
    MPI_Request request;
    int peer;
    bool incoming;
    bool done;
  };

  void check(int code, const char* function) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    mpi_.error_string(code, text, &length);
    failure_ = std::string(function) + ": " + printable(text, 400) + ": expected success";
    throw Error(Status::engine_failed, failure_);
  }

  // A call's messages carry its number: what a rank that went another way sends is never taken for an answer.
  void begin() {
    if (!failure_.empty()) throw Error(Status::engine_failed, failure_);
    tag_ = kFirstTag + static_cast<int>(calls_++ % kTags);
  }

  // Nothing to send is a message too: the others wait for it.
  void send(const void* data, size_t bytes, int to) {
    for (size_t at = 0; at == 0 || at < bytes; at += kMostOfOne) {
      MPI_Request& request = add(to, false);
      check(mpi_.isend(static_cast<const std::byte*>(data) + at, static_cast<int>(std::min(bytes - at, kMostOfOne)),
                       mpi_.byte, to, tag_, mpi_.world, &request), "MPI_Isend");
    }
  }

  void receive(void* data, size_t bytes, int from) {
    for (size_t at = 0; at == 0 || at < bytes; at += kMostOfOne) {
      MPI_Request& request = add(from, true);
      check(mpi_.irecv(static_cast<std::byte*>(data) + at, static_cast<int>(std::min(bytes - at, kMostOfOne)),
                       mpi_.byte, from, tag_, mpi_.world, &request), "MPI_Irecv");
    }
  }

  MPI_Request& add(int peer, bool incoming) {
    messages_.push_back({{}, peer, incoming, false});
    return messages_.back().request;
  }

  void finish(const char* call) {
    auto last = Clock::now(), limit = last + deadline_;
    for (int polls = 0; !all_done(); ++polls) {
      if (polls >= kEagerPolls) std::this_thread::sleep_for(kPause);
      if (polls < kEagerPolls && polls % kPollsPerLook != 0) continue;
      look_for_failures();
      const auto now = Clock::now();
      // Who did not run for so long hears what the others say of it before it blames one of them.
      if (now - last > deadline_ / 2) limit = now + deadline_;
      last = now;
      if (now < limit) continue;
      // A rank that did not send is missing; so is one that does not take, when all have sent.
      const Message* missing = nullptr;
      for (const Message& message : messages_)
        if (!message.done && (!missing || (message.incoming && !missing->incoming))) missing = &message;
      give_up("rank " + std::to_string(missing->peer), "no answer within " + std::to_string(deadline_.count()) + " ms",
              std::string(call) + " of every rank");
      throw Error(Status::engine_failed, failure_);
    }
    messages_.clear();
  }

  bool all_done() {
    bool all = true;
    for (Message& message : messages_) {
      int done = message.done;
      if (!done) check(mpi_.test(&message.request, &done, MPI_STATUS_IGNORE), "MPI_Test");
      message.done = done != 0;
      all = all && message.done;
    }
    return all;
  }

  // Another rank has given up.
  void look_for_failures() {
    int there = 0, bytes = 0;
    MPI_Status status;
    check(mpi_.iprobe(MPI_ANY_SOURCE, kFailureTag, mpi_.world, &there, &status), "MPI_Iprobe");
    if (!there) return;
    check(mpi_.get_count(&status, mpi_.byte, &bytes), "MPI_Get_count");
    std::string text(static_cast<size_t>(std::max(bytes, 0)), '\0');
    check(mpi_.recv(text.data(), bytes, mpi_.byte, status.MPI_SOURCE, kFailureTag, mpi_.world, MPI_STATUS_IGNORE),
          "MPI_Recv");
    failure_ = text;
    throw Error(Status::engine_failed, failure_);
  }

  // From here on every call ends with this message, here and, as far as they can be reached, on the other ranks.
  void give_up(const std::string& subject, const std::string& found, const std::string& expected) {
    failure_ = (subject + ": " + found + ": expected " + expected).substr(0, kMostOfFailure);
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      // Small enough to leave at once; nobody waits for it here.
      MPI_Request& request = add(r, false);
      if (mpi_.isend(failure_.data(), static_cast<int>(failure_.size()), mpi_.byte, r, kFailureTag, mpi_.world,
                     &request) != MPI_SUCCESS)
        continue;
      int done = 0;
      mpi_.test(&request, &done, MPI_STATUS_IGNORE);
    }
  }

  const MpiLibrary& mpi_;
  Deadline deadline_;
  int rank_ = 0, size_ = 1;
  std::mutex mutex_;               // MPI is called by one thread at a time
  std::deque<Message> messages_;   // of the call that runs; MPI knows their places
  uint64_t calls_ = 0;
  int tag_ = 0;
  std::string failure_;
};

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(Communicator::Deadline deadline) {
  return std::make_unique<MpiCommunicator>(deadline);
}

}  // namespace kdt
