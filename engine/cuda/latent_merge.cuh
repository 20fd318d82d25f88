// What latent attention does after the fold: the merge of segments' sums, and that through every head's W_UV.
#pragma once

#include <cuda_fp16.h>

#include "cuda/attention.cuh"
#include "cuda/latent_fold.cuh"

namespace kdt::cuda {

constexpr int kMergeWarps = 16, kSumThreads = kMergeWarps * kWarp;
constexpr int kSegmentGroups = 8;
constexpr int kInputParts = 8;    // of W_UV's inputs, whose sums are added in order
constexpr int kTileSets = kMergeWarps / kInputParts;   // of tiles of W_UV's outputs, that warps of one part share out

struct Merge {
  Pass pass;
  int32_t n_heads, value_dims, n_segments;
  const uint16_t* means;          // fp16 [rows][heads][segments][128 kM]
  const float2* extremes;         // [rows][heads][segments] m, l
  const Matrix* w_uv;             // [heads] of [v_head, value_dims], in the backend's memory
  int32_t v_head;
  bf16* out;                      // [rows][heads][v_head], of the pass's first row on
};

// How a block merges kRows rows of a head, and has kTiles tiles of W_UV a warp. Threads that have the same eight elements share
// out the groups of a row's segments.
template <int kM, int kRows, int kTiles>
struct MergeShape {
  static constexpr int kWidth = 128 * kM, kLanes = kWidth / 8, kSlots = kSumThreads / kLanes;
  static constexpr int kShares = kSlots / kRows < kSegmentGroups ? kSlots / kRows : kSegmentGroups;   // of a row's groups
  static constexpr int kGroups = kSegmentGroups / kShares;   // of a thread
  static_assert(kRows * kShares <= kSlots && kRows <= 8);
  static constexpr int kOutputs = kTileSets * kTiles * 16;
  static constexpr int kStride = kWidth + 8, kProjectStride = kOutputs + 4;   // from row to row, in shared memory
  static constexpr int64_t kPartialBytes = kShares > 1 ? kShares * kRows * kWidth * 4 : 0;
  static constexpr int64_t kAttendedBytes = kRows * kStride * 2;
  static constexpr int64_t kProjectBytes = kInputParts * kRows * kProjectStride * 4;
  static constexpr int64_t bytes(int64_t n_segments) {
    return kPartialBytes + kAttendedBytes + kProjectBytes + kRows * n_segments * 4;
  }
};

// By a warp: what each of n segments weighs in a row's mean, and the sum of that in every lane.
__device__ inline float weigh_segments(const float2* extremes, int n, float* weight) {
  const int lane = threadIdx.x % kWarp;
  float2 mine = lane < n ? extremes[lane] : make_float2(-INFINITY, 0.0f);
  float most = mine.x, total = 0;
  for (int s = lane + kWarp; s < n; s += kWarp) most = fmaxf(most, extremes[s].x);
  most = warp_max(most);
  for (int s = lane; s < n; s += kWarp) {
    if (s != lane) mine = extremes[s];
    const float w = __fmul_rn(exp2_fast(mine.x - most), mine.y);
    weight[s] = w;
    total = __fadd_rn(total, w);
  }
  return warp_sum(total);
}

// Grid: x shares of W_UV's tiles, y heads, z chunks of rows. With M the largest m, w = l 2^(m - M): Σ w mean / Σ w. Segments go
// by number modulo 8 into eight sums, ascending in each, then by pairs; of w by number modulo 32, then a butterfly.
// W_UV's inputs are shared out among the warps in contiguous ranges of K steps, whose sums are added in order; they are on their
// way before the kernel before has ended.
template <int kM, int kRows, int kTiles>
__global__ void __launch_bounds__(kSumThreads) merge_kernel(const __grid_constant__ Merge p) {
  using Shape = MergeShape<kM, kRows, kTiles>;
  constexpr int kWidth = Shape::kWidth, kLanes = Shape::kLanes, kShares = Shape::kShares, kGroups = Shape::kGroups;
  constexpr int kSteps = 8 * kM / kInputParts, kAtOnce = 8;   // K steps of a warp; loads of a thread under way
  extern __shared__ __align__(16) std::byte shared_bytes[];
  __shared__ float total_of[kRows];
  const int head = blockIdx.y, first = blockIdx.z * kRows;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  auto* partial = reinterpret_cast<float4*>(shared_bytes);                                       // [shares][rows][2][lanes]
  auto* attended = reinterpret_cast<bf16*>(shared_bytes + Shape::kPartialBytes);                 // [rows][stride]
  auto* projected = reinterpret_cast<float*>(shared_bytes + Shape::kPartialBytes + Shape::kAttendedBytes);
  float* weight_of = projected + Shape::kProjectBytes / 4;                                       // [rows][segments]

  const int tiles = static_cast<int>(tiles_of(p.v_head)), steps = static_cast<int>(steps_of(p.value_dims));
  const int of_warp = (steps + kInputParts - 1) / kInputParts, part = warp % kInputParts;
  const int begin = min(part * of_warp, steps), end = min(begin + of_warp, steps);
  const int block_tile = blockIdx.x * (kTileSets * kTiles), first_tile = block_tile + warp / kInputParts * kTiles;
  const void* w_uv = p.w_uv[head].data;
  uint32_t a[kTiles][kSteps][4] = {};
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      if (first_tile + tile < tiles && begin + step < end)
        load_a(a[tile][step], fragment_at(w_uv, first_tile + tile, begin + step, steps, lane));

  const int n_rows = min(p.pass.live() - first, kRows);
  const auto segments_of = [&](int row) {
    return row < n_rows ? LatentSegments::count(p.pass.position[p.pass.first + first + row] + 1) : 0;
  };
  const auto column = [&](int row) { return (static_cast<int64_t>(first + row) * p.n_heads + head) * p.n_segments; };
  // A thread merges eight elements of a row's segments of kGroups of the groups.
  const int eight = threadIdx.x % kLanes, row = threadIdx.x / kLanes % kRows, share = threadIdx.x / (kLanes * kRows);
  const int n = share < kShares ? segments_of(row) : 0, n_extremes = warp < kRows ? segments_of(warp) : 0;
  wait_for_previous();
  let_next_start();
  if (n_rows <= 0) return;

  // Its i-th segment: groups side by side, then the next eight.
  const auto segment = [&](int i) { return i / kGroups * kSegmentGroups + share * kGroups + i % kGroups; };
  const auto* from = reinterpret_cast<const uint4*>(p.means + column(min(row, n_rows - 1)) * kWidth) + eight;
  uint4 v[kAtOnce];
  const auto load = [&](int first_of) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (const int s = segment(first_of + k); s < n) v[k] = __ldcg(from + static_cast<int64_t>(s) * kLanes);
  };
  load(0);                             // on their way before the weights are known
  if (warp < n_rows) {
    const float total = weigh_segments(p.extremes + column(warp), n_extremes, weight_of + warp * p.n_segments);
    if (lane == 0) total_of[warp] = total;
  }
  __syncthreads();

  const float* weight = weight_of + row * p.n_segments;
  float o[kGroups][8] = {};
  for (int i = 0; segment(i) < n;) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (const int s = segment(i + k); s < n) {
        const float w = weight[s];
        const uint32_t two[4] = {v[k].x, v[k].y, v[k].z, v[k].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 of_two = __half22float2(*reinterpret_cast<const __half2*>(&two[j]));
          float (&sum)[8] = o[k % kGroups];
          sum[j * 2] = fmaf(w, of_two.x, sum[j * 2]), sum[j * 2 + 1] = fmaf(w, of_two.y, sum[j * 2 + 1]);
        }
      }
    load(i += kAtOnce);
  }
  // Groups by pairs: a thread's, then those of other threads.
  float total[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int step = 1; step < kGroups; step *= 2)
#pragma unroll
      for (int g = 0; g + step < kGroups; g += 2 * step) o[g][j] = __fadd_rn(o[g][j], o[g + step][j]);
    total[j] = o[0][j];
  }
  if constexpr (kShares > 1) {
    const auto part_of = [&](int i, int half) -> float4& { return partial[((i * kRows + row) * 2 + half) * kLanes + eight]; };
    if (share < kShares)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        part_of(share, half) = make_float4(total[half * 4], total[half * 4 + 1], total[half * 4 + 2], total[half * 4 + 3]);
    __syncthreads();
    // Half of the elements by the threads of share 0, half by those of share 1.
    if (share < 2) {
      float of_shares[kShares][4];
#pragma unroll
      for (int i = 0; i < kShares; ++i) {
        const float4 of = part_of(i, share);
        of_shares[i][0] = of.x, of_shares[i][1] = of.y, of_shares[i][2] = of.z, of_shares[i][3] = of.w;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int step = 1; step < kShares; step *= 2)
#pragma unroll
          for (int i = 0; i + step < kShares; i += 2 * step) of_shares[i][j] = __fadd_rn(of_shares[i][j], of_shares[i + step][j]);
        total[j] = of_shares[0][j];
      }
    }
  }
  constexpr int kHeld = kShares > 1 ? 4 : 8;   // elements of a thread
  if (share < 8 / kHeld && row < n_rows) {
    const float of_row = total_of[row];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const SumPlace place = place_of_sum<kM>(eight * 8 + share * 4 + i);
      const int dim = place.step * 16 + place.within;
      attended[row * Shape::kStride + dim] = __float2bfloat16_rn(dim < p.value_dims ? __fdiv_rn(total[i], of_row) : 0.0f);
    }
  }
  __syncthreads();

  float sum[kTiles][4] = {};
  const bf16* of_column = attended + min(lane / 4, n_rows - 1) * Shape::kStride + begin * 16 + lane % 4 * 4;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (begin + step >= end) break;
    const uint2 b = *reinterpret_cast<const uint2*>(of_column + step * 16);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) mma(sum[tile], a[tile][step], {b.x, b.y});
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (const int of_row = lane % 4 * 2 + i % 2; of_row < kRows)
        projected[(part * kRows + of_row) * Shape::kProjectStride + (warp / kInputParts * kTiles + tile) * 16 + lane / 4 +
                  i / 2 * 8] = sum[tile][i];
  __syncthreads();
  for (int i = threadIdx.x; i < n_rows * Shape::kOutputs; i += kSumThreads) {
    const int of_row = i / Shape::kOutputs, o_of = i % Shape::kOutputs, output = block_tile * 16 + o_of;
    if (output >= p.v_head) continue;
    float of_parts = projected[of_row * Shape::kProjectStride + o_of];
#pragma unroll
    for (int w = 1; w < kInputParts; ++w)
      of_parts = __fadd_rn(of_parts, projected[(w * kRows + of_row) * Shape::kProjectStride + o_of]);
    p.out[(static_cast<int64_t>(first + of_row) * p.n_heads + head) * p.v_head + output] = __float2bfloat16_rn(of_parts);
  }
}

}  // namespace kdt::cuda
