// Row-wise operations: embedding, RMS norm, copies.
#include <algorithm>

#include "cuda/norm.cuh"
#include "cuda/ranks.cuh"

namespace kdt::cuda {
namespace {

constexpr int kCopyThreads = 256;

// A block a row.
__global__ void __launch_bounds__(kNormThreads) rms_norm_kernel(const __grid_constant__ Norm p) {
  norm_row(p, blockIdx.x, blockDim.x, [&] {
    const bool live = static_cast<int>(blockIdx.x) < p.n.get();
    wait_for_previous();
    let_next_start();
    return live;
  });
}

// `count` elements, by all threads of a block.
__device__ inline void copy_elements(const uint16_t* from, uint16_t* to, int64_t count, int64_t first, int64_t step) {
  if (aligned16(from) && aligned16(to)) {
    const int64_t whole = count / kChunk;
    for (int64_t i = first; i < whole; i += step)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    for (int64_t i = whole * kChunk + first; i < count; i += step) to[i] = from[i];
  } else {
    for (int64_t i = first; i < count; i += step) to[i] = from[i];
  }
}

struct Embed {
  LiveRows n;
  const int32_t* token;
  const uint16_t* table;
  int64_t hidden;
  uint16_t* out;
};

__global__ void __launch_bounds__(kCopyThreads, 4) embed_kernel(const __grid_constant__ Embed p) {
  const int row = blockIdx.x;
  wait_for_previous();
  let_next_start();
  if (row >= p.n.get()) return;
  copy_elements(p.table + p.token[row] * p.hidden, p.out + row * p.hidden, p.hidden, threadIdx.x, kCopyThreads);
}

struct Copy {
  LiveRows n;
  int64_t width;
  const uint16_t* from;
  uint16_t* to;
};

__global__ void __launch_bounds__(kCopyThreads) copy_kernel(const __grid_constant__ Copy p) {
  wait_for_previous();
  let_next_start();
  copy_elements(p.from, p.to, p.n.get() * p.width, static_cast<int64_t>(blockIdx.x) * kCopyThreads + threadIdx.x,
                static_cast<int64_t>(gridDim.x) * kCopyThreads);
}

}  // namespace

void CudaOps::embed(const EmbedArgs& args) {
  const Count& n = args.rows.n;
  if (n.most == 0) return;
  if (args.partial) return embed_part(stream_, args);
  const Embed embed{LiveRows(n), args.rows.token, static_cast<const uint16_t*>(args.table), args.hidden,
                    static_cast<uint16_t*>(args.out)};
  const dim3 grid(static_cast<unsigned>(n.most));
  launch_overlapping("embed_kernel", embed_kernel, grid, kCopyThreads, 0, stream_, embed);
}

void CudaOps::rms_norm(const RmsNormArgs& args) {
  if (args.n.most == 0) return;
  const Norm norm{LiveRows(args.n), static_cast<int32_t>(args.width), args.eps, static_cast<const bf16*>(args.x),
                  args.x_rows, args.weight, static_cast<bf16*>(args.out), args.out_rows};
  const dim3 grid(static_cast<unsigned>(args.n.most));
  launch_overlapping("rms_norm_kernel", rms_norm_kernel, grid, static_cast<unsigned>(norm_threads(args.width)), 0, stream_, norm);
}

void CudaOps::copy(const CopyArgs& args) {
  constexpr int64_t kMostBlocks = 1024;
  if (args.n.most == 0) return;
  const int64_t blocks = std::min(divide_up(args.n.most * args.width, kCopyThreads * kChunk), kMostBlocks);
  const Copy copy{LiveRows(args.n), args.width, static_cast<const uint16_t*>(args.from),
                  static_cast<uint16_t*>(args.to)};
  launch_overlapping("copy_kernel", copy_kernel, dim3(static_cast<unsigned>(blocks)), kCopyThreads, 0, stream_, copy);
}

}  // namespace kdt::cuda
