// The latent cache: normalised latents and rotated keys of a pass's rows, and the commit of kept draft nodes.
#include "cuda/latent.cuh"

#include "base/error.h"
#include "cuda/norm.cuh"

namespace kdt::cuda {
namespace {

constexpr int kWriteThreads = 128;     // that sum the squares of a latent
constexpr int kCommitWarps = 4;

// Where a committed row at `position` of a stream lies.
__device__ inline bf16* page_row(void* pages, int64_t page_stride, const StreamPages& stream, int64_t position,
                                 int64_t stride) {
  const int64_t page = stream.page_table[position / kTile];
  return reinterpret_cast<bf16*>(static_cast<std::byte*>(pages) + page * page_stride) + position % kTile * stride;
}

struct LatentWrite {
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
  Norm q;                              // of the queries' latent
  int32_t q_threads;
};

// A block a row, and (y = 1) one for its queries' latent. Threads take elements thread, thread + 128, … of the latent; their
// sums meet in one order.
__global__ void __launch_bounds__(kNormThreads) latent_write_kernel(const __grid_constant__ LatentWrite p) {
  const int row = blockIdx.x, thread = threadIdx.x;
  const bool live = row < p.n.get();
  const auto begin = [&] {
    wait_for_previous();
    let_next_start();
    return live;
  };
  if (blockIdx.y == 1) return norm_row(p.q, row, p.q_threads, begin);
  const bf16* from = p.kv + row * p.kv_stride;
  const int64_t position = live ? p.position[row] : 0;
  bf16* to = nullptr;
  if (live)
    to = p.parent[row] >= 0 ? p.scratch + static_cast<int64_t>(row) * p.stride
                            : page_row(p.pages, p.page_stride, p.streams[p.stream[row]], position, p.stride);
  if (!begin()) return;
  float sum = 0;
  __shared__ float of_warps[kWriteThreads / kWarp];
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

struct Commit {
  LiveRows n;
  const int32_t* row;
  const int32_t *position, *stream, *parent;
  const StreamPages* streams;
  int32_t stride;
  std::byte* pages;
  int64_t page_stride, layer_page_bytes;
  const std::byte* scratch;
  int64_t layer_scratch_bytes;
};

// A warp a row and layer (y). Scratch rows and page slots never overlap, so the order does not matter.
__global__ void __launch_bounds__(kCommitWarps * kWarp) commit_kernel(const __grid_constant__ Commit p) {
  const int kept = blockIdx.x * kCommitWarps + threadIdx.x / kWarp;
  wait_for_previous();
  let_next_start();
  if (kept >= p.n.get()) return;
  const int64_t row = p.row[kept];
  if (p.parent[row] < 0) return;   // it is in its page already
  const bf16* from = reinterpret_cast<const bf16*>(p.scratch + blockIdx.y * p.layer_scratch_bytes) + row * p.stride;
  bf16* to = page_row(p.pages + blockIdx.y * p.layer_page_bytes, p.page_stride, p.streams[p.stream[row]],
                      p.position[row], p.stride);
  for (int i = threadIdx.x % kWarp; i < p.stride / 8; i += kWarp)
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
}

}  // namespace

size_t CudaOps::latent_page_bytes(int64_t kv_lora, int64_t rope) const {
  return static_cast<size_t>(kTile * row_stride(kv_lora + rope) * 2);
}

size_t CudaOps::latent_scratch_bytes(int64_t rows, int64_t kv_lora, int64_t rope) const {
  return static_cast<size_t>(rows * row_stride(kv_lora + rope) * 2);
}

void CudaOps::latent_write(const LatentWriteArgs& args) {
  const Rows& rows = args.rows;
  if (rows.n.most == 0) return;
  const LatentWrite write{LiveRows(rows.n), rows.position, rows.stream, rows.parent, args.streams,
                          static_cast<const bf16*>(args.kv), args.kv_stride, args.norm_weight, args.eps, args.rope,
                          static_cast<int32_t>(args.kv_lora),
                          static_cast<int32_t>(row_stride(args.kv_lora + args.rope.dim)), args.pages,
                          static_cast<int64_t>(args.page_stride), static_cast<bf16*>(args.scratch),
                          {LiveRows(rows.n), static_cast<int32_t>(args.q_width), args.eps, static_cast<const bf16*>(args.q),
                           {args.kv_stride}, args.q_norm_weight, static_cast<bf16*>(args.q_out), {}},
                          static_cast<int32_t>(norm_threads(args.q_width))};
  const dim3 blocks(static_cast<unsigned>(rows.n.most), args.q ? 2 : 1);
  const auto threads = static_cast<unsigned>(std::max<int64_t>(kWriteThreads, args.q ? write.q_threads : 0));
  launch_overlapping("latent_write_kernel", latent_write_kernel, blocks, threads, 0, stream_, write);
}

void CudaOps::commit(const CommitArgs& args) {
  if (args.n.most == 0) return;
  const dim3 grid(static_cast<unsigned>(divide_up(args.n.most, kCommitWarps)), static_cast<unsigned>(args.n_layers));
  const Commit commit{LiveRows(args.n), args.row, args.rows.position, args.rows.stream, args.rows.parent, args.streams,
                      static_cast<int32_t>(row_stride(args.kv_lora + args.rope_dim)), static_cast<std::byte*>(args.pages),
                      static_cast<int64_t>(args.page_stride), static_cast<int64_t>(args.layer_page_bytes),
                      static_cast<const std::byte*>(args.scratch), static_cast<int64_t>(args.layer_scratch_bytes)};
  launch_overlapping("commit_kernel", commit_kernel, grid, kCommitWarps * kWarp, 0, stream_, commit);
}

}  // namespace kdt::cuda
