#include "cuda/rank_meeting.h"

#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "base/error.h"
#include "cuda/cuda_backend.h"

namespace kdt::cuda {

class RankEstate {
 public:
  ~RankEstate() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }

  cudaEvent_t make_event() {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    std::lock_guard lock(mutex_);
    events_.push_back(event);
    return event;
  }
  void keep(Buffer memory) {
    std::lock_guard lock(mutex_);
    memory_.push_back(std::move(memory));
  }

 private:
  std::mutex mutex_;
  std::vector<cudaEvent_t> events_;
  std::vector<Buffer> memory_;
};

std::shared_ptr<RankEstate> make_rank_estate() { return std::make_shared<RankEstate>(); }

namespace {

constexpr auto kBusyWait = std::chrono::milliseconds(20);   // about a round; then a wait that leaves the CPU to others
constexpr auto kNap = std::chrono::microseconds(200);

// Of this process, among those of any machine.
uint64_t process_id() {
  static const uint64_t id = [] {
    std::random_device random;
    return static_cast<uint64_t>(random()) << 32 | random();
  }();
  return id;
}

template <class T>
std::vector<T> gather(Communicator& comm, const T& mine) {
  std::vector<T> all(static_cast<size_t>(comm.size()));
  comm.all_gather(&mine, sizeof mine, all.data());
  return all;
}

}  // namespace

RankMeeting::RankMeeting(Communicator& comm, std::shared_ptr<RankEstate> estate, int device)
    : comm_(comm), estate_(std::move(estate)), device_(device) {
  seats_ = gather(comm, Seat{process_id(), device, {estate_->make_event(), estate_->make_event()}});
  for (size_t rank = 0; rank < seats_.size(); ++rank) {
    const Seat& seat = seats_[rank];
    if (seat.process != seats_[0].process)
      fail(Status::unsupported, "rank " + std::to_string(rank), "another process than rank 0's",
           "ranks that are threads of one process with the CUDA backend: --tp without a launcher; or --backend cpu");
    sharers_ += seat.device == device;
    reach(static_cast<int>(seat.device));
  }
}

void RankMeeting::reach(int device) const {
  if (device == device_) return;
  int reaches = 0;
  check(cudaDeviceCanAccessPeer(&reaches, device_, device), "cudaDeviceCanAccessPeer");
  if (!reaches)
    fail(Status::unsupported, "device " + std::to_string(device_), "no access to the memory of device " + std::to_string(device),
         "devices that have it (nvidia-smi topo -p2p r): name such with CUDA_VISIBLE_DEVICES, or one for all ranks");
  const cudaError_t status = cudaDeviceEnablePeerAccess(device, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) cudaGetLastError();
  else check(status, "cudaDeviceEnablePeerAccess");
}

bool RankMeeting::apart() const {
  std::set<int64_t> devices;
  for (const Seat& seat : seats_) devices.insert(seat.device);
  return devices.size() == seats_.size();
}

bool RankMeeting::of_first(bool mine) const {
  comm_.broadcast(&mine, sizeof mine, 0);
  return mine;
}

Buffer RankMeeting::share(Buffer mine) {
  const auto everyones = gather(comm_, static_cast<const std::byte*>(mine.data()));
  Buffer view(mine.data(), mine.bytes(), [](void*, size_t) {});
  shared_[mine.as<std::byte>()] = everyones;
  estate_->keep(std::move(mine));
  return view;
}

RankPointers RankMeeting::everyones(const void* mine) const {
  const auto* at = static_cast<const std::byte*>(mine);
  const auto found = --shared_.upper_bound(at);
  RankPointers out{};
  for (size_t rank = 0; rank < seats_.size(); ++rank) out[rank] = found->second[rank] + (at - found->first);
  return out;
}

void RankMeeting::meet(cudaStream_t stream, Way way) {
  meeting_ ^= 1;
  const bool tells = way == Way::all || (way == Way::from_first) == first(), hears = way == Way::all || !tells;
  const auto mine = static_cast<size_t>(comm_.rank());
  if (tells) check(cudaEventRecord(seats_[mine].arrived[meeting_], stream), "cudaEventRecord");
  if (in_turns_) finish_turn(), start_turn();
  else comm_.barrier();
  for (size_t rank = 0; hears && rank < (way == Way::from_first ? 1 : seats_.size()); ++rank)
    if (rank != mine) check(cudaStreamWaitEvent(stream, seats_[rank].arrived[meeting_]), "cudaStreamWaitEvent");
}

void RankMeeting::begin_turns() {
  in_turns_ = true;
  start_turn();
}

void RankMeeting::end_turns() {
  finish_turn();
  in_turns_ = false;
}

// From one meeting to the next there are as many barriers as ranks; rank r calls CUDA after r of them.
void RankMeeting::start_turn() {
  for (int i = 0; i < comm_.rank(); ++i) comm_.barrier();
}

void RankMeeting::finish_turn() {
  for (int i = comm_.rank(); i < comm_.size(); ++i) comm_.barrier();
}

void RankMeeting::abandon(cudaStream_t stream, const char* why) noexcept {
  comm_.fail(why);
  const auto end = std::chrono::steady_clock::now() + comm_.deadline();
  for (auto state = cudaStreamCaptureStatusActive; std::chrono::steady_clock::now() < end;) {
    if (cudaStreamIsCapturing(stream, &state) != cudaSuccess || state == cudaStreamCaptureStatusNone) return;
    std::this_thread::sleep_for(kNap);
  }
}

void RankMeeting::wait(cudaStream_t stream) const {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  for (;;) {
    const cudaError_t status = cudaStreamQuery(stream);
    if (status != cudaErrorNotReady) return check(status, "the work of a round");
    const auto waited = Clock::now() - start;
    if (waited > comm_.deadline())
      fail(Status::engine_failed, "rank " + std::to_string(comm_.rank()) + ": the work of a round",
           "not done within " + std::to_string(comm_.deadline().count()) + " ms", "a GPU that does it");
    if (waited < kBusyWait) std::this_thread::yield();
    else std::this_thread::sleep_for(kNap);
  }
}

}  // namespace kdt::cuda
