// Rows over the vocabulary: how they are shared out, how logits are ordered, and what is found by counting.
//
// A row is cut into pieces of kPiece tokens, one block each, whatever else is in the batch: sums of a piece and of all
// pieces have an order that the width alone decides. Everything else here is a maximum or a sum of integers, which have
// no order.
#pragma once

#include "base/philox.h"
#include "cuda/device.cuh"

namespace kdt::cuda {

constexpr int kPiece = 4096;          // tokens of a block
constexpr int kPieceThreads = 256;
constexpr int kLoads = 16;            // elements of a piece that fall to one thread
constexpr int kMaxBlockThreads = 1024;
constexpr uint32_t kAllLanes = 0xffffffffu;

size_t sample_work_bytes(int64_t rows, int64_t vocab);   // sample.cu

inline int32_t pieces_of(int64_t vocab) { return static_cast<int32_t>(divide_up(vocab, kPiece)); }

__device__ inline float rankable(float x) { return x == x ? x : -INFINITY; }

// Ascends with the float: NaN as -inf, -0 as 0. No float has key 0.
__device__ inline uint32_t order_key(float x) {
  const uint32_t bits = __float_as_uint(x == 0 ? 0.0f : rankable(x));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline float of_order_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Ascends with the rank of (logit, token): larger logits first, of equal ones the lower id. Every token's is its own.
__device__ inline uint64_t rank_key(float x, uint32_t token) {
  return static_cast<uint64_t>(order_key(x)) << 32 | ~token;
}
__device__ inline float logit_of(uint64_t key) { return of_order_key(static_cast<uint32_t>(key >> 32)); }
__device__ inline int32_t token_of(uint64_t key) { return static_cast<int32_t>(~static_cast<uint32_t>(key)); }

// Gumbel noise of these bits is no larger: -log(-log(u)) <= -log(1 - u), and 1 - u >= 2^-(1 + clz(~bits)).
constexpr double kLn2Above = 0.6931471805599454;
constexpr double kMostNoise = 33 * kLn2Above;   // of any bits
__device__ inline double gumbel_bound(uint32_t bits) {
  return static_cast<double>(1 + __clz(static_cast<int>(~bits))) * kLn2Above;
}

// The noise itself. One body for all kernels: what one has counted another finds again, to the bit.
__device__ __noinline__ static double noise_of(uint32_t bits) { return gumbel(bits); }

// Element j of a thread's kBatch among kBatch * kThreads from `begin` on: ascending in j.
template <int kThreads>
__device__ inline int32_t element(int32_t begin, int j) {
  return begin + (j / 4 * kThreads + static_cast<int>(threadIdx.x)) * 4 + j % 4;
}

// Those below `end`; the others are left alone. `begin` is a multiple of 4.
template <int kThreads, int kBatch>
__device__ inline void load_elements(float (&x)[kBatch], const float* row, int32_t begin, int32_t end) {
  const bool aligned = reinterpret_cast<uintptr_t>(row) % 16 == 0;
#pragma unroll
  for (int j = 0; j < kBatch; j += 4) {
    const int32_t at = element<kThreads>(begin, j);
    if (aligned && at + 4 <= end) {
      const float4 v = *reinterpret_cast<const float4*>(row + at);
      x[j] = v.x, x[j + 1] = v.y, x[j + 2] = v.z, x[j + 3] = v.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (at + i < end) x[j + i] = row[at + i];
    }
  }
}

// each(token, logit) for a thread's part of [begin, end), of which it loads kBatch at once. Tokens ascend.
template <int kThreads, int kBatch, class Each>
__device__ inline void for_elements(const float* row, int32_t begin, int32_t end, Each&& each) {
#pragma unroll 1
  for (; begin < end; begin += kBatch * kThreads) {
    float x[kBatch];
    load_elements<kThreads>(x, row, begin, end);
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (const int32_t token = element<kThreads>(begin, j); token < end) each(token, x[j]);
  }
}

__device__ inline uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

// The largest of a warp's keys, or of a block's, for all threads. `shared`: one place a warp.
__device__ inline uint64_t warp_largest(uint64_t key) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) key = larger(key, __shfl_xor_sync(kAllLanes, key, step));
  return key;
}

template <int kThreads>
__device__ inline uint64_t block_largest(uint64_t key, uint64_t* shared) {
  key = warp_largest(key);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = key;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / kWarp; ++i) key = larger(key, shared[i]);
  __syncthreads();
  return key;
}

// The largest of a block's floats, and their sum in an order that its size decides, for all threads. `shared`: one place a
// warp.
template <int kThreads>
__device__ inline float block_maximum(float value, float* shared) {
  value = warp_max(value);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = warp_max(shared[threadIdx.x % kWarp % (kThreads / kWarp)]);
  __syncthreads();
  return value;
}

template <int kThreads>
__device__ inline float block_sum(float value, float* shared) {
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = shared[0];
#pragma unroll
  for (int i = 1; i < kThreads / kWarp; ++i) value += shared[i];
  __syncthreads();
  return value;
}

// The sum of the values of a warp's first kLanes lanes up to this one's.
template <int kLanes = kWarp, class T>
__device__ inline T warp_sum_until(T value) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const T other = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// The sum of the values of the threads before this one, and of all. `shared`: one place a warp. Integers.
template <int kThreads, class T>
__device__ inline T sum_before(T value, T* shared, T& total) {
  constexpr int kWarps = kThreads / kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const T sum = warp_sum_until(value);
  if (lane == kWarp - 1) shared[warp] = sum;
  __syncthreads();
  const T own = lane < kWarps ? shared[lane] : 0, until = warp_sum_until<kWarps>(own);
  total = __shfl_sync(kAllLanes, until, kWarps - 1);
  const T before = __shfl_sync(kAllLanes, until - own, warp);
  __syncthreads();
  return before + sum - value;
}

// Where `need` is reached, counting from the last of kBins bins down: need <= above + inside, and above < need.
template <class T>
struct Bin {
  uint32_t bin;
  T above, inside;
};

// get(bin) is its count. `shared` is the block's. For 0 < need <= the sum of all.
template <class T>
struct BinScratch {
  T warps[kMaxBlockThreads / kWarp];
  Bin<T> found;
};

template <int kThreads, int kBins, class T, class Get>
__device__ inline Bin<T> find_bin(T need, Get&& get, BinScratch<T>& shared) {
  constexpr int kPer = kBins / kThreads;
  static_assert(kPer * kThreads == kBins);
  T count[kPer], sum = 0, total;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    count[i] = get(kBins - 1 - (static_cast<int>(threadIdx.x) * kPer + i));
    sum += count[i];
  }
  T above = sum_before<kThreads>(sum, shared.warps, total);
  if (above < need && need <= above + sum) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (above < need && need <= above + count[i])
        shared.found = {static_cast<uint32_t>(kBins - 1 - (static_cast<int>(threadIdx.x) * kPer + i)), above, count[i]};
      above += count[i];
    }
  }
  __syncthreads();
  const Bin<T> found = shared.found;
  __syncthreads();
  return found;
}

// Keys of shared memory, descending; size is a power of two.
template <int kThreads>
__device__ inline void sort_keys(uint64_t* key, int size) {
  for (int width = 2; width <= size; width *= 2) {
    for (int stride = width / 2; stride > 0; stride /= 2) {
      for (int i = threadIdx.x; i < size / 2; i += kThreads) {
        const int low = 2 * i - (i & (stride - 1)), high = low + stride;
        const uint64_t a = key[low], b = key[high];
        if ((a < b) == ((low & width) == 0)) key[low] = b, key[high] = a;
      }
      __syncthreads();
    }
  }
}

// The least power of two that is no less, at least 2.
__device__ inline int power_above(int n) { return n <= 2 ? 2 : 1 << (32 - __clz(n - 1)); }

}  // namespace kdt::cuda
