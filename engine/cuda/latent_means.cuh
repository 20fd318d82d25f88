// The merge of latent attention for passes of many rows, as two kernels with the bits of latent_merge.cuh's one: the means of every
// (row, head) by a block of their own, so that many are under way; and what comes of them through W_UV, whose fragments serve 64 rows.
#pragma once

#include "cuda/latent_merge.cuh"

namespace kdt::cuda {

constexpr int kMeanWidth = 512, kMeanThreads = kMeanWidth / 8, kMeanWarps = kMeanThreads / kWarp;

struct MergeMany {
  Merge merge;
  bf16* attended;                 // [rows][heads][stride]
  int32_t stride;                 // elements
};

inline size_t means_bytes(int64_t n_segments) { return static_cast<size_t>(kMeanWarps * n_segments * 4); }

// Grid: x heads, y rows. A thread has eight elements of all segments; a warp has the segments' weights for itself.
__global__ void __launch_bounds__(kMeanThreads, 8) means_kernel(const __grid_constant__ MergeMany many) {
  constexpr int kAtOnce = kSegmentGroups;   // loads of a thread under way
  extern __shared__ __align__(16) float weights[];
  const Merge& p = many.merge;
  const int head = blockIdx.x, row = blockIdx.y, warp = threadIdx.x / kWarp;
  const bool live = row < p.pass.live();
  const int n = live ? LatentSegments::count(p.pass.position[p.pass.first + row] + 1) : 0;
  wait_for_previous();
  let_next_start();
  if (!live) return;
  const int64_t column = static_cast<int64_t>(row) * p.n_heads + head;
  const auto* from = reinterpret_cast<const uint4*>(p.means + column * p.n_segments * kMeanWidth) + threadIdx.x;
  uint4 v[kAtOnce];
  const auto load = [&](int first) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (first + k < n) v[k] = __ldcg(from + static_cast<int64_t>(first + k) * kMeanThreads);
  };
  load(0);                               // on their way before the weights are known
  float* weight = weights + warp * p.n_segments;
  const float sum_of_weights = weigh_segments(p.extremes + column * p.n_segments, n, weight);
  __syncwarp();

  float o[kSegmentGroups][8] = {};
  for (int first = 0; first < n; load(first += kAtOnce))
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (first + k < n) {
        const float w = weight[first + k];
        const uint32_t two[4] = {v[k].x, v[k].y, v[k].z, v[k].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 of_two = __half22float2(*reinterpret_cast<const __half2*>(&two[j]));
          o[k][j * 2] = fmaf(w, of_two.x, o[k][j * 2]), o[k][j * 2 + 1] = fmaf(w, of_two.y, o[k][j * 2 + 1]);
        }
      }
  bf16* to = many.attended + column * many.stride;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int step = 1; step < kSegmentGroups; step *= 2)
#pragma unroll
      for (int g = 0; g + step < kSegmentGroups; g += 2 * step) o[g][j] = __fadd_rn(o[g][j], o[g + step][j]);
    const SumPlace place = place_of_sum<4>(static_cast<int>(threadIdx.x) * 8 + j);
    const int dim = place.step * 16 + place.within;
    if (dim < many.stride) to[dim] = __float2bfloat16_rn(dim < p.value_dims ? __fdiv_rn(o[0][j], sum_of_weights) : 0.0f);
  }
}

constexpr int kProjectWarps = 8, kProjectThreads = kProjectWarps * kWarp;
constexpr int kProjectGroups = 8, kProjectRows = kProjectGroups * 8, kProjectOutputs = kProjectWarps * 16;
constexpr int kProjectRow = kMeanWidth + 16;   // from row to row, in shared memory
constexpr int kProjectBytes = kProjectRows * kProjectRow * 2;

// Grid: x chunks of rows, y heads, z sets of W_UV's tiles, one a warp.
__global__ void __launch_bounds__(kProjectThreads, 2) project_kernel(const __grid_constant__ MergeMany many) {
  constexpr int kSteps = kMeanWidth / 16 / kInputParts;   // of a part, at most
  extern __shared__ __align__(16) std::byte shared_bytes[];
  const Merge& p = many.merge;
  auto* rows = reinterpret_cast<bf16*>(shared_bytes);
  const int first = blockIdx.x * kProjectRows, head = blockIdx.y, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int tile = blockIdx.z * kProjectWarps + warp, tiles = static_cast<int>(tiles_of(p.v_head));
  const int steps = static_cast<int>(steps_of(p.value_dims)), of_part = (steps + kInputParts - 1) / kInputParts;
  const int n_rows = min(p.pass.live() - first, kProjectRows);
  const void* weight = p.w_uv[head].data;
  uint32_t next[kSteps][4] = {};
  const auto fetch = [&](int part) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      if (tile < tiles && s < of_part && part * of_part + s < steps)
        load_a(next[s], fragment_at(weight, tile, part * of_part + s, steps, lane));
  };
  fetch(0);
  wait_for_previous();
  let_next_start();
  if (n_rows <= 0) return;
  const bf16* from = many.attended + (static_cast<int64_t>(first) * p.n_heads + head) * many.stride;
  const int chunks = steps * 2;                            // of eight dims
  for (int i = threadIdx.x; i < n_rows * chunks; i += kProjectThreads) {
    const int row = i / chunks, chunk = i % chunks;
    cp_async16(shared_address(rows + row * kProjectRow + chunk * 8), from + static_cast<int64_t>(row) * p.n_heads * many.stride + chunk * 8,
               true);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();

  const bf16* column = rows + lane / 4 * kProjectRow + lane % 4 * 4;   // rows past the last are dropped
  float total[kProjectGroups][4];
#pragma unroll 1
  for (int part = 0; part < kInputParts; ++part) {
    uint32_t a[kSteps][4];
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[s][i] = next[s][i];
    if (part + 1 < kInputParts) fetch(part + 1);
    float sum[kProjectGroups][4] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int step = part * of_part + s;
      if (s >= of_part || step >= steps) break;
#pragma unroll
      for (int g = 0; g < kProjectGroups; ++g) {
        const uint2 b = *reinterpret_cast<const uint2*>(column + g * 8 * kProjectRow + step * 16);
        mma(sum[g], a[s], {b.x, b.y});
      }
    }
#pragma unroll
    for (int g = 0; g < kProjectGroups; ++g)
#pragma unroll
      for (int i = 0; i < 4; ++i) total[g][i] = part == 0 ? sum[g][i] : __fadd_rn(total[g][i], sum[g][i]);
  }
  __syncthreads();                                         // rows become outputs
#pragma unroll
  for (int g = 0; g < kProjectGroups; ++g)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      rows[(g * 8 + lane % 4 * 2 + i % 2) * kProjectRow + warp * 16 + lane / 4 + i / 2 * 8] = __float2bfloat16_rn(total[g][i]);
  __syncthreads();
  const int first_output = blockIdx.z * kProjectOutputs, n_outputs = min(p.v_head - first_output, kProjectOutputs);
  for (int i = threadIdx.x; i < n_rows * kProjectOutputs; i += kProjectThreads) {
    const int row = i / kProjectOutputs, o = i % kProjectOutputs;
    if (o < n_outputs)
      p.out[(static_cast<int64_t>(first + row) * p.n_heads + head) * p.v_head + first_output + o] = rows[row * kProjectRow + o];
  }
}

}  // namespace kdt::cuda
