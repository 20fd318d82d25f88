// Latents and queries of up to sixteen rows as one kernel: a block a tile of q_b's outputs, which normalises all rows' latents for
// itself, and a block a row that writes its latent to the cache. Bits are those of norm_row and of linear.cu: the same chunks,
// and the same ranges of K steps, whose sums are added in the same order.
#include "cuda/latent_write.cuh"
#include "cuda/linear_product.cuh"

namespace kdt::cuda {
namespace {

constexpr int kWarps = 16, kThreads = kWarps * kWarp;   // a warp a row, and a range of K steps
constexpr int kMostSteps = 6;          // of a range
constexpr int kMostChunks = 6;         // of a row, a lane
constexpr int kPad = 16;               // elements behind a row, so that eight rows' fragments lie in different banks

struct Queries {
  LatentRows latent;
  Norm norm;
  Product product;
};

// Shared memory: the norm's weights, fp32 [width]; rows, bf16 [8 kGroups][width + kPad]; sums, float4 [ranges][kGroups][32 lanes].
__host__ __device__ constexpr int row_bytes(int width) { return (width + kPad) * 2; }
constexpr int64_t shared_bytes(int width, int groups) {
  return width * 4 + groups * kTokens * row_bytes(width) + kWarps * groups * kWarp * 16;
}

template <int kGroups>
__global__ void __maxnreg__(80) query_kernel(const __grid_constant__ Queries p) {
  extern __shared__ __align__(128) std::byte shared[];
  const Product& w = p.product;
  const int tile = blockIdx.x;
  if (tile >= w.tiles) return write_latent(p.latent, tile - w.tiles);

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, width = p.norm.width;
  const int begin = min(warp * w.warp_steps, w.steps), n_ranges = w.ranks * kParts;
  const int count = warp < n_ranges ? min(w.warp_steps, w.steps - begin) : 0;
  uint4 a[kMostSteps] = {};
#pragma unroll
  for (int s = 0; s < kMostSteps; ++s)
    if (s < count) a[s] = load_once(fragment_at(w.weight, tile, begin + s, w.steps, lane));
  auto* norm_weight = reinterpret_cast<float*>(shared);
  std::byte* rows = shared + width * 4;
  auto* sums = reinterpret_cast<float4*>(rows + kGroups * kTokens * row_bytes(width));
  for (int i = threadIdx.x; i < width; i += kThreads) norm_weight[i] = p.norm.weight[i];
  const int live = w.n.get();
  __syncthreads();
  wait_for_previous();
  let_next_start();
  if (live <= 0) return;

  if (warp < live) {
    const bf16* x = p.norm.x + row_at(p.norm.x_rows, warp, width);
    const int n_chunks = width / kChunk;
    uint4 chunk[kMostChunks];
#pragma unroll
    for (int c = 0; c < kMostChunks; ++c)
      chunk[c] = c * kWarp + lane < n_chunks ? reinterpret_cast<const uint4*>(x)[c * kWarp + lane] : uint4{0, 0, 0, 0};
    float total = 0, v[kChunk];
#pragma unroll
    for (int c = 0; c < kMostChunks; ++c) {   // those of norm_row's warp c; past the row's end zeros
      to_floats(v, chunk[c]);
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kChunk; ++j) sum = __fmaf_rn(v[j], v[j], sum);
      total += warp_sum(sum);
    }
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(total, static_cast<float>(width)) + p.norm.eps));
    auto* to = reinterpret_cast<bf16*>(rows + warp * row_bytes(width));
#pragma unroll
    for (int c = 0; c < kMostChunks; ++c) {
      const int i = c * kWarp + lane;
      if (i >= n_chunks) continue;
      to_floats(v, chunk[c]);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) v[j] = v[j] * scale * norm_weight[i * kChunk + j];
      store_chunk(v, to, i, width, true);
    }
  }
  __syncthreads();

  float sum[kGroups][4] = {};   // columns past the last row have what lies there, and are dropped
  const std::byte* from = rows + lane / 4 * row_bytes(width) + begin * kStepInputs * 2 + lane % 4 * 8;
#pragma unroll
  for (int s = 0; s < kMostSteps; ++s)
    if (s < count)
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const uint2 b = *reinterpret_cast<const uint2*>(from + g * kTokens * row_bytes(width) + s * kStepInputs * 2);
        mma(sum[g], {a[s].x, a[s].y, a[s].z, a[s].w}, {b.x, b.y});
      }
#pragma unroll
  for (int g = 0; g < kGroups; ++g)
    sums[(warp * kGroups + g) * kWarp + lane] = make_float4(sum[g][0], sum[g][1], sum[g][2], sum[g][3]);
  __syncthreads();

  constexpr int kOutputs = static_cast<int>(kTileRows), kOfRange = kGroups * kWarp * 4;
  const int token = threadIdx.x / kOutputs, o = threadIdx.x % kOutputs;
  const int64_t output = static_cast<int64_t>(tile) * kOutputs + o;
  if (token >= live || output >= w.n_out) return;
  const float* parts = reinterpret_cast<const float*>(sums) + token / kTokens * kWarp * 4 +
                       (o % 8 * 4 + token % kTokens / 2) * 4 + token % 2 + o / 8 % 2 * 2;
  float all = 0;
  for (int r = 0; r < w.ranks; ++r) {
    float part[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) part[i] = parts[(r * kParts + i) * kOfRange];
    float of_rank = part[0];
#pragma unroll
    for (int i = 1; i < kParts; ++i) of_rank += part[i];
    all = r == 0 ? of_rank : all + of_rank;
  }
  put(w, row_at(w.out_rows, token, w.n_out) + output, all, 0.0f);
}

template <int kGroups>
void launch(cudaStream_t stream, const Queries& queries) {
  const int64_t shared = shared_bytes(queries.norm.width, kGroups);
  const auto kernel = query_kernel<kGroups>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)), "query_kernel");
  const dim3 grid(static_cast<unsigned>(queries.product.tiles + queries.product.n.most));
  launch_overlapping("query_kernel", kernel, grid, kThreads, static_cast<size_t>(shared), stream, queries);
}

}  // namespace

bool few_queries(cudaStream_t stream, const LatentRows& latent, const Norm& q, const DenseArgs& q_b) {
  if (q_b.n.most > 2 * kTokens || q.width > kMostChunks * kWarp * kChunk || q.width % kStepInputs != 0) return false;
  if (q.x_rows.stride % kChunk != 0 || reinterpret_cast<uintptr_t>(q.x) % 16 != 0) return false;
  const Product product = describe(q_b);
  if (product.warp_steps > kMostSteps || product.ranks * kParts > kWarps) return false;
  if (q_b.n.most <= kTokens) launch<1>(stream, {latent, q, product});
  else launch<2>(stream, {latent, q, product});
  return true;
}

}  // namespace kdt::cuda
