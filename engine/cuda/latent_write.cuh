// The latent of a row, normalised, and its rotated key, to the row's place.
#pragma once

#include "cuda/latent.cuh"
#include "cuda/linear.cuh"
#include "cuda/norm.cuh"

namespace kdt::cuda {

constexpr int kWriteThreads = 128;     // that sum the squares of a latent: of a block at least

// Where a committed row at `position` of a stream lies.
__device__ inline bf16* page_row(void* pages, int64_t page_stride, const StreamPages& stream, int64_t position,
                                 int64_t stride) {
  const int64_t page = stream.page_table[position / kTile];
  return reinterpret_cast<bf16*>(static_cast<std::byte*>(pages) + page * page_stride) + position % kTile * stride;
}

struct LatentRows {
  LiveRows n;
  const int32_t *position, *stream, *parent;
  const StreamPages* streams;
  const bf16* kv;
  int64_t kv_stride;
  const float* norm_weight;
  float eps;
  RopeTable rope;
  int32_t kv_lora, stride;
  void* pages;
  int64_t page_stride;
  bf16* scratch;
};

// Row `row` by a whole block, which waits for the kernel before in here. Threads take elements thread, thread + 128, … of the
// latent; their sums meet in one order.
__device__ inline void write_latent(const LatentRows& p, int row) {
  __shared__ float of_warps[kWriteThreads / kWarp];
  const int thread = threadIdx.x;
  const bool live = row < p.n.get();
  const bf16* from = p.kv + row * p.kv_stride;
  const int64_t position = live ? p.position[row] : 0;
  bf16* to = nullptr;
  if (live)
    to = p.parent[row] >= 0 ? p.scratch + static_cast<int64_t>(row) * p.stride
                            : page_row(p.pages, p.page_stride, p.streams[p.stream[row]], position, p.stride);
  wait_for_previous();
  let_next_start();
  if (!live) return;
  float sum = 0;
  if (thread < kWriteThreads) {
    for (int d = thread; d < p.kv_lora; d += kWriteThreads) {
      const float x = __bfloat162float(from[d]);
      sum = fmaf(x, x, sum);
    }
    sum = warp_sum(sum);
    if (thread % kWarp == 0) of_warps[thread / kWarp] = sum;
  }
  __syncthreads();
  sum = __fadd_rn(__fadd_rn(of_warps[0], of_warps[1]), __fadd_rn(of_warps[2], of_warps[3]));
  const float scale = rsqrtf(__fadd_rn(__fdiv_rn(sum, static_cast<float>(p.kv_lora)), p.eps));
  const int threads = blockDim.x;
  for (int d = thread; d < p.kv_lora; d += threads)
    to[d] = __float2bfloat16_rn(__fmul_rn(__fmul_rn(__bfloat162float(from[d]), scale), p.norm_weight[d]));

  const int half = static_cast<int>(p.rope.dim / 2);
  for (int i = thread; i < half; i += threads) {
    const float a = __bfloat162float(from[p.kv_lora + 2 * i]), b = __bfloat162float(from[p.kv_lora + 2 * i + 1]);
    const float2 turned = rotated(a, b, p.rope.cos[position * half + i], p.rope.sin[position * half + i]);
    to[p.kv_lora + 2 * i] = __float2bfloat16_rn(turned.x);
    to[p.kv_lora + 2 * i + 1] = __float2bfloat16_rn(turned.y);
  }
  for (int d = p.kv_lora + 2 * half + thread; d < p.stride; d += threads) to[d] = __float2bfloat16_rn(0.0f);
}

// Latents of a few rows, and their queries: the norm q and the product q_b, whose x the norm would be, as one kernel; false: it is
// not for such sizes. The bits are those of the norm and of the product.
bool few_queries(cudaStream_t stream, const LatentRows& latent, const Norm& q, const DenseArgs& q_b);

}  // namespace kdt::cuda
