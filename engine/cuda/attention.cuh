// Every head's own product with a BF16 matrix: W_UK and W_UV of latent attention, for rows and heads that lie apart.
#pragma once

#include "cuda/latent.cuh"
#include "cuda/linear.cuh"

namespace kdt::cuda {

constexpr int kHeadWarps = 8, kHeadThreads = kHeadWarps * kWarp;
constexpr int kHeadRows = 64;      // of a block

// bf16 [rows][heads][dims], elements from row to row and from head to head.
template <class T>
struct HeadRows {
  T* base;
  int64_t row, head;
};

struct HeadProduct {
  const Matrix* weight;            // [heads] of [n_out, n_in], in the backend's memory
  const bf16* x;
  int64_t x_row, x_head;
  bf16* out;
  int64_t out_row, out_head;
  int32_t n_in, n_out;
  bool aligned;                    // four elements of x can be read at once, and none is behind n_in

  HeadProduct(const MatrixGroup& w, HeadRows<const bf16> from, HeadRows<bf16> to)
      : weight(w.device), x(from.base), x_row(from.row), x_head(from.head), out(to.base), out_row(to.row), out_head(to.head),
        n_in(static_cast<int32_t>(w.host[0].n_in)), n_out(static_cast<int32_t>(w.host[0].n_out)),
        aligned(n_in % kStepInputs == 0 && x_row % 4 == 0 && x_head % 4 == 0 && reinterpret_cast<uintptr_t>(x) % 8 == 0) {}
};

// Four inputs from k on, zeros behind n_in.
__device__ inline uint2 head_inputs(const HeadProduct& p, const bf16* row, int k) {
  if (p.aligned) return *reinterpret_cast<const uint2*>(row + k);
  const auto* bits = reinterpret_cast<const uint16_t*>(row);
  uint32_t v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = k + i < p.n_in ? bits[k + i] : 0;
  return {v[0] | v[1] << 16, v[2] | v[3] << 16};
}

// Outputs of one tile of a head's matrix, for kHeadRows rows from `first` on, of which rows_left(), if positive, are live.
// The warps of a block share out the inputs in contiguous ranges of K steps, by the shape of the matrix alone; their sums are
// added in order and rounded once. Calls wait_for_previous, before rows_left; the first weights are fetched before that.
template <class F>
__device__ void head_product(const HeadProduct& p, int head, int tile, int first, const F& rows_left) {
  constexpr int kGroups = kHeadRows / 8, kAhead = 4;
  constexpr int kStride = kTileRows + 4;   // floats: a warp's fragments lie in different banks
  __shared__ float sums[kHeadWarps][kHeadRows * kStride];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int steps = static_cast<int>(steps_of(p.n_in)), of_warp = (steps + kHeadWarps - 1) / kHeadWarps;
  const int begin = min(warp * of_warp, steps), end = min(begin + of_warp, steps);
  const void* weight = p.weight[head].data;
  const bf16* x = p.x + first * p.x_row + head * p.x_head;

  uint32_t a[kAhead][4] = {};
  const auto fetch = [&](int step) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (step + i < end) load_a(a[i], fragment_at(weight, tile, step + i, steps, lane));
  };
  fetch(begin);
  wait_for_previous();
  const int n_rows = min(rows_left(), kHeadRows);
  if (n_rows <= 0) return;
  float sum[kGroups][4] = {};
  for (int step = begin; step < end; step += kAhead) {
    if (step > begin) fetch(step);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (g * 8 >= n_rows) break;
      // Columns past the last row repeat it, and are dropped.
      const bf16* row = x + min(g * 8 + lane / 4, n_rows - 1) * p.x_row;
      uint2 b[kAhead] = {};
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (step + i < end) b[i] = head_inputs(p, row, (step + i) * static_cast<int>(kStepInputs) + lane % 4 * 4);
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (step + i < end) mma(sum[g], a[i], {b[i].x, b[i].y});
    }
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sums[warp][(g * 8 + lane % 4 * 2 + i % 2) * kStride + lane / 4 + i / 2 * 8] = sum[g][i];
  __syncthreads();
  for (int i = threadIdx.x; i < n_rows * kTileRows; i += kHeadThreads) {
    const int row = i / kTileRows, o = i % kTileRows, at = row * kStride + o;
    const int64_t output = tile * kTileRows + o;
    if (output >= p.n_out) continue;
    float total = sums[0][at];
#pragma unroll
    for (int w = 1; w < kHeadWarps; ++w) total = __fadd_rn(total, sums[w][at]);
    p.out[(first + row) * p.out_row + head * p.out_head + output] = __float2bfloat16_rn(total);
  }
}

}  // namespace kdt::cuda
