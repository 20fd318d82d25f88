// What latent attention does before and after the fold, with every head's own matrices: queries through W_UK and RoPE; the
// merge of segments' sums, and that through W_UV.
#pragma once

#include <cooperative_groups.h>

#include "cuda/latent_fold.cuh"
#include "cuda/linear.cuh"

namespace kdt::cuda {

// Rows of a pass.
struct Pass {
  LiveRows n;                     // of all rows
  int32_t first, rows;
  const int32_t *position, *stream, *parent, *visible;   // of all rows
  __device__ int live() const { return min(n.get() - first, rows); }
};

constexpr int kAbsorbWarps = 4, kAbsorbThreads = kAbsorbWarps * kWarp;
constexpr int kAbsorbRows = 64;   // of a block

struct Absorb {
  Pass pass;
  const Matrix* w_uk;             // [heads] of [kv_lora, nope], in the backend's memory
  const bf16* q;                  // [rows][heads][nope + rope], of the pass's first row on
  RopeTable rope;
  bf16* queries;                  // [rows][heads][query_dims]
  int32_t n_heads, nope, kv_lora, query_dims;
  bool aligned;                   // four elements of q can be read at once, and a K step ends with nope
  int32_t* taken;                 // becomes 0
};

// Four inputs from k on, zeros behind n_in.
__device__ inline uint2 four_inputs(const bf16* row, int k, int n_in, bool aligned) {
  if (aligned) return *reinterpret_cast<const uint2*>(row + k);
  const auto* bits = reinterpret_cast<const uint16_t*>(row);
  uint32_t v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = k + i < n_in ? bits[k + i] : 0;
  return {v[0] | v[1] << 16, v[2] | v[3] << 16};
}

// The rotated part of queries, by a block.
__device__ inline void rotate_queries(const Absorb& p, int head, int first, int n_rows) {
  const int half = static_cast<int>(p.rope.dim / 2), pairs = (p.query_dims - p.kv_lora + 1) / 2;   // the last are zeros
  const int head_dim = p.nope + 2 * half;
  for (int i = threadIdx.x; i < n_rows * pairs; i += kAbsorbThreads) {
    const int row = first + i / pairs, pair = i % pairs;
    float2 turned = make_float2(0.0f, 0.0f);
    if (pair < half) {
      const bf16* from = p.q + (static_cast<int64_t>(row) * p.n_heads + head) * head_dim + p.nope + 2 * pair;
      const int64_t at = static_cast<int64_t>(p.pass.position[p.pass.first + row]) * half + pair;
      turned = rotated(__bfloat162float(from[0]), __bfloat162float(from[1]), p.rope.cos[at], p.rope.sin[at]);
    }
    const int dim = p.kv_lora + 2 * pair;
    bf16* to = p.queries + (static_cast<int64_t>(row) * p.n_heads + head) * p.query_dims + dim;
    to[0] = __float2bfloat16_rn(turned.x);
    if (dim + 1 < p.query_dims) to[1] = __float2bfloat16_rn(turned.y);
  }
}

// Grid: x sets of W_UK's tiles, one a warp, and one block that rotates; y heads; z chunks of rows. A warp's output is one chain
// over all inputs; its weights are on their way before the kernel before has ended.
__global__ void __launch_bounds__(kAbsorbThreads) absorb_kernel(const __grid_constant__ Absorb p) {
  constexpr int kGroups = kAbsorbRows / 8, kAhead = 8;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, head = blockIdx.y, first = blockIdx.z * kAbsorbRows;
  const int tile = blockIdx.x * kAbsorbWarps + warp;
  const int tiles = static_cast<int>(tiles_of(p.kv_lora)), steps = static_cast<int>(steps_of(p.nope));
  const bool rotates = blockIdx.x == gridDim.x - 1, multiplies = !rotates && tile < tiles;
  uint32_t a[kAhead][4] = {};
  const void* weight = multiplies ? p.w_uk[head].data : nullptr;
  const auto fetch = [&](int step) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (step + i < steps) load_a(a[i], fragment_at(weight, tile, step + i, steps, lane));
  };
  if (multiplies) fetch(0);
  const int n_rows = min(p.pass.live() - first, kAbsorbRows);
  wait_for_previous();
  let_next_start();
  if (rotates && head == 0 && first == 0 && threadIdx.x == 0) *p.taken = 0;
  if (n_rows <= 0) return;
  if (rotates) rotate_queries(p, head, first, n_rows);
  if (!multiplies) return;

  const int64_t head_dim = p.nope + p.rope.dim, row_elements = p.n_heads * head_dim;
  const bf16* q = p.q + first * row_elements + head * head_dim;
  float sum[kGroups][4] = {};
  for (int step = 0; step < steps; step += kAhead) {
    if (step > 0) fetch(step);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (g * 8 >= n_rows) break;
      const bf16* row = q + min(g * 8 + lane / 4, n_rows - 1) * row_elements;   // columns past the last row are dropped
      uint2 b[kAhead] = {};
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (step + i < steps)
          b[i] = four_inputs(row, (step + i) * static_cast<int>(kStepInputs) + lane % 4 * 4, p.nope, p.aligned);
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (step + i < steps) mma(sum[g], a[i], {b[i].x, b[i].y});
    }
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = g * 8 + lane % 4 * 2 + i % 2, output = tile * 16 + lane / 4 + i / 2 * 8;
      if (row < n_rows && output < p.kv_lora)
        p.queries[(static_cast<int64_t>(first + row) * p.n_heads + head) * p.query_dims + output] =
            __float2bfloat16_rn(sum[g][i]);
    }
}

constexpr int kMergeWarps = 8, kSumThreads = kMergeWarps * kWarp;
constexpr int kMergeRows = 8;     // of a block, at most: the columns of an mma

struct Merge {
  Pass pass;
  int32_t n_heads, value_dims, n_segments;
  int32_t rows;                   // of a block: 1, 2, 4 or 8
  const float* sums;              // [rows][heads][segments][128 kM]
  const float2* extremes;         // [rows][heads][segments] m, l
  const Matrix* w_uv;             // [heads] of [v_head, value_dims], in the backend's memory
  int32_t v_head;
  bf16* out;                      // [rows][heads][v_head], of the pass's first row on
};

// How the kBlocks blocks of a cluster share out a head: each merges a part of the sums' elements, whole sixteens, and has tiles
// of W_UV.
template <int kM, int kBlocks>
struct MergeShape {
  static constexpr int kSixteens = 8 * kM / kBlocks, kElements = kSixteens * 16, kLanes = kElements / 4;   // of a block
  static constexpr int kStride = kElements + 8;   // from row to row of what it merged, in shared memory
  static constexpr int64_t kPartialBytes = kMergeGroups * kMergeRows * kElements * 4;
  static constexpr int64_t kAttendedBytes = kMergeRows * kStride * 2;
};
constexpr int kProjectStride = 20;   // floats from token to token of a warp's sums
constexpr int64_t kProjectBytes = kMergeWarps * kMergeRows * kProjectStride * 4;
template <class Shape>
int64_t merge_shared(int64_t rows, int64_t n_segments) {
  return Shape::kPartialBytes + Shape::kAttendedBytes + kProjectBytes + rows * n_segments * 4;
}

// The threads of a cluster of kBlocks meet: who arrives may not touch what others still read until it has waited.
template <int kBlocks>
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  if constexpr (kBlocks > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
template <int kBlocks>
__device__ inline void cluster_wait() {
  if constexpr (kBlocks == 1) __syncthreads();
#if __CUDA_ARCH__ >= 900
  else asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// The same place in shared memory of another block of the cluster.
template <int kBlocks, class T>
__device__ inline const T* of_cluster(T* shared, int rank) {
#if __CUDA_ARCH__ >= 900
  if constexpr (kBlocks > 1) return cooperative_groups::this_cluster().map_shared_rank(shared, rank);
#endif
  return shared;
}

// Grid: x the blocks of a cluster, y heads, z chunks of rows. With M the largest m, w = 2^(m - M): Σ w o / Σ w l. Segments go
// by number modulo 4 into four sums, ascending in each, then (0 + 1) + (2 + 3); of l by number modulo 32, then a butterfly.
// W_UV's inputs are shared out among the warps in contiguous ranges of K steps, whose sums are added in order.
template <int kM, int kBlocks>
__global__ void __launch_bounds__(kSumThreads) merge_kernel(const __grid_constant__ Merge p) {
  using Shape = MergeShape<kM, kBlocks>;
  constexpr int kAhead = 4, kWidth = 128 * kM, kEarly = 4, kLanes = Shape::kLanes, kElements = Shape::kElements;
  extern __shared__ __align__(16) std::byte shared_bytes[];
  __shared__ float total_l[kMergeRows];
  const int rank = blockIdx.x, head = blockIdx.y, first = blockIdx.z * p.rows;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  auto* partial = reinterpret_cast<float*>(shared_bytes);
  auto* attended = reinterpret_cast<bf16*>(shared_bytes + Shape::kPartialBytes);
  auto* projected = reinterpret_cast<float*>(shared_bytes + Shape::kPartialBytes + Shape::kAttendedBytes);
  float* weight_of = projected + kProjectBytes / 4;   // [rows][segments]

  const int tiles = static_cast<int>(tiles_of(p.v_head)), steps = static_cast<int>(steps_of(p.value_dims));
  const int of_warp = (steps + kMergeWarps - 1) / kMergeWarps;
  const int begin = min(warp * of_warp, steps), end = min(begin + of_warp, steps);
  const void* w_uv = p.w_uv[head].data;
  uint32_t a[kAhead][4] = {};
  const auto fetch = [&](int tile, int step) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (step + i < end) load_a(a[i], fragment_at(w_uv, tile, step + i, steps, lane));
  };
  if (rank < tiles) fetch(rank, begin);
  const int n_rows = min(p.pass.live() - first, p.rows);
  const auto segments_of = [&](int row) {
    return row < n_rows ? LatentSegments::count(p.pass.position[p.pass.first + first + row] + 1) : 0;
  };
  const auto column = [&](int row) { return (static_cast<int64_t>(first + row) * p.n_heads + head) * p.n_segments; };
  // A thread merges four elements of a row's segments of one of the groups.
  const int four = threadIdx.x % kLanes, group = threadIdx.x / kLanes % kMergeGroups;
  const auto sums_of = [&](int row) {
    return reinterpret_cast<const float4*>(p.sums + column(row) * kWidth + rank * kElements) + four;
  };
  const auto load = [&](const float4* from, int s) { return __ldcg(from + static_cast<int64_t>(s) * (kWidth / 4)); };
  constexpr int kAtOnce = kSumThreads / (kLanes * kMergeGroups) > 0 ? kSumThreads / (kLanes * kMergeGroups) : 1;   // rows
  static_assert(kSumThreads % kLanes == 0 && kLanes * kMergeGroups <= kSumThreads * 2);
  const int n_extremes = segments_of(warp), first_row = threadIdx.x / (kLanes * kMergeGroups), n_first = segments_of(first_row);
  wait_for_previous();
  let_next_start();
  if (n_rows <= 0) return;             // the whole cluster alike

  float4 early[kEarly];                // on their way before the weights are known
  const float4* from_first = sums_of(min(first_row, n_rows - 1));
#pragma unroll
  for (int k = 0; k < kEarly; ++k)
    if (group + k * kMergeGroups < n_first) early[k] = load(from_first, group + k * kMergeGroups);
  if (warp < n_rows) {
    const float2* extremes = p.extremes + column(warp);
    float* weight = weight_of + warp * p.n_segments;
    float2 mine = lane < n_extremes ? extremes[lane] : make_float2(-INFINITY, 0.0f);
    float most = mine.x, l = 0;
    for (int s = lane + kWarp; s < n_extremes; s += kWarp) most = fmaxf(most, extremes[s].x);
    most = warp_max(most);
    for (int s = lane; s < n_extremes; s += kWarp) {
      if (s != lane) mine = extremes[s];
      const float w = exp2_fast(mine.x - most);
      weight[s] = w;
      l = fmaf(w, mine.y, l);
    }
    l = warp_sum(l);
    if (lane == 0) total_l[warp] = l;
  }
  __syncthreads();

  const auto merge = [&](int row, int of_group, int n, const float4* from, bool fetched) {
    const float* weight = weight_of + row * p.n_segments;
    float4 o = {};
    const auto add = [&](int s, const float4& v) {
      const float w = weight[s];
      o.x = fmaf(w, v.x, o.x), o.y = fmaf(w, v.y, o.y), o.z = fmaf(w, v.z, o.z), o.w = fmaf(w, v.w, o.w);
    };
    int s = of_group;
    if (fetched) {
#pragma unroll
      for (int k = 0; k < kEarly; ++k)
        if (of_group + k * kMergeGroups < n) add(of_group + k * kMergeGroups, early[k]);
      s += kEarly * kMergeGroups;
    }
    for (; s + 7 * kMergeGroups < n; s += 8 * kMergeGroups) {
      float4 v[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) v[k] = load(from, s + k * kMergeGroups);
#pragma unroll
      for (int k = 0; k < 8; ++k) add(s + k * kMergeGroups, v[k]);
    }
#pragma unroll 4
    for (; s < n; s += kMergeGroups) add(s, load(from, s));
    reinterpret_cast<float4*>(partial)[(of_group * kMergeRows + row) * kLanes + four] = o;
  };
  if constexpr (kLanes * kMergeGroups <= kSumThreads) {
    for (int row = first_row; row < n_rows; row += kAtOnce)
      merge(row, group, row == first_row ? n_first : segments_of(row), sums_of(row), row == first_row);
  } else {
    for (int row = 0; row < n_rows; ++row)
      for (int g = threadIdx.x / kLanes; g < kMergeGroups; g += kSumThreads / kLanes)
        merge(row, g, segments_of(row), sums_of(row), false);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n_rows * kElements; i += kSumThreads) {
    const int row = i / kElements, e = i % kElements, at = row * kElements + e, next = kMergeRows * kElements;
    const float total = __fadd_rn(__fadd_rn(partial[at], partial[at + next]),
                                  __fadd_rn(partial[at + 2 * next], partial[at + 3 * next]));
    const SumPlace place = place_of_sum<kM>(rank * kElements + e);
    const int slot = slot_of_step<kM>(place.step) - rank * Shape::kSixteens;
    attended[row * Shape::kStride + slot * 16 + place.within] =
        __float2bfloat16_rn(place.step * 16 + place.within < p.value_dims ? __fdiv_rn(total, total_l[row]) : 0.0f);
  }
  cluster_arrive<kBlocks>();
  cluster_wait<kBlocks>();

  for (int tile = rank; tile < tiles; tile += kBlocks) {
    float sum[4] = {};
    for (int step = begin; step < end; step += kAhead) {
      if (tile != rank || step != begin) fetch(tile, step);
      uint2 b[kAhead] = {};
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (step + i >= end) continue;
        const int slot = slot_of_step<kM>(step + i), owner = slot / Shape::kSixteens;
        const bf16* row = of_cluster<kBlocks>(attended, owner) + min(lane / 4, n_rows - 1) * Shape::kStride;
        b[i] = *reinterpret_cast<const uint2*>(row + (slot - owner * Shape::kSixteens) * 16 + lane % 4 * 4);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (step + i < end) mma(sum, a[i], {b[i].x, b[i].y});
    }
    if (tile != rank) __syncthreads();   // the last tile's sums have been added up
#pragma unroll
    for (int i = 0; i < 4; ++i)
      projected[(warp * kMergeRows + lane % 4 * 2 + i % 2) * kProjectStride + lane / 4 + i / 2 * 8] = sum[i];
    __syncthreads();
    if (const int row = threadIdx.x / 16, o = threadIdx.x % 16; row < n_rows && tile * 16 + o < p.v_head) {
      float total = projected[row * kProjectStride + o];
#pragma unroll
      for (int w = 1; w < kMergeWarps; ++w)
        total = __fadd_rn(total, projected[(w * kMergeRows + row) * kProjectStride + o]);
      p.out[(static_cast<int64_t>(first + row) * p.n_heads + head) * p.v_head + tile * 16 + o] = __float2bfloat16_rn(total);
    }
  }
  cluster_arrive<kBlocks>();
  cluster_wait<kBlocks>();             // until all have read what this block merged
}

}  // namespace kdt::cuda
