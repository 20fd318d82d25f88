// The device, its memory, and rounds: what is queued, recorded, replayed and waited for. Operations are in other files.
#include "cuda/cuda_backend.h"

#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/error.h"
#include "cuda/cuda_ops.h"
#include "cuda/device.cuh"
#include "cuda/rank_meeting.h"
#include "cuda/upload_ring.h"

namespace kdt::cuda {
namespace {

using Way = RankMeeting::Way;

constexpr size_t kAlignment = 256;
constexpr size_t kLeastSlab = 64 << 20, kMostSlab = 512 << 20;
constexpr size_t kSlabShare = 16;        // a new slab has 1/16 of what there is already
constexpr size_t kFirstEvents = 32;

// Codes that tell what to do; all others are the engine's own failures.
struct Advice {
  cudaError_t code;
  Status status;
  const char* expected;
};

constexpr const char* kNeedsDevice = "an NVIDIA GPU that this process may see (nvidia-smi, CUDA_VISIBLE_DEVICES)";
constexpr const char* kNeedsTurn = "a GPU that no other process has for itself (nvidia-smi -q -d COMPUTE)";
constexpr const char* kNeedsMemory = "that much to be free: a smaller cache or model, or fewer users of the GPU";
constexpr const char* kNeedsRepair = "memory without errors: reset or replace the GPU (nvidia-smi -q -d ECC)";
constexpr const char* kNeedsBuild = "a GPU this build has code for, or a build for this one (meson option gpu_archs)";
constexpr const char* kNeedsDriver = "an NVIDIA driver that knows this CUDA version: update it, or use the CPU backend";
constexpr const char* kKernelBug =
    "success: a bug of the engine, or a faulty GPU; start anew, with CUDA_LAUNCH_BLOCKING=1 the kernel is named";
constexpr Advice kAdvice[] = {
    {cudaErrorNoDevice, Status::unsupported, kNeedsDevice},
    {cudaErrorInsufficientDriver, Status::unsupported, kNeedsDriver},
    {cudaErrorSystemDriverMismatch, Status::unsupported, kNeedsDriver},
    {cudaErrorUnsupportedPtxVersion, Status::unsupported, kNeedsDriver},
    {cudaErrorDevicesUnavailable, Status::unsupported, kNeedsTurn},
    {cudaErrorNoKernelImageForDevice, Status::unsupported, kNeedsBuild},
    {cudaErrorInvalidDeviceFunction, Status::unsupported, kNeedsBuild},
    {cudaErrorMemoryAllocation, Status::out_of_memory, kNeedsMemory},
    {cudaErrorECCUncorrectable, Status::engine_failed, kNeedsRepair},
    {cudaErrorIllegalAddress, Status::engine_failed, kKernelBug},
    {cudaErrorMisalignedAddress, Status::engine_failed, kKernelBug},
    {cudaErrorIllegalInstruction, Status::engine_failed, kKernelBug},
    {cudaErrorLaunchFailure, Status::engine_failed, kKernelBug},
};

void free_device(void* data, size_t) { cudaFree(data); }
void free_host(void* data, size_t) { cudaFreeHost(data); }

std::string mib(size_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

__global__ void probe_kernel() {}

}  // namespace

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();   // a failed launch must not be reported again by the next one
  const std::string found = std::string(cudaGetErrorName(status)) + ", " + cudaGetErrorString(status);
  for (const Advice& advice : kAdvice)
    if (advice.code == status) fail(advice.status, std::string("CUDA ") + what, found, advice.expected);
  fail(Status::engine_failed, std::string("CUDA ") + what, found, "success");
}

CudaOps::CudaOps(int device, std::unique_ptr<RankMeeting> ranks) : device_(device), ranks_(std::move(ranks)) {
  enter();
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
  };
  n_sms_ = attribute(cudaDevAttrMultiProcessorCount);
  shared_limit_ = static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  instruction_set_ = "sm_" + std::to_string(attribute(cudaDevAttrComputeCapabilityMajor)) +
                     std::to_string(attribute(cudaDevAttrComputeCapabilityMinor));
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  try {
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    for (size_t i = 0; i < kFirstEvents; ++i) check(cudaEventCreate(&events_.emplace_back()), "cudaEventCreate");
    probe_kernel<<<1, 1, 0, stream_>>>();
    launched("probe_kernel");
    check(cudaStreamSynchronize(stream_), "probe_kernel");
    router_parts_ = allocate(kRouterPartsBytes);
    experts_done_ = allocate(kExpertsParts * sizeof(int32_t));
  } catch (...) {
    release();
    throw;
  }
}

CudaOps::~CudaOps() {
  cudaSetDevice(device_);
  cudaStreamSynchronize(stream_);
  release();
}

void CudaOps::release() {
  uploads_.reset();
  for (auto& [key, graph] : graphs_)
    if (graph.exec) cudaGraphExecDestroy(graph.exec);
  for (cudaEvent_t event : events_)
    if (event) cudaEventDestroy(event);
  if (begin_) cudaEventDestroy(begin_);
  cudaStreamDestroy(stream_);
}

void CudaOps::enter() const { check(cudaSetDevice(device_), "cudaSetDevice"); }

Buffer CudaOps::allocate(size_t bytes) {
  enter();
  const size_t size = std::max<size_t>(bytes, 1);
  void* data = nullptr;
  if (const cudaError_t status = cudaMalloc(&data, size); status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    fail(Status::out_of_memory, "GPU memory", mib(size) + " wanted, " + mib(free) + " free", kNeedsMemory);
  } else {
    check(status, "cudaMalloc");
  }
  Buffer buffer(data, size, free_device);
  check(cudaMemsetAsync(data, 0, size, stream_), "cudaMemset");
  return buffer;
}

Buffer CudaOps::allocate_for_ranks(size_t bytes) {
  return ranks_ ? ranks_->share(allocate(bytes)) : allocate(bytes);
}

void CudaOps::copy_in(Buffer& to, size_t offset, const void* from, size_t bytes) {
  enter();
  check(cudaMemcpyAsync(to.as<std::byte>() + offset, from, bytes, cudaMemcpyHostToDevice, stream_), "copy_in");
  check(cudaStreamSynchronize(stream_), "copy_in");
}

void CudaOps::copy_out(const Buffer& from, size_t offset, void* to, size_t bytes) {
  enter();
  check(cudaMemcpyAsync(to, from.as<std::byte>() + offset, bytes, cudaMemcpyDeviceToHost, stream_), "copy_out");
  check(cudaStreamSynchronize(stream_), "copy_out");
}

Exchange CudaOps::exchange(size_t bytes) {
  Buffer device = allocate(bytes);
  void* host = nullptr;
  if (const cudaError_t status = cudaHostAlloc(&host, device.bytes(), cudaHostAllocDefault); status != cudaSuccess) {
    cudaGetLastError();
    fail(Status::out_of_memory, "pinned host memory", mib(device.bytes()) + " wanted",
         std::string("that much to be free and lockable (ulimit -l): ") + cudaGetErrorString(status));
  }
  std::memset(host, 0, device.bytes());
  return Exchange(Buffer(host, device.bytes(), free_host), std::move(device));
}

// Weights are cut from slabs: an allocation a tensor would waste its rounding up, and there are tens of thousands.
void* CudaOps::weight_memory(size_t bytes) {
  const size_t size = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  if (slabs_.empty() || slab_used_ + size > slabs_.back().bytes()) {
    slabs_.push_back(allocate(std::max(size, std::clamp(weight_bytes_ / kSlabShare, kLeastSlab, kMostSlab))));
    slab_used_ = 0;
    check(cudaStreamSynchronize(stream_), "cudaMemset");   // before other streams write to it
  }
  std::byte* memory = slabs_.back().as<std::byte>() + slab_used_;
  slab_used_ += size;
  weight_bytes_ += bytes;
  return memory;
}

UploadRing& CudaOps::uploads() {
  if (!uploads_) uploads_ = std::make_unique<UploadRing>(*this, stream_);
  return *uploads_;
}

// Logits, work memory and recorded rounds come after the pages.
size_t CudaOps::spare_bytes() const {
  const int sharers = ranks_ ? ranks_->sharers() : 1;
  return free_bytes() / 4 * 3 / static_cast<size_t>(sharers);
}

size_t CudaOps::free_bytes() const {
  enter();
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

MatrixGroup CudaOps::group(std::span<const Matrix> matrices) {
  const auto& kept = groups_.emplace_back(matrices.begin(), matrices.end());
  const auto* device = static_cast<const Matrix*>(
      upload_raw(reinterpret_cast<const std::byte*>(kept.data()), kept.size() * sizeof(Matrix)));
  return {kept.data(), device, static_cast<int64_t>(kept.size())};
}

// Few enough that all are recorded soon, near enough that rows nobody needs cost little.
int64_t CudaOps::capacity(int64_t rows) const {
  constexpr int64_t kMost = 256, kStep = 64;
  if (rows > kMost) return divide_up(rows, kStep) * kStep;
  // 1, 2 … 8, then four a doubling: 10, 12, 14, 16, 20 …
  int64_t step = 1;
  while (rows > 8 * step) step *= 2;
  return divide_up(rows, step) * step;
}

void CudaOps::send(const Exchange& from, size_t bytes) {
  if (bytes == 0) return;
  enter();
  check(cudaMemcpyAsync(from.device(), from.host(), bytes, cudaMemcpyHostToDevice, stream_), "send");
}

void CudaOps::fetch(const Exchange& to, size_t bytes) {
  if (bytes == 0) return;
  check(cudaMemcpyAsync(to.host(), to.device(), bytes, cudaMemcpyDeviceToHost, stream_), "fetch");
}

void CudaOps::mark(Stage stage) {
  if (marks_.size() == events_.size()) check(cudaEventCreate(&events_.emplace_back()), "cudaEventCreate");
  // In a graph the event is a node of its own, which the host may wait for and time like any other.
  check(cudaEventRecordWithFlags(events_[marks_.size()], stream_,
                                 recording_ ? cudaEventRecordExternal : cudaEventRecordDefault), "cudaEventRecord");
  marks_.push_back(stage);
}

void CudaOps::submit(const SubmitKey* key, const std::function<void()>& work) {
  enter();
  marks_.clear();
  if (!key) {
    check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    return work();
  }
  auto known = graphs_.find(*key);
  if (known == graphs_.end()) known = graphs_.emplace(*key, record(work)).first;
  marks_ = known->second.marks;
  replay(known->second);
}

// Of several ranks each calls its own part, and all of it becomes one graph: the others' streams fork from rank 0's and join it.
CudaOps::Graph CudaOps::record(const std::function<void()>& work) {
  uploads_.reset();
  struct Recorded {
    cudaGraph_t graph = nullptr;
    ~Recorded() {
      if (graph) cudaGraphDestroy(graph);
    }
  } recorded;
  const bool first = !ranks_ || ranks_->first();
  if (ranks_) ranks_->begin_turns();
  if (first) check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  recording_ = true;
  try {
    if (ranks_) ranks_->meet(stream_, Way::from_first);
    work();
    if (ranks_) ranks_->meet(stream_, Way::to_first);
  } catch (const std::exception& error) {
    recording_ = false;
    if (first) cudaStreamEndCapture(stream_, &recorded.graph);
    else ranks_->abandon(stream_, error.what());
    cudaGetLastError();
    throw;
  }
  recording_ = false;
  Graph made;
  made.marks = marks_;
  if (first) {
    check(cudaStreamEndCapture(stream_, &recorded.graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&made.exec, recorded.graph, 0), "cudaGraphInstantiate");
  }
  if (ranks_) ranks_->end_turns();
  return made;
}

void CudaOps::forget(const SubmitKey& key) {
  const auto known = graphs_.find(key);
  if (known == graphs_.end()) return;
  if (known->second.exec) cudaGraphExecDestroy(known->second.exec);
  graphs_.erase(known);
}

void CudaOps::replay(const Graph& graph) {
  if (ranks_) ranks_->meet(stream_, Way::to_first);
  check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
  if (graph.exec) check(cudaGraphLaunch(graph.exec, stream_), "cudaGraphLaunch");
  if (ranks_) ranks_->meet(stream_, Way::from_first);
}

StageSeconds CudaOps::wait() {
  enter();
  if (ranks_) ranks_->wait(stream_);
  else check(cudaStreamSynchronize(stream_), "the work of a round");
  StageSeconds times;
  cudaEvent_t last = begin_;
  for (size_t i = 0; i < marks_.size(); ++i) {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, last, events_[i]), "cudaEventElapsedTime");
    times[marks_[i]] += ms * 1e-3;
    last = events_[i];
  }
  return times;
}

}  // namespace kdt::cuda

namespace kdt {
namespace {

constexpr int kBuiltFor[] = {__CUDA_ARCH_LIST__};   // 800, 900, …: mma.sync of BF16 and cp.async need 800

std::string cuda_version(int version) {
  return "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

template <class F>
F driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  cuda::check(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess) fail(Status::unsupported, "CUDA driver", name, "a driver that has it");
  return reinterpret_cast<F>(function);
}

// The runtime would leave a context, and with it hundreds of megabytes, on every device that is looked at.
int64_t free_memory(int index) {
  const auto must = [](CUresult result, const char* what) {
    if (result != CUDA_SUCCESS) fail(Status::unsupported, what, "error " + std::to_string(result), "success");
  };
  const auto retain = driver_function<CUresult (*)(CUcontext*, CUdevice)>("cuDevicePrimaryCtxRetain");
  const auto release = driver_function<CUresult (*)(CUdevice)>("cuDevicePrimaryCtxRelease");
  const auto push = driver_function<CUresult (*)(CUcontext)>("cuCtxPushCurrent");
  const auto pop = driver_function<CUresult (*)(CUcontext*)>("cuCtxPopCurrent");
  const auto info = driver_function<CUresult (*)(size_t*, size_t*)>("cuMemGetInfo");
  CUcontext context = nullptr;
  must(retain(&context, index), "cuDevicePrimaryCtxRetain");
  size_t free = 0, total = 0;
  CUresult result = push(context);
  if (result == CUDA_SUCCESS) {
    result = info(&free, &total);
    pop(&context);
  }
  release(index);
  must(result, "cuMemGetInfo");
  return static_cast<int64_t>(free);
}

// The newest code of a build runs on what is newer, as PTX; nothing runs on what is older than all of it.
std::string why_unusable(int major, int minor) {
  const int least = *std::min_element(std::begin(kBuiltFor), std::end(kBuiltFor)) / 10;
  if (10 * major + minor >= least) return {};
  return "sm_" + std::to_string(10 * major + minor) + ", and this build begins at sm_" + std::to_string(least);
}

CudaDevice describe(int index) {
  cudaDeviceProp properties{};
  cuda::check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  return {index, properties.name, properties.major, properties.minor, static_cast<int64_t>(properties.totalGlobalMem), 0,
          why_unusable(properties.major, properties.minor)};
}

int count_devices() {
  constexpr const char* kElse = "a working NVIDIA driver (nvidia-smi must list the GPU), or the CPU backend";
  int count = 0, driver = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaErrorInsufficientDriver) {
    cudaGetLastError();
    cudaDriverGetVersion(&driver);
    fail(Status::unsupported, "NVIDIA driver", driver == 0 ? "none" : "of " + cuda_version(driver),
         "one for " + cuda_version(CUDART_VERSION) + " or later, or the CPU backend");
  }
  if (status != cudaSuccess && status != cudaErrorNoDevice) {
    cudaGetLastError();
    fail(Status::unsupported, "CUDA", cudaGetErrorString(status), kElse);
  }
  if (count == 0) cuda::check(cudaErrorNoDevice, "devices");
  return count;
}

}  // namespace

std::vector<CudaDevice> cuda_devices() {
  std::vector<CudaDevice> devices;
  for (int i = 0, n = count_devices(); i < n; ++i) {
    CudaDevice& device = devices.emplace_back(describe(i));
    if (!device.unusable.empty()) continue;
    try {
      device.free_bytes = free_memory(i);
    } catch (const Error& error) {
      device.unusable = error.what();
    }
  }
  return devices;
}

std::unique_ptr<Ops> make_cuda_ops(int device) { return cuda_ops_of_ranks(device)(nullptr); }

std::function<std::unique_ptr<Ops>(Communicator*)> cuda_ops_of_ranks(int first_device, RankSums sums) {
  const int count = count_devices();
  check_argument(first_device >= 0 && first_device < count, "CUDA device", std::to_string(first_device),
                 "0 to " + std::to_string(count - 1) + ", as nvidia-smi and CUDA_VISIBLE_DEVICES number them");
  return [=, estate = cuda::make_rank_estate()](Communicator* comm) {
    const int device = (first_device + (comm ? comm->rank() : 0)) % count;
    const CudaDevice found = describe(device);
    if (!found.unusable.empty())
      fail(Status::unsupported, "CUDA device " + std::to_string(device) + " (" + found.name + ")", found.unusable,
           "a GPU this build can use, or a build for this one (meson option gpu_archs)");
    cuda::check(cudaSetDevice(device), "cudaSetDevice");
    auto ranks = comm ? std::make_unique<cuda::RankMeeting>(*comm, estate, device) : nullptr;
    auto ops = std::make_unique<cuda::CudaOps>(device, std::move(ranks));
    ops->choose_sums(sums);
    return ops;
  };
}

}  // namespace kdt
