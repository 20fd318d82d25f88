// The latent cache: normalised latents and rotated keys of a pass's rows, and the commit of kept draft nodes.
#include "base/error.h"
#include "cuda/latent_write.cuh"

namespace kdt::cuda {
namespace {

constexpr int kCommitWarps = 4;

struct LatentWrite {
  LatentRows latent;
  Norm q;                              // of the queries' latent
  int32_t q_threads;
};

// A block a row, and (y = 1) one for its queries' latent.
__global__ void __launch_bounds__(kNormThreads) latent_write_kernel(const __grid_constant__ LatentWrite p) {
  const int row = blockIdx.x;
  if (blockIdx.y == 0) return write_latent(p.latent, row);
  norm_row(p.q, row, p.q_threads, [&] {
    const bool live = row < p.q.n.get();
    wait_for_previous();
    let_next_start();
    return live;
  });
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
  const LatentRows latent{LiveRows(rows.n), rows.position, rows.stream, rows.parent, args.streams,
                          static_cast<const bf16*>(args.kv), args.kv_stride, args.norm_weight, args.eps, args.rope,
                          static_cast<int32_t>(args.kv_lora),
                          static_cast<int32_t>(row_stride(args.kv_lora + args.rope.dim)), args.pages,
                          static_cast<int64_t>(args.page_stride), static_cast<bf16*>(args.scratch)};
  LatentWrite write{latent, {LiveRows(rows.n)}, 0};
  if (args.q) {
    write.q = {latent.n, static_cast<int32_t>(args.q_b->n_in), args.eps, static_cast<const bf16*>(args.q), {args.kv_stride},
               args.q_norm_weight, static_cast<bf16*>(args.q_latent), {}};
    write.q_threads = static_cast<int32_t>(norm_threads(args.q_b->n_in));
  }
  const DenseArgs q_b{rows.n, write.q.out, args.q ? *args.q_b : Matrix{}, args.q_out};
  if (args.q && few_queries(stream_, latent, write.q, q_b)) return;
  const dim3 blocks(static_cast<unsigned>(rows.n.most), args.q ? 2 : 1);
  const auto threads = static_cast<unsigned>(std::max<int64_t>(kWriteThreads, write.q_threads));
  launch_overlapping("latent_write_kernel", latent_write_kernel, blocks, threads, 0, stream_, write);
  if (args.q) dense(stream_, q_b);
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
