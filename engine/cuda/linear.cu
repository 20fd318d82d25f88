// Products with BF16 weights. Few rows: weights are read once, at the memory's speed, whatever the number of rows.
//
// Up to sixteen rows are for linear_few.cu, up to 64 or 128 for linear_some.cu and many for linear_many.cu, where they take them. Here
// a block owns two to five tiles of outputs for up to 64 rows. Its eight warps share out the inputs, in contiguous ranges of K steps; where tiles are few, up to
// eight blocks of a cluster share them out further. How they are shared out depends on the shape of the weight alone, every warp
// adds up its steps in ascending order, and the sums are added in the order of warps, then of blocks: an output has the same bits
// whoever else is in the pass, and whichever variant of the kernel runs.
//
// Weights and activations are copied asynchronously to a ring in shared memory, every lane's own fragments to a place of its
// own: the ring holds what is under way, and no thread waits for another before the sums.
#include <cooperative_groups.h>

#include "base/error.h"
#include "cuda/linear_product.cuh"

namespace kdt::cuda {
namespace {

constexpr int kWarps = kParts;
constexpr int kThreads = kWarps * kWarp;
constexpr int kMaxRanks = 8;          // blocks of a portable cluster
constexpr int64_t kEnoughBlocks = 192;   // of two tiles: more are not split further. A constant, as bits depend on it
constexpr int64_t kLeastSteps = 4;    // of a warp, for a split to pay
constexpr int kABytes = 16, kBBytes = 8;   // of a lane's fragments

// Bytes of a ring's stage, of one warp.
template <int kGroups, int kTiles>
constexpr int kStageBytes = kWarp * (kTiles * kABytes + kGroups * kBBytes);

// The sums of a block: float [tokens][outputs], rows padded so that a warp's fragments lie in different banks.
template <int kTiles>
constexpr int kSumStride = kTiles * static_cast<int>(kTileRows) + 4;

// Four inputs from element k on to shared memory, of a row that ends at n_in or is not aligned.
__device__ inline void gather_inputs(uint32_t to, const bf16* row, int k, int n_in) {
  const auto* bits = reinterpret_cast<const uint16_t*>(row);
  uint32_t v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = k + i < n_in ? bits[k + i] : 0;
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" :: "r"(to), "r"(v[0] | v[1] << 16), "r"(v[2] | v[3] << 16) : "memory");
}

__device__ inline void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  cooperative_groups::this_cluster().sync();
#endif
}

__device__ inline const float* of_block(float* shared, int rank) {
#if __CUDA_ARCH__ >= 900
  return cooperative_groups::this_cluster().map_shared_rank(shared, rank);
#else
  return shared;
#endif
}

// The compiler would work an address out anew at every use.
__device__ inline const std::byte* kept(const void* address) {
  asm volatile("" : "+l"(address));
  return static_cast<const std::byte*>(address);
}

// Grid: x blocks that share out inputs, a cluster; y chunks of rows; z sets of tiles. Blocks that read the same weights
// follow one another.
template <int kGroups, int kTiles, int kStages>
__global__ void __launch_bounds__(kThreads, kGroups > 4 || kTiles > 4 ? 1 : 2) dense_kernel(const __grid_constant__ Product p) {
  constexpr int kStage = kStageBytes<kGroups, kTiles>, kRing = kStages * kStage;
  constexpr int kRows = kGroups * kTokens, kOutputs = kTiles * static_cast<int>(kTileRows);
  constexpr int kStride = kSumStride<kTiles>, kWarpSums = kRows * kStride;
  static_assert(kWarpSums * 4 <= kRing);
  extern __shared__ __align__(128) std::byte shared[];

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int rank = blockIdx.x, n_ranks = gridDim.x;
  const int first_tile = static_cast<int>(blockIdx.z) * kTiles;
  const int begin = min((rank * kWarps + warp) * p.warp_steps, p.steps);
  const int count = min(p.warp_steps, p.steps - begin);

  // Of a stage: fragments of the tiles, then of the groups of rows. This lane's are at ring_a and ring_b.
  const uint32_t ring = __shfl_sync(~0u, static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + warp * kRing, 0);
  const uint32_t ring_a = ring + lane * kABytes, ring_b = ring + kTiles * kWarp * kABytes + lane * kBBytes;
  const std::byte* weight[kTiles];   // past the last tile, that one once more
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
    weight[t] = kept(fragment_at(p.weight, min(first_tile + t, p.tiles - 1), begin, p.steps, lane));
  const auto fetch_weights = [&](int step, uint32_t stage) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      cp_async16(ring_a + stage + t * kWarp * kABytes, weight[t] + step * kWarp * kABytes);
  };
  const auto fetch_first_weights = [&] {
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s)
      if (s < count) fetch_weights(s, s * kStage);
  };

  // The first chunk has rows, as good as always: its weights are under way while the kernel before, that of x, still runs.
  const int first_row = static_cast<int>(blockIdx.y) * kRows;
  if (first_row == 0) fetch_first_weights();
  const int live = p.n.get();
  wait_for_previous();
  let_next_start();
  if (first_row >= live) {   // the whole cluster alike
    cp_async_commit();
    cp_async_wait<0>();
    return;
  }
  if (first_row > 0) fetch_first_weights();

  const int first_input = begin * static_cast<int>(kStepInputs) + lane % 4 * 4;
  const std::byte* row[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g)   // columns past the last row repeat it, and are dropped
    row[g] = kept(p.x + row_at(p.x_rows, min(first_row + g * kTokens + lane / 4, live - 1), p.n_in) + first_input);
  const auto fetch_rows = [&](int step, uint32_t stage) {
    constexpr int kStepBytes = static_cast<int>(kStepInputs * sizeof(bf16));
    if (p.copied) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) cp_async8(ring_b + stage + g * kWarp * kBBytes, row[g] + step * kStepBytes);
    } else {
#pragma unroll 1
      for (int g = 0; g < kGroups; ++g) {
        const int r = min(first_row + g * kTokens + lane / 4, live - 1);
        const bf16* from = p.x + row_at(p.x_rows, r, p.n_in);
        const int k = first_input + step * static_cast<int>(kStepInputs);
        gather_inputs(ring_b + stage + g * kWarp * kBBytes, from, k, p.n_in);
      }
    }
  };
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < count) fetch_rows(s, s * kStage);
    cp_async_commit();
  }

  float sum[kTiles][kGroups][4] = {};
  uint32_t stage = 0;
  for (int step = 0; step < count; ++step) {
    cp_async_wait<kStages - 2>();
    uint4 a[kTiles];
    uint2 b[kGroups];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) a[t] = shared16(ring_a + stage + t * kWarp * kABytes);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) b[g] = shared8(ring_b + stage + g * kWarp * kBBytes);
    // The place of the step before is free: what it held is in registers.
    if (step + kStages - 1 < count) {
      const uint32_t place = stage == 0 ? kRing - kStage : stage - kStage;
      fetch_weights(step + kStages - 1, place);
      fetch_rows(step + kStages - 1, place);
    }
    cp_async_commit();
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int g = 0; g < kGroups; ++g) mma(sum[t][g], {a[t].x, a[t].y, a[t].z, a[t].w}, {b[g].x, b[g].y});
    stage = stage == kRing - kStage ? 0 : stage + kStage;
  }

  // The rings become the sums of warps.
  __syncthreads();
  auto* sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[warp * kWarpSums + (g * kTokens + lane % 4 * 2 + i % 2) * kStride + t * 16 + lane / 4 + i / 2 * 8] =
            sum[t][g][i];
  __syncthreads();
  const auto of_warps = [&](int at) {
    float total = sums[at];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total += sums[w * kWarpSums + at];
    return total;
  };
  const int n_rows = min(kRows, live - first_row);
  if (n_ranks > 1) {
    for (int i = threadIdx.x; i < n_rows * kOutputs; i += kThreads) {
      const int at = i / kOutputs * kStride + i % kOutputs;
      sums[at] = of_warps(at);
    }
    cluster_sync();
  }
  const auto total = [&](int at) {
    if (n_ranks == 1) return of_warps(at);
    float part[kMaxRanks];   // all are under way before the first is added
#pragma unroll
    for (int r = 0; r < kMaxRanks; ++r) part[r] = r < n_ranks ? of_block(sums, r)[at] : 0.0f;
    float sum_of_ranks = part[0];
#pragma unroll
    for (int r = 1; r < kMaxRanks; ++r)
      if (r < n_ranks) sum_of_ranks += part[r];
    return sum_of_ranks;
  };

  // Outputs are shared out among the blocks of a cluster; a warp's are next to one another in a row.
  const bool gated = p.kind == DenseOut::swiglu;
  const int width = gated ? kOutputs / 2 : kOutputs;
  const int64_t first_output = static_cast<int64_t>(blockIdx.z) * width;
  for (int i = rank * kThreads + threadIdx.x; i < n_rows * width; i += n_ranks * kThreads) {
    const int token = i / width, o = i % width;
    if (first_output + o >= p.n_out) continue;
    const int64_t at = row_at(p.out_rows, first_row + token, p.n_out) + first_output + o;
    const int sums_at = token * kStride + (gated ? o / 16 * 32 + o % 16 : o);
    put(p, at, total(sums_at), gated ? total(sums_at + 16) : 0.0f);
  }
  if (n_ranks > 1) cluster_sync();   // until all have read this block's sums
}

template <int kGroups, int kTiles, int kStages>
constexpr int kSharedBytes = kWarps * kStages * kStageBytes<kGroups, kTiles>;

template <int kGroups, int kTiles, int kStages>
void launch(cudaStream_t stream, const Product& product, int64_t ranks) {
  constexpr int kShared = kSharedBytes<kGroups, kTiles, kStages>;
  const auto kernel = dense_kernel<kGroups, kTiles, kStages>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "dense_kernel");
  const dim3 grid(static_cast<unsigned>(ranks), static_cast<unsigned>(divide_up(product.n.most, kGroups * kTokens)),
                  static_cast<unsigned>(divide_up(product.tiles, kTiles)));
  launch_overlapping("dense_kernel", kernel, grid, kThreads, kShared, stream, product, static_cast<unsigned>(ranks));
}

int shared_limit() {
  int device = 0, limit = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  return limit;
}

}  // namespace

Product describe(const DenseArgs& args) {
  const Matrix& w = args.weight;
  if (w.scales) fail(Status::unsupported, "linear", "an INT4 matrix", "a BF16 one: INT4 is for experts");
  const bool gated = args.kind == DenseOut::swiglu;
  const int64_t tiles = gated ? 2 * tiles_of(w.n_out / 2) : tiles_of(w.n_out), steps = steps_of(w.n_in);
  const bool clusters = has_clusters("dense_kernel", dense_kernel<1, 2, 8>);
  int64_t ranks = 1;
  while (clusters && ranks < kMaxRanks && divide_up(tiles, 2) * ranks < kEnoughBlocks &&
         steps >= 2 * ranks * kWarps * kLeastSteps)
    ranks *= 2;
  const bool copied =
      w.n_in % kStepInputs == 0 && args.x_rows.stride % 4 == 0 && reinterpret_cast<uintptr_t>(args.x) % kBBytes == 0;
  const auto ranges = static_cast<int32_t>(kParts * ranks), warp_steps = static_cast<int32_t>(divide_up(steps, ranges));
  return {LiveRows(args.n), args.x, args.x_rows, copied, static_cast<int32_t>(w.n_in), static_cast<const bf16*>(w.data),
          static_cast<int32_t>(tiles), static_cast<int32_t>(steps), static_cast<int32_t>(ranks),
          warp_steps, {ranges, kParts, warp_steps, 1, 1}, args.out, args.out_rows,
          static_cast<int32_t>(gated ? w.n_out / 2 : w.n_out), args.kind};
}

void dense(cudaStream_t stream, const DenseArgs& args) {
  if (args.n.most == 0) return;
  const Product product = describe(args);
  const bool gated = args.kind == DenseOut::swiglu;
  const int64_t tiles = product.tiles, steps = product.steps, ranks = product.ranks;
  if (few_rows(stream, product, shared_limit())) return;
  if (some_rows(stream, product, shared_limit())) return;
  if (takes_many_rows(product, shared_limit())) return many_rows(stream, product);
  const auto run = [&](auto variant) { variant(stream, product, ranks); };
  // More tiles a block: fewer reads of activations. Fewer: more blocks. Where a block fills a multiprocessor, clusters of four
  // leave some of those idle: with five tiles there are few enough. Tiles of gate and up are a pair.
  constexpr int64_t kEnoughQuads = 100, kDeep = 256;
  const bool quads = divide_up(tiles, 4) * ranks >= kEnoughQuads, deep = steps >= kDeep && !gated;
  const bool room = shared_limit() >= kSharedBytes<8, 5, 5>;
  if (args.n.most <= kTokens) run(launch<1, 2, 8>);
  else if (args.n.most <= 2 * kTokens && !quads) run(launch<2, 2, 8>);
  else if (args.n.most <= 2 * kTokens) run(launch<2, 4, 4>);
  else if (args.n.most <= 4 * kTokens && deep && room) run(launch<4, 5, 4>);
  else if (args.n.most <= 4 * kTokens && !gated) run(launch<4, 2, 6>);
  else if (args.n.most <= 4 * kTokens || !room) run(launch<4, 4, 4>);
  else if (args.n.most <= 8 * kTokens && deep) run(launch<8, 5, 5>);
  else if (args.n.most <= 8 * kTokens && !gated) run(launch<4, 4, 4>);
  else run(launch<8, 4, 5>);
}

void CudaOps::linear(const LinearArgs& args) {
  const auto* x = static_cast<const bf16*>(args.x);
  if (args.partial) return dense(stream_, {args.n, x, *args.weight, args.partial, DenseOut::fp32, args.x_rows, {}});
  dense(stream_, {args.n, x, *args.weight, args.out, args.accumulate ? DenseOut::add : DenseOut::bf16, args.x_rows,
                  args.out_rows});
}

void CudaOps::logits(const LinearArgs& args) {
  dense(stream_, {args.n, static_cast<const bf16*>(args.x), *args.weight, args.out, DenseOut::fp32, args.x_rows,
                  args.out_rows});
}

void CudaOps::mlp(const MlpArgs& args) {
  auto* hidden = static_cast<bf16*>(args.scratch);
  dense(stream_, {args.n, static_cast<const bf16*>(args.x), *args.gate_up, hidden, DenseOut::swiglu, {0, args.index}});
  if (args.partial) return dense(stream_, {args.n, hidden, *args.down, args.partial, DenseOut::fp32, {}, {}});
  dense(stream_, {args.n, hidden, *args.down, args.out, DenseOut::add, {}, {0, args.index}});
}

}  // namespace kdt::cuda
