// wgmma with A in registers, for products of many rows: weights are the 64 rows of A, tokens the columns of B. A lane of warp w has
// of A what mma.sync m16n8k16 has of rows 16 w to 16 w + 15, and of the sums, for tokens 8 j to 8 j + 7, d[4j …] as mma.sync has them.
#pragma once

#include "cuda/wgmma.cuh"

namespace kdt::cuda {

// D = A B, or with `add` A B + D. B is [kTokens][64] in shared memory, rows along K (wgmma_operand). A's registers hold still until the
// run has been waited for.
template <int kTokens>
__device__ void wgmma_rows(float (&d)[kTokens / 2], const uint32_t (&a)[4], uint64_t b, bool add);

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define KDT_SUMS_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
  "+f"(d[i + 7])
#define KDT_WGMMA_ROWS(tokens, sums, a0, a1, a2, a3, at_b, at_add, ...) \
  template <> \
  __device__ inline void wgmma_rows<tokens>(float (&d)[tokens / 2], const uint32_t (&a)[4], uint64_t b, bool add) { \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #at_add ", 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" #tokens "k16.f32.bf16.bf16 {" sums "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 \
                 "}, %" #at_b ", add, 1, 1, 0;\n}" \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add))); \
  }
#define KDT_NAMES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define KDT_NAMES_16 KDT_NAMES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define KDT_NAMES_24 KDT_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define KDT_NAMES_32 KDT_NAMES_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define KDT_NAMES_40 KDT_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define KDT_NAMES_48 KDT_NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define KDT_NAMES_56 KDT_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define KDT_NAMES_64 KDT_NAMES_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
KDT_WGMMA_ROWS(16, KDT_NAMES_8, 8, 9, 10, 11, 12, 13, KDT_SUMS_8(0))
KDT_WGMMA_ROWS(32, KDT_NAMES_16, 16, 17, 18, 19, 20, 21, KDT_SUMS_8(0), KDT_SUMS_8(8))
KDT_WGMMA_ROWS(48, KDT_NAMES_24, 24, 25, 26, 27, 28, 29, KDT_SUMS_8(0), KDT_SUMS_8(8), KDT_SUMS_8(16))
KDT_WGMMA_ROWS(64, KDT_NAMES_32, 32, 33, 34, 35, 36, 37, KDT_SUMS_8(0), KDT_SUMS_8(8), KDT_SUMS_8(16), KDT_SUMS_8(24))
KDT_WGMMA_ROWS(128, KDT_NAMES_64, 64, 65, 66, 67, 68, 69, KDT_SUMS_8(0), KDT_SUMS_8(8), KDT_SUMS_8(16), KDT_SUMS_8(24),
               KDT_SUMS_8(32), KDT_SUMS_8(40), KDT_SUMS_8(48), KDT_SUMS_8(56))
#undef KDT_SUMS_8
#undef KDT_WGMMA_ROWS
#undef KDT_NAMES_8
#undef KDT_NAMES_16
#undef KDT_NAMES_24
#undef KDT_NAMES_32
#undef KDT_NAMES_40
#undef KDT_NAMES_48
#undef KDT_NAMES_56
#undef KDT_NAMES_64
#else
template <int kTokens>
__device__ void wgmma_rows(float (&)[kTokens / 2], const uint32_t (&)[4], uint64_t, bool) {}
#endif

// Waits for all of the warpgroup's runs but the last kRuns.
template <int kRuns>
__device__ inline void wgmma_wait_but() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(kRuns) : "memory");
#endif
}
// What a run reads stays where it is until here.
template <int kFragments>
__device__ inline void wgmma_hold(uint32_t (&a)[kFragments][4]) {
#pragma unroll
  for (int f = 0; f < kFragments; ++f)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[f][i]) :: "memory");
}

// Contiguous bytes, a multiple of 16 and so aligned, by the copy engine; the barrier, of which as many are expected, is told.
__device__ inline void bring_bytes(SharedAddress to, const void* from, int bytes, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(to), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
#endif
}

}  // namespace kdt::cuda
