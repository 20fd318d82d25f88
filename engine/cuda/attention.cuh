// The rows of a pass of latent attention, and what it does before the fold: queries through every head's W_UK, and RoPE.
#pragma once

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

// Grid: x sets of W_UK's tiles, one a warp, and one block that rotates; y heads; z chunks of 8 kGroups rows. A warp's output is one
// chain over all inputs; its weights are on their way before the kernel before has ended. The next kernel starts before that too:
// until absorb has ended it may read nothing but what was written before the kernel before absorb, as rows and page tables are.
template <int kGroups>
__global__ void __launch_bounds__(kAbsorbThreads) absorb_kernel(const __grid_constant__ Absorb p) {
  constexpr int kAhead = 8;
  let_next_start();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, head = blockIdx.y, first = blockIdx.z * (kGroups * 8);
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
  const int n_rows = min(p.pass.live() - first, kGroups * 8);
  wait_for_previous();
  if (rotates && head == 0 && first == 0 && threadIdx.x == 0) *p.taken = 0;
  if (n_rows <= 0) return;
  if (rotates) rotate_queries(p, head, first, n_rows);
  if (!multiplies) return;

  const int64_t head_dim = p.nope + p.rope.dim, row_elements = p.n_heads * head_dim;
  const bf16* q = p.q + first * row_elements + head * head_dim;
  float sum[kGroups][4] = {};
  for (int step = 0; step < steps; step += kAhead) {
    if (step > 0) fetch(step);
    uint2 b[kGroups][kAhead] = {};
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const bf16* row = q + min(g * 8 + lane / 4, n_rows - 1) * row_elements;   // columns past the last row are dropped
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (step + i < steps)
          b[g][i] = four_inputs(row, (step + i) * static_cast<int>(kStepInputs) + lane % 4 * 4, p.nope, p.aligned);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (step + i < steps)
#pragma unroll
        for (int g = 0; g < kGroups; ++g) mma(sum[g], a[i], {b[g][i].x, b[g][i].y});
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

}  // namespace kdt::cuda
