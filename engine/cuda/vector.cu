// Row-wise operations: embedding, RMS norm, copies.
#include <algorithm>

#include "cuda/device.cuh"

namespace kdt::cuda {
namespace {

constexpr int kCopyThreads = 256;
constexpr int kChunk = 8;              // elements that a thread takes at a time: 16 bytes of BF16
constexpr int kNormThreads = 1024;     // at most

__device__ inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Elements [kChunk i, kChunk (i + 1)) of a row of `width`, zeros past its end: the same values however it is aligned.
__device__ inline void load_chunk(float (&v)[kChunk], const bf16* row, int i, int width, bool aligned) {
  const bf16* from = row + i * kChunk;
  if (aligned && (i + 1) * kChunk <= width) {
    const uint4 bits = *reinterpret_cast<const uint4*>(from);
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&bits);
#pragma unroll
    for (int j = 0; j < kChunk / 2; ++j) {
      const float2 two = __bfloat1622float2(pairs[j]);
      v[2 * j] = two.x, v[2 * j + 1] = two.y;
    }
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

// One block a row. Thread t sums the squares of chunks t, t + threads, … (its first one last), then lanes and warps are
// added in their order: it follows from the width, as the number of threads does.
__global__ void __launch_bounds__(kNormThreads) rms_norm_kernel(const __grid_constant__ Norm p) {
  __shared__ float warp_sums[kNormThreads / kWarp];
  const int row = blockIdx.x, n_chunks = static_cast<int>(divide_up(p.width, kChunk));
  const int first = threadIdx.x, step = blockDim.x;
  const bool weight_aligned = aligned16(p.weight);
  float v[kChunk] = {}, w[kChunk] = {};
  if (first < n_chunks) load_chunk(w, p.weight, first, p.width, weight_aligned);
  wait_for_previous();
  let_next_start();
  if (row >= p.n.get()) return;
  const bf16* x = p.x + row_at(p.x_rows, row, p.width);
  bf16* out = p.out + row_at(p.out_rows, row, p.width);
  const bool x_aligned = aligned16(x), out_aligned = aligned16(out);
  const auto squares = [&](float sum) {
#pragma unroll
    for (int j = 0; j < kChunk; ++j) sum = __fmaf_rn(v[j], v[j], sum);
    return sum;
  };
  float sum = 0;
  for (int i = first + step; i < n_chunks; i += step) {
    load_chunk(v, x, i, p.width, x_aligned);
    sum = squares(sum);
  }
  if (first < n_chunks) {   // last, as it stays in registers
    load_chunk(v, x, first, p.width, x_aligned);
    sum = squares(sum);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) warp_sums[threadIdx.x / kWarp] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < step / kWarp; ++i) sum += warp_sums[i];
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
  const Embed embed{LiveRows(n), args.rows.token, static_cast<const uint16_t*>(args.table), args.hidden,
                    static_cast<uint16_t*>(args.out)};
  const dim3 grid(static_cast<unsigned>(n.most));
  launch_overlapping("embed_kernel", embed_kernel, grid, kCopyThreads, 0, stream_, embed);
}

void CudaOps::rms_norm(const RmsNormArgs& args) {
  if (args.n.most == 0) return;
  const int64_t warps = divide_up(divide_up(args.width, kChunk), kWarp);
  const auto threads = static_cast<unsigned>(std::min<int64_t>(warps * kWarp, kNormThreads));
  const Norm norm{LiveRows(args.n), static_cast<int32_t>(args.width), args.eps, static_cast<const bf16*>(args.x),
                  args.x_rows, args.weight, static_cast<bf16*>(args.out), args.out_rows};
  const dim3 grid(static_cast<unsigned>(args.n.most));
  launch_overlapping("rms_norm_kernel", rms_norm_kernel, grid, threads, 0, stream_, norm);
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
