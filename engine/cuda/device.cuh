// What every kernel of this folder uses: counts, BF16, the tensor core instruction, sums over a warp and a block.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/cuda_backend.h"

namespace kdt::cuda {

using bf16 = __nv_bfloat16;

constexpr int kWarp = 32;

__host__ __device__ constexpr int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// A Count as kernels take it.
struct LiveRows {
  int32_t most;
  const int32_t* live;
  explicit LiveRows(const Count& count) : most(static_cast<int32_t>(count.most)), live(count.live) {}
  __device__ int32_t get() const { return live ? min(*live, most) : most; }
};

// The same of a Count in arguments that reach a kernel whole.
__device__ inline int32_t live_rows(const Count& count) {
  const auto most = static_cast<int32_t>(count.most);
  return count.live ? min(*count.live, most) : most;
}

// Which element row i of a RowLayout begins at.
__device__ inline int64_t row_at(const RowLayout& layout, int64_t i, int64_t width) {
  return (layout.index ? layout.index[i] : i) * (layout.stride > 0 ? layout.stride : width);
}

// D = A B + D of one warp: A 16 x 16 BF16 (rows are outputs), B 16 x 8 BF16 (columns are tokens), fp32 sums.
__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Sixteen bytes of weights: read once, not worth keeping in L1.
__device__ inline uint4 load_once(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// Asks for memory that will be read soon: it is in the L2 cache then, or on its way. What is written to it meanwhile is seen.
// Whole pieces of 16 bytes, as aligned.
__device__ inline void ask_for(const void* data, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(data), "r"(bytes) : "memory");
#endif
}

// Asynchronous copies of 16 or 8 bytes to an address of shared memory, in groups: cp_async_wait<n> waits for all of this
// thread's groups but the last n.
__device__ inline void cp_async16(uint32_t shared, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(shared), "l"(from) : "memory");
}
__device__ inline void cp_async8(uint32_t shared, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(shared), "l"(from) : "memory");
}
__device__ inline void cp_async16(void* shared, const void* from) {
  cp_async16(static_cast<uint32_t>(__cvta_generic_to_shared(shared)), from);
}
// Sixteen bytes of weights, read once: the L2 cache gives up their lines before others.
__device__ inline void copy_once16(uint32_t shared, const void* from) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;"
               :: "r"(shared), "l"(from), "l"(policy) : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(kPending) : "memory"); }

// Kernels that start while the one before still runs (compute capability 9.0): a kernel of launch_overlapping calls
// wait_for_previous in every block, before it touches what earlier kernels write or writes what they read; what it does before,
// such as fetching weights, is hidden. let_next_start: the next kernel, if it is of that kind, may take the room that is left.
// All but absorb_kernel call it after wait_for_previous. So what kernels before the one before wrote may be read early. Blocks of
// down_kernel (experts.cu) wait for what they read by counts; enough others of it wait for all of the kernel before.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The same order of additions whatever is summed: bits depend on the values alone.
__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

__device__ inline float warp_max(float value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
}

// Throws unless the launch before it was accepted.
inline void launched(const char* kernel) { check(cudaGetLastError(), kernel); }

// Whether a kernel's code is for 9.0 or later: clusters of blocks, and kernels that overlap.
template <class Args>
bool has_clusters(const char* name, void (*kernel)(Args)) {
  cudaFuncAttributes compiled{};
  check(cudaFuncGetAttributes(&compiled, kernel), name);
  return compiled.ptxVersion >= 90;
}

// Whether a kernel's code is that of sm_90a.
template <class Args>
bool is_hopper(const char* name, void (*kernel)(Args)) {
  cudaFuncAttributes compiled{};
  check(cudaFuncGetAttributes(&compiled, kernel), name);
  return compiled.binaryVersion == 90 && compiled.ptxVersion == 90;
}

// Of the current device. What is made of it must not show in the bits.
inline int multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

// Queues a kernel that calls wait_for_previous; `cluster` blocks along x make a cluster. Where its code is older than 9.0 it waits
// like any other, and there are no clusters.
template <class Args>
void launch_overlapping(const char* name, void (*kernel)(Args), dim3 grid, unsigned threads, size_t shared, cudaStream_t stream,
                        const Args& args, unsigned cluster = 1) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = !has_clusters(name, kernel) ? 0 : cluster > 1 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, args), name);
}

}  // namespace kdt::cuda
