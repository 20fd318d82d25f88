// wgmma of sm_90a: D = A B + D of a warpgroup, A 64 x 16 BF16, B 16 x kN BF16, both in shared memory, fp32 sums in registers.
//
// Shared memory is in rows of 128 bytes, eight of them an atom that begins on a border of 1024; the 16-byte chunks c of row r
// lie at c ^ (r % 8). Operands whose rows run along K, and A whose rows run along its 64 outputs, are both made of these atoms,
// 1024 bytes apart. With K in the same groups of 16 in the same order the sums have the bits of mma.sync m16n8k16.
#pragma once

#include "cuda/fragments.cuh"

namespace kdt::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHasWgmma = true;
#else
constexpr bool kHasWgmma = false;
#endif

// The descriptor of an operand at an address.
__device__ inline uint64_t wgmma_operand(SharedAddress at) {
  constexpr uint64_t kAtom = 1024 >> 4, kSwizzle128 = 1;
  return (at & 0x3FFFF) >> 4 | kAtom << 16 | kAtom << 32 | kSwizzle128 << 62;
}

// What threads wrote to shared memory is seen by the wgmma of all that they meet afterwards.
__device__ inline void fence_shared() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// The calling thread's warpgroup, in a way that shows the compiler that a warp's lanes agree.
__device__ inline int warpgroup() { return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / (4 * kWarp), 0); }

// Around a run of wgmma: begin for each of its sums, then fence, the run, commit; wait, and begin for each before they are read.
template <int kSums>
__device__ inline void wgmma_begin(float (&d)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}
__device__ inline void wgmma_fence() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ inline void wgmma_commit() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
__device__ inline void wgmma_wait() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
}

// kAcross: rows of A in shared memory run along its outputs. Sums of warp w, for column tile j: d[4j …] as mma.sync has them,
// of outputs 16 w to 16 w + 15.
template <bool kAcross>
__device__ inline void wgmma(float (&d)[4], uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, %6, 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b), "n"(kAcross ? 1 : 0));
#endif
}
template <bool kAcross>
__device__ inline void wgmma(float (&d)[8], uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, 1, 1, 1, %10, 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
               : "l"(a), "l"(b), "n"(kAcross ? 1 : 0));
#endif
}
template <bool kAcross>
__device__ inline void wgmma(float (&d)[16], uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, 1, 1, 1, %18, 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
               : "l"(a), "l"(b), "n"(kAcross ? 1 : 0));
#endif
}
template <bool kAcross>
__device__ inline void wgmma(float (&d)[32], uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
               "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, %34, 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
               : "l"(a), "l"(b), "n"(kAcross ? 1 : 0));
#endif
}

// Two (or four) 8 x 8 matrices to shared memory, transposed: a lane has elements 2 (lane % 4) and the next of column lane / 4.
__device__ inline void store_transposed(SharedAddress row, uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" :: "r"(row), "r"(a), "r"(b) : "memory");
#endif
}

}  // namespace kdt::cuda
