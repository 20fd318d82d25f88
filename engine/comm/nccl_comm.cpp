#include "comm/nccl_comm.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>

#include "base/error.h"
#include "comm/nccl_library.h"

namespace kdt {
namespace {

using Clock = std::chrono::steady_clock;

// Polling: at first without a pause, so that small messages cost microseconds; an idle rank then costs little.
constexpr int kEagerPolls = 20000, kPollsPerLook = 64;
constexpr std::chrono::microseconds kPause{200};

// Nothing here blocks in NCCL: every call is enqueued, and its end is polled for against the deadline.
class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(std::unique_ptr<Communicator> control, std::unique_ptr<DeviceStream> stream, const std::string& library)
      : control_(std::move(control)), stream_(std::move(stream)), nccl_(NcclLibrary::open(library)) {
    stream_->enter();
    ncclUniqueId id{};
    if (rank() == 0) check(nccl_.get_unique_id(&id), "ncclGetUniqueId");
    control_->broadcast(&id, sizeof id, 0);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    begin();
    check(nccl_.comm_init_rank_config(&comm_, size(), id, rank(), &config), "ncclCommInitRankConfig");
    finish("start");
  }

  ~NcclCommunicator() override {
    try {
      std::lock_guard lock(mutex_);
      if (!comm_) return;
      stream_->enter();
      begin();
      check(nccl_.comm_finalize(comm_), "ncclCommFinalize");
      finish("end");
      nccl_.comm_destroy(comm_);
      comm_ = nullptr;
    } catch (const Error&) {   // aborted: the others learn it by their deadline
    }
    drop();
    for (Staging* staging : {&given_, &got_})
      if (staging->memory) stream_->release(staging->memory);
  }

  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  Deadline deadline() const override { return control_->deadline(); }
  void set_deadline(Deadline deadline) override { control_->set_deadline(deadline); }

  void barrier() override {
    std::byte mine{0}, all[kMostRanks];
    run("barrier", &mine, 1, all, blocks(1), [&](const void* from, void* to) {
      return nccl_.all_gather(from, to, 1, ncclUint8, comm_, stream());
    });
  }

  void broadcast(void* data, size_t bytes, int root) override {
    run("broadcast", rank() == root ? data : nullptr, bytes, data, bytes, [&](const void* from, void* to) {
      return nccl_.broadcast(from ? from : to, to, bytes, ncclUint8, root, comm_, stream());
    });
  }

  void all_gather(const void* mine, size_t bytes, void* all) override {
    run("all_gather", mine, bytes, all, blocks(bytes), [&](const void* from, void* to) {
      return nccl_.all_gather(from, to, bytes, ncclUint8, comm_, stream());
    });
  }

  void all_to_all(const void* from, size_t bytes, void* to) override {
    run("all_to_all", from, blocks(bytes), to, blocks(bytes), [&](const void* given, void* got) {
      check(nccl_.group_start(), "ncclGroupStart");
      for (int r = 0; r < size(); ++r) {
        const size_t at = static_cast<size_t>(r) * bytes;
        check(nccl_.send(static_cast<const std::byte*>(given) + at, bytes, ncclUint8, r, comm_, stream()), "ncclSend");
        check(nccl_.recv(static_cast<std::byte*>(got) + at, bytes, ncclUint8, r, comm_, stream()), "ncclRecv");
      }
      return nccl_.group_end();
    });
  }

  // The others find it on the host when their call has not ended within the deadline.
  void fail(const std::string& why) noexcept override { control_->fail(why); }

 private:
  static constexpr size_t kMostRanks = 64;

  // Device memory for calls with the host's, as large as the largest so far.
  struct Staging {
    void* memory = nullptr;
    size_t bytes = 0;
  };

  size_t blocks(size_t bytes) const { return static_cast<size_t>(size()) * bytes; }
  cudaStream_t stream() { return static_cast<cudaStream_t>(stream_->handle()); }

  void* staged(Staging& staging, size_t bytes) {
    if (staging.bytes >= bytes) return staging.memory;
    if (staging.memory) stream_->release(staging.memory);
    staging = {};
    staging.memory = stream_->allocate(bytes);
    staging.bytes = bytes;
    return staging.memory;
  }

  // `from` (null: nothing is given) and `to` as the call has them; `enqueue` gets them on the device.
  template <class Enqueue>
  void run(const char* call, const void* from, size_t from_bytes, void* to, size_t to_bytes, Enqueue enqueue) {
    std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw Error(Status::engine_failed, failure_);
    if (to_bytes == 0) return;   // on every rank alike
    stream_->enter();
    begin();
    const bool stages_from = from && !stream_->holds(from), stages_to = !stream_->holds(to);
    const void* given = from;
    if (stages_from) {
      void* place = staged(given_, from_bytes);
      stream_->to_device(place, from, from_bytes);
      given = place;
    }
    void* got = stages_to ? staged(got_, to_bytes) : to;
    check(enqueue(given, got), call);
    settle(call);   // it is on the stream
    if (stages_to) stream_->to_host(to, got, to_bytes);
    finish(call);
  }

  void begin() {
    limit_ = Clock::now() + deadline();
    polls_ = 0;
  }

  // Until NCCL has put on the stream what it was asked for.
  void settle(const char* call) {
    for (;;) {
      ncclResult_t state = ncclSuccess;
      check(nccl_.comm_get_async_error(comm_, &state), call);
      if (state == ncclSuccess) return;
      check(state, call);
      pause(call);
    }
  }

  void finish(const char* call) {
    settle(call);
    while (!stream_->done()) {
      ncclResult_t state = ncclSuccess;
      if (polls_ % kPollsPerLook == 0) check(nccl_.comm_get_async_error(comm_, &state), call);
      check(state, call);
      pause(call);
    }
  }

  void pause(const char* call) {
    if (++polls_ < kEagerPolls && polls_ % kPollsPerLook != 0) return;
    if (polls_ < kEagerPolls) std::this_thread::yield();   // to a rank that shares the core
    else std::this_thread::sleep_for(kPause);
    if (Clock::now() >= limit_) give_up(call, "no answer within " + std::to_string(deadline().count()) + " ms");
  }

  void check(ncclResult_t code, const char* call) {
    if (code == ncclSuccess || code == ncclInProgress) return;
    const char* more = nccl_.get_last_error(comm_);
    give_up(call, std::string(nccl_.get_error_string(code)) + (more && *more ? std::string(", ") + printable(more, 300) : ""));
  }

  // NCCL does not say who is missing. Every rank that is alive comes here within its own deadline and then meets the others
  // on the host: who does not is named, or says by fail() why.
  [[noreturn]] void give_up(const char* call, const std::string& found) {
    drop();
    failure_ = "rank " + std::to_string(rank()) + ": NCCL: " + found + ": expected " + call + " of every rank";
    try {
      control_->barrier();
    } catch (const Error& error) {
      failure_ = error.what();
    }
    throw Error(Status::engine_failed, failure_);
  }

  void drop() {
    if (comm_) nccl_.comm_abort(comm_);
    comm_ = nullptr;
  }

  std::unique_ptr<Communicator> control_;
  std::unique_ptr<DeviceStream> stream_;
  NcclLibrary nccl_;
  ncclComm_t comm_ = nullptr;
  std::mutex mutex_;
  Staging given_, got_;
  Clock::time_point limit_;   // of the call that runs
  int polls_ = 0;
  std::string failure_;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<Communicator> control,
                                                     std::unique_ptr<DeviceStream> stream, const std::string& library) {
  check_argument(control != nullptr && stream != nullptr, "control", "NULL", "the same ranks on the host, and a stream");
  return std::make_unique<NcclCommunicator>(std::move(control), std::move(stream), library);
}

}  // namespace kdt
