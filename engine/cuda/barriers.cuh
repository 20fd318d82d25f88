// Barriers in shared memory (mbarrier), and what warps of different jobs in one block meet at. Of 9.0 and later.
#pragma once

#include "cuda/fragments.cuh"

namespace kdt::cuda {

// A barrier in shared memory: a phase ends when `count` have arrived; phases have parity 0, 1, 0, …
__device__ inline void barrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(count) : "memory");
}
__device__ inline void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}
// The same; the phase ends when so many bytes have been brought besides.
__device__ inline void barrier_arrive(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
#endif
}
// Waits for the end of the phase of that parity.
__device__ inline void barrier_wait(uint64_t* barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
#endif
}

// A place in a ring of stages, and the parity of the phases of its barriers.
template <int kStages>
struct Place {
  int at = 0, phase = 0;
  __device__ void next() {
    if (++at == kStages) at = 0, phase ^= 1;
  }
};

// `threads` of a block meet at the named barrier. 0 is __syncthreads'.
__device__ inline void meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

// Registers of each thread of the calling warpgroup, from here on.
template <int kRegisters>
__device__ inline void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ inline void give_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(kRegisters));
#endif
}

}  // namespace kdt::cuda
