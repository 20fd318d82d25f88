// Fragments of mma.sync in shared memory, and the instructions of attention that C++ has no name for.
#pragma once

#include "cuda/device.cuh"

namespace kdt::cuda {

using SharedAddress = uint32_t;   // of shared memory, in bytes

__device__ inline SharedAddress shared_address(const void* shared) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(shared));
}

// Four 8 x 8 matrices of BF16: lanes 8i … 8i + 7 give the addresses of the rows of matrix i. Of each, a lane gets elements
// 2 (lane % 4) and the next of row lane / 4; `transposed`: rows 2 (lane % 4) and the next of column lane / 4.
__device__ inline void load_matrices(uint32_t (&m)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
}
__device__ inline void load_transposed(uint32_t (&m)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
}
// Two of them: lanes 0 … 15 give the addresses.
__device__ inline void load_transposed(uint32_t (&m)[2], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(m[0]), "=r"(m[1]) : "r"(row) : "memory");
}

__device__ inline void store_shared(SharedAddress to, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" :: "r"(to), "r"(word) : "memory");
}
__device__ inline void store_zeros(SharedAddress to) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" :: "r"(to), "r"(0) : "memory");
}

// Sixteen bytes to shared memory, asynchronously; zeros, and nothing is read, unless `real`.
__device__ inline void cp_async16(SharedAddress to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}

// Two numbers as fp16, the largest finite ones for what is larger.
__device__ inline uint32_t two_halves(float low, float high) {
  uint32_t two;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
}

// 2 to the x, as the hardware has it: 0 for -inf, subnormal results are 0.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace kdt::cuda
