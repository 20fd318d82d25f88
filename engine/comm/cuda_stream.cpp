// DeviceStream over the CUDA runtime.
#include <cuda_runtime.h>

#include "base/error.h"
#include "comm/nccl_comm.h"

namespace kdt {
namespace {

void check(cudaError_t code, const char* function) {
  if (code == cudaSuccess) return;
  throw Error(Status::engine_failed, std::string(function) + ": " + cudaGetErrorString(code) + ": expected success");
}

class CudaStream : public DeviceStream {
 public:
  explicit CudaStream(int device) : device_(device) {
    int n = 0;
    const cudaError_t code = cudaGetDeviceCount(&n);
    if (code != cudaSuccess) kdt::fail(Status::io, "CUDA", cudaGetErrorString(code), "a device");
    check_argument(device >= 0 && device < n, "device", std::to_string(device), "0 to " + std::to_string(n - 1));
    enter();
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~CudaStream() override {
    cudaSetDevice(device_);
    cudaStreamDestroy(stream_);
  }

  void enter() override { check(cudaSetDevice(device_), "cudaSetDevice"); }
  void* handle() override { return stream_; }
  void* allocate(size_t bytes) override {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    return memory;
  }
  void release(void* memory) noexcept override { cudaFree(memory); }
  bool holds(const void* memory) override {
    cudaPointerAttributes attributes{};
    check(cudaPointerGetAttributes(&attributes, memory), "cudaPointerGetAttributes");
    return attributes.type == cudaMemoryTypeDevice;
  }
  void to_device(void* to, const void* from, size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
  }
  void to_host(void* to, const void* from, size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
  }
  bool done() override {
    const cudaError_t code = cudaStreamQuery(stream_);
    if (code == cudaErrorNotReady) return false;
    check(code, "cudaStreamQuery");
    return true;
  }

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

std::unique_ptr<DeviceStream> make_cuda_stream(int device) { return std::make_unique<CudaStream>(device); }

}  // namespace kdt
