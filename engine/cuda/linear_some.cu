// Products with BF16 weights for 17 to 128 rows, on sm_90a: linear.cu's kernel with weights and rows brought by the copy engine. The
// bits are those of linear.cu: the same ranges of K steps, whose sums are added in the same order.
//
// A block owns tiles of outputs, and a cluster shares out the inputs of its tiles. Each of a block's eight warps goes through a range
// of K steps with a ring of its own in shared memory, of stages of two steps: the weights as they lie and of every row 64 bytes, whose
// chunks of 16 the copy engine swaps about. A warp waits for nobody but what it has asked for; its first weights are under way before
// the kernel before has ended.
#include <cooperative_groups.h>

#include "cuda/linear_product.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/wgmma.cuh"

namespace kdt::cuda {
namespace {

constexpr int kWarps = kParts, kThreads = kWarps * kWarp;
constexpr int kStageSteps = 2, kStepBytes = 512, kRowBytes = 64;   // of a stage: K steps; of a tile's step; of a row
constexpr int kMaxRanks = 8;            // blocks of a cluster

struct Some {
  CUtensorMap x, weight;                // [row][input], [tile][step][elements]
  Product p;
};

// Shared memory: rings [warps][stages] of tiles [tiles][steps of a stage][512 bytes] and rows [rows][64 bytes]; barriers [warps][stages].
// The rings become sums, float [warps][rows][stride].
template <int kGroups, int kTiles, int kStages>
struct Shape {
  static constexpr int kRows = kGroups * kTokens, kOutputs = kTiles * static_cast<int>(kTileRows);
  static constexpr int kWeightBytes = kTiles * kStageSteps * kStepBytes, kStage = kWeightBytes + kRows * kRowBytes;
  static constexpr int kRing = kStages * kStage, kBarriers = kWarps * kRing, kBytes = kBarriers + kWarps * kStages * 8;
  static constexpr int kStride = kOutputs + 4, kWarpSums = kRows * kStride;
  static_assert(kWarpSums * 4 <= kRing && kBytes <= 227 << 10);
};

__device__ inline void meet_cluster() {
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

// Which row of a group a column of the product has: so that four columns' fragments lie in different banks.
__device__ constexpr int row_of_column(int column) { return (column & 1) | (column & 2) << 1 | (column & 4) >> 1; }

// Grid: x blocks of a cluster, y sets of tiles, z chunks of rows.
template <int kGroups, int kTiles, int kStages>
__global__ void __launch_bounds__(kThreads, 227 * 1024 / (Shape<kGroups, kTiles, kStages>::kBytes + 1024) > 1 ? 2 : 1)
    some_kernel(const __grid_constant__ Some some) {
  using S = Shape<kGroups, kTiles, kStages>;
  extern __shared__ __align__(1024) std::byte shared[];
  const Product& p = some.p;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarp, 0), lane = threadIdx.x % kWarp;
  const int rank = blockIdx.x, n_ranks = gridDim.x, first_tile = static_cast<int>(blockIdx.y) * kTiles;
  const int begin = min((rank * kWarps + warp) * p.warp_steps, p.steps), count = min(p.warp_steps, p.steps - begin);
  const int first_row = static_cast<int>(blockIdx.z) * S::kRows, n_stages = (count + kStageSteps - 1) / kStageSteps;
  const SharedAddress ring = shared_address(shared) + warp * S::kRing;
  auto* full = reinterpret_cast<uint64_t*>(shared + S::kBarriers) + warp * kStages;
  const auto bring_weights = [&](int stage, int place) {
    barrier_arrive(&full[place], S::kStage);
    bring_box(ring + place * S::kStage, some.weight, 0, begin + stage * kStageSteps, first_tile, &full[place]);
  };
  const auto bring_rows = [&](int stage, int place) {
    bring_box(ring + place * S::kStage + S::kWeightBytes, some.x, (begin + stage * kStageSteps) * static_cast<int>(kStepInputs), first_row, 0,
              &full[place]);
  };
  const int live = min(p.n.get() - first_row, S::kRows);
  if (live <= 0) {                      // the whole cluster alike
    wait_for_previous();
    return;
  }
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) barrier_init(&full[i], 1);
    fence_shared();                     // for the copy engine
    for (int i = 0; i < min(kStages, n_stages); ++i) bring_weights(i, i);
  }
  __syncwarp();
  wait_for_previous();
  let_next_start();
  if (lane == 0)
    for (int i = 0; i < min(kStages, n_stages); ++i) bring_rows(i, i);

  float sum[kTiles][kGroups][4] = {};
  const int row = row_of_column(lane / 4), swap = row / 2 % 4;
  const SharedAddress of_lane = S::kWeightBytes + row * kRowBytes + lane % 2 * 8;
  Place<kStages> place;
  for (int i = 0; i < n_stages; ++i, place.next()) {
    barrier_wait(&full[place.at], place.phase);
    const SharedAddress stage = ring + place.at * S::kStage;
#pragma unroll
    for (int s = 0; s < kStageSteps; ++s) {
      if (i * kStageSteps + s >= count) break;
      uint4 a[kTiles];
      uint2 b[kGroups];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) a[t] = shared16(stage + (t * kStageSteps + s) * kStepBytes + lane * 16);
      const SharedAddress chunk = stage + of_lane + (((s * 2 + lane % 4 / 2) ^ swap) << 4);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) b[g] = shared8(chunk + g * kTokens * kRowBytes);
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int g = 0; g < kGroups; ++g) mma(sum[t][g], {a[t].x, a[t].y, a[t].z, a[t].w}, {b[g].x, b[g].y});
    }
    __syncwarp();                       // all lanes have read it
    if (lane == 0 && i + kStages < n_stages) bring_weights(i + kStages, place.at), bring_rows(i + kStages, place.at);
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
        sums[warp * S::kWarpSums + (g * kTokens + row_of_column(lane % 4 * 2 + i % 2)) * S::kStride + t * 16 + lane / 4 + i / 2 * 8] =
            sum[t][g][i];
  __syncthreads();
  const auto of_warps = [&](int at) {
    float total = sums[at];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total += sums[w * S::kWarpSums + at];
    return total;
  };
  if (n_ranks > 1) {
    for (int i = threadIdx.x; i < live * S::kOutputs; i += kThreads) {
      const int at = i / S::kOutputs * S::kStride + i % S::kOutputs;
      sums[at] = of_warps(at);
    }
    meet_cluster();
  }
  const auto total = [&](int at) {
    if (n_ranks == 1) return of_warps(at);
    float part[kMaxRanks];              // all are under way before the first is added
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
  const int width = gated ? S::kOutputs / 2 : S::kOutputs;
  const int64_t first_output = static_cast<int64_t>(blockIdx.y) * width;
  for (int i = rank * kThreads + threadIdx.x; i < live * width; i += n_ranks * kThreads) {
    const int token = i / width, o = i % width;
    if (first_output + o >= p.n_out) continue;
    const int sums_at = token * S::kStride + (gated ? o / 16 * 32 + o % 16 : o);
    put(p, row_at(p.out_rows, first_row + token, p.n_out) + first_output + o, total(sums_at), gated ? total(sums_at + 16) : 0.0f);
  }
  if (n_ranks > 1) meet_cluster();      // until all have read this block's sums
}

template <int kGroups, int kTiles, int kStages>
void launch(cudaStream_t stream, const Product& p) {
  using S = Shape<kGroups, kTiles, kStages>;
  const int64_t row_bytes = (p.x_rows.stride > 0 ? p.x_rows.stride : p.n_in) * 2, tile_bytes = int64_t{p.steps} * kStepBytes;
  const Some some{tensor_map(p.x, {p.n_in, p.n.most, 1}, {row_bytes, row_bytes * p.n.most}, {S::kRows, 1}, kHalfSwappedRow),
                  tensor_map(p.weight, {kPlainRow, p.steps, p.tiles}, {kStepBytes, tile_bytes}, {kStageSteps, kTiles}, kPlainRow), p};
  const auto kernel = some_kernel<kGroups, kTiles, kStages>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes), "some_kernel");
  const dim3 grid(static_cast<unsigned>(p.ranks), static_cast<unsigned>(divide_up(p.tiles, kTiles)),
                  static_cast<unsigned>(divide_up(p.n.most, S::kRows)));
  launch_overlapping("some_kernel", kernel, grid, kThreads, S::kBytes, stream, some, static_cast<unsigned>(p.ranks));
}

}  // namespace

bool some_rows(cudaStream_t stream, const Product& p, int64_t shared_limit) {
  constexpr int64_t kShared = 227 << 10, kDeep = 256;   // what the largest variant takes is less; K steps
  if (shared_limit < kShared || !is_hopper("some_kernel", some_kernel<4, 5, 4>)) return false;
  const bool deep = p.steps >= kDeep, whole = p.x_rows.stride % 8 == 0 && p.n_in % kStepInputs == 0 &&
                                              reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && !p.x_rows.index;
  if (!whole || p.n.most <= 2 * kTokens || p.n.most > (deep ? 128 : 127)) return false;
  // Tiles of gate and up are a pair. Five tiles a block are few enough for clusters of four (linear.cu); where K is short two, for then
  // two blocks share a multiprocessor.
  const auto run = [&](auto of_four, auto of_eight) { p.n.most <= 4 * kTokens ? of_four(stream, p) : of_eight(stream, p); };
  if (p.kind == DenseOut::swiglu) run(launch<4, 4, 4>, launch<8, 4, 3>);
  else if (deep) run(launch<4, 5, 4>, launch<8, 5, 3>);
  else run(launch<4, 2, 3>, launch<8, 2, 2>);
  return true;
}

}  // namespace kdt::cuda
