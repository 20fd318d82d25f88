// What the card's memory yields to a kernel that only reads.
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>

#include "read_bandwidth.h"

namespace {

constexpr int kThreads = 256, kLoads = 8;   // 16 bytes a load, 32 KiB a block

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

__global__ void __launch_bounds__(kThreads) read_kernel(const uint4* from, unsigned* sink) {
  const uint4* at = from + static_cast<size_t>(blockIdx.x) * kThreads * kLoads + threadIdx.x;
  uint4 v[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w)
                 : "l"(at + i * kThreads));
  unsigned sum = 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) sum ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  if (sum == 0x9E3779B9u) *sink = sum;   // of memory that is zero never
}

}  // namespace

double read_bandwidth() {
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total));
  const size_t block_bytes = kThreads * kLoads * sizeof(uint4);
  const size_t blocks = std::min<size_t>(size_t{8} << 30, free / 2) / block_bytes;
  uint4* memory = nullptr;
  check(cudaMalloc(&memory, blocks * block_bytes));
  check(cudaMemset(memory, 0, blocks * block_bytes));
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  float best = 1e30f;
  for (int i = 0; i < 12; ++i) {
    check(cudaEventRecord(begin));
    read_kernel<<<static_cast<unsigned>(blocks), kThreads>>>(memory, reinterpret_cast<unsigned*>(memory));
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end));
    best = std::min(best, ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaFree(memory);
  return static_cast<double>(blocks * block_bytes) / (best * 1e-3);
}
