// The RMS norm of a row by a block.
#pragma once

#include <algorithm>

#include "cuda/device.cuh"

namespace kdt::cuda {

constexpr int kChunk = 8;              // elements that a thread takes at a time: 16 bytes of BF16
constexpr int kNormThreads = 1024;     // at most

__device__ inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

__device__ inline void to_floats(float (&v)[kChunk], const uint4& bits) {
  const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&bits);
#pragma unroll
  for (int j = 0; j < kChunk / 2; ++j) {
    const float2 two = __bfloat1622float2(pairs[j]);
    v[2 * j] = two.x, v[2 * j + 1] = two.y;
  }
}

// Elements [kChunk i, kChunk (i + 1)) of a row of `width`, zeros past its end: the same values however it is aligned.
__device__ inline void load_chunk(float (&v)[kChunk], const bf16* row, int i, int width, bool aligned) {
  const bf16* from = row + i * kChunk;
  if (aligned && (i + 1) * kChunk <= width) {
    to_floats(v, *reinterpret_cast<const uint4*>(from));
  } else {
#pragma unroll
    for (int j = 0; j < kChunk; ++j) v[j] = i * kChunk + j < width ? __bfloat162float(from[j]) : 0.0f;
  }
}

__device__ inline void load_chunk(float (&v)[kChunk], const float* row, int i, int width, bool aligned) {
  const float* from = row + i * kChunk;
  if (aligned && (i + 1) * kChunk <= width) {
    const auto* quads = reinterpret_cast<const float4*>(from);
    const float4 low = quads[0], high = quads[1];
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
  } else {
#pragma unroll
    for (int j = 0; j < kChunk; ++j) v[j] = i * kChunk + j < width ? from[j] : 0.0f;
  }
}

__device__ inline void store_chunk(const float (&v)[kChunk], bf16* row, int i, int width, bool aligned) {
  bf16* to = row + i * kChunk;
  if (aligned && (i + 1) * kChunk <= width) {
    uint4 bits;
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(&bits);
#pragma unroll
    for (int j = 0; j < kChunk / 2; ++j) pairs[j] = __floats2bfloat162_rn(v[2 * j], v[2 * j + 1]);
    *reinterpret_cast<uint4*>(to) = bits;
  } else {
#pragma unroll
    for (int j = 0; j < kChunk; ++j)
      if (i * kChunk + j < width) to[j] = __float2bfloat16_rn(v[j]);
  }
}

struct Norm {
  LiveRows n;
  int32_t width;
  float eps;
  const bf16* x;
  RowLayout x_rows;
  const float* weight;
  bf16* out;
  RowLayout out_rows;
};

// Threads that a row of a width takes: its bits depend on it.
inline int64_t norm_threads(int64_t width) {
  return std::min<int64_t>(divide_up(divide_up(width, kChunk), kWarp) * kWarp, kNormThreads);
}

// Row `row` by the block's first `threads` threads, all of whom call it. `before` is called when the weights are on their way,
// and says whether there is such a row. Thread t sums the squares of chunks t, t + threads, … (its first one last), then lanes
// and warps are added in their order: it follows from the width, as the number of threads does. `load(v, i)` gives a thread
// its chunk i once, as it is or will be in x; what is not kept is read from there afterwards.
template <class F, class L>
__device__ inline void norm_row(const Norm& p, int64_t row, int threads, const F& before, const L& load) {
  __shared__ __align__(16) float warp_sums[kNormThreads / kWarp];
  const int n_chunks = static_cast<int>(divide_up(p.width, kChunk));
  const int first = threadIdx.x, step = threads;
  const bool weight_aligned = aligned16(p.weight), taking = first < threads;
  float v[kChunk] = {}, w[kChunk] = {};
  if (taking && first < n_chunks) load_chunk(w, p.weight, first, p.width, weight_aligned);
  if (threadIdx.x < kNormThreads / kWarp) warp_sums[threadIdx.x] = 0;
  __syncthreads();
  if (!before()) return;
  const bf16* x = p.x + row_at(p.x_rows, row, p.width);
  bf16* out = p.out + row_at(p.out_rows, row, p.width);
  const bool x_aligned = aligned16(x), out_aligned = aligned16(out);
  const auto squares = [&](float sum) {
#pragma unroll
    for (int j = 0; j < kChunk; ++j) sum = __fmaf_rn(v[j], v[j], sum);
    return sum;
  };
  if (taking) {
    float sum = 0;
    for (int i = first + step; i < n_chunks; i += step) {
      load(v, i);
      sum = squares(sum);
    }
    if (first < n_chunks) {   // last, as it stays in registers
      load(v, first);
      sum = squares(sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % kWarp == 0) warp_sums[threadIdx.x / kWarp] = sum;
  }
  __syncthreads();
  if (!taking) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kNormThreads / kWarp; i += 4) {   // past the last warp zeros, which change no bit
    const float4 four = *reinterpret_cast<const float4*>(warp_sums + i);
    sum += four.x, sum += four.y, sum += four.z, sum += four.w;
  }
  const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(sum, static_cast<float>(p.width)) + p.eps));
  const auto scaled = [&](int i) {
    float y[kChunk];
#pragma unroll
    for (int j = 0; j < kChunk; ++j) y[j] = v[j] * scale * w[j];
    store_chunk(y, out, i, p.width, out_aligned);
  };
  if (first < n_chunks) scaled(first);
  for (int i = first + step; i < n_chunks; i += step) {
    load_chunk(v, x, i, p.width, x_aligned);
    load_chunk(w, p.weight, i, p.width, weight_aligned);
    scaled(i);
  }
}

template <class F>
__device__ inline void norm_row(const Norm& p, int64_t row, int threads, const F& before) {
  norm_row(p, row, threads, before, [&](float (&v)[kChunk], int i) {
    const bf16* x = p.x + row_at(p.x_rows, row, p.width);
    load_chunk(v, x, i, p.width, aligned16(x));
  });
}

}  // namespace kdt::cuda
