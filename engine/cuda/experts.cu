// The mixture of experts: INT4 experts and the BF16 shared one, in three launches (four where a list of work pays).
//
//   1. gate | up of every expert that has tokens: fp32 sums. A block is four warps on one tile of 64 outputs of one
//      item of work (up to 8 or 32 tokens of an expert); tiles of the shared expert are further blocks of the same
//      launch.
//   2. SwiGLU of those sums, rounded to BF16, and down: fp32 outputs of every pair (row, rank). A warp has whole
//      tiles.
//   3. out = bf16(out + (sum over ranks of weight * output + shared)).
// Each starts while the one before still runs and fetches weights until that has ended. Step 2 does not wait for all of
// step 1, where there are more than a few items: a block of that counts itself done with its item, or its group of rows of the
// shared expert, and down begins where the count is full. Blocks of step 2 take room when all of step 1 have begun
// (let_next_start), so none waits for one that cannot run.
//
// Order of sums, whoever shares a pass: the inputs of gate and up are cut into 4 or 16 slices by their number alone. A
// slice is one chain of mma.sync, inputs ascending; slices are added ascending in fours, then the fours. Where items
// are few every four has a block of its own (`splits`) and step 2 adds them up; where they are many a warp takes four
// slices one after the other. Down is one chain over all inputs. Of many rows, steps 1 and 2 are for experts_many.cu where it takes
// them, and of a few all three for experts_few.cu.
#include "base/error.h"
#include "cuda/experts_few.cuh"
#include "cuda/experts_many.cuh"
#include "cuda/experts_shapes.cuh"
#include "cuda/linear_product.cuh"

namespace kdt::cuda {
namespace {

constexpr int kStages = 4;               // of a warp's ring of weights
constexpr int kWideTokens = 32;
constexpr int64_t kFewItems = 40;        // of which every four slices have a block
constexpr int64_t kWideFrom = 6;         // pairs an expert, from which items have up to 32
constexpr int64_t kManyFrom = 10;        // … from which experts_many.cu has kernels for them
constexpr int kCombineThreads = 128;
constexpr size_t kMostShared = 99 << 10; // of a block, on any device

// Stages of a ring that holds tokens, too.
__host__ __device__ constexpr int stages_with(int64_t groups) { return groups == 1 ? kStages : 3; }

// Who does which slices of the inputs of gate and up. Binary logarithms: nothing is divided on the way to the weights.
struct Slicing {
  int32_t splits;                        // log2 of the blocks of a tile, 1 or 4
  int32_t slices;                        // log2 of the slices of a warp, 1 or 4; 4 with one block
  __device__ int first(int split, int warp) const { return (split * kExpertWarps + warp) << slices; }
  __device__ int n() const { return 1 << slices; }
  // The first stage of a slice.
  __device__ int border(int stages, int slice) const { return stages * slice >> (splits + slices + kLogWarps); }
};

struct GateUp {
  Routing routing;
  int32_t n_experts;
  const bf16* x;                         // [n, hidden]
  int32_t hidden;
  Int4Shape weight;
  DenseShape shared;
  uint32_t shared_blocks;                // the first of the grid
  Slicing slicing;
  int32_t *done, *shared_done;           // of items, of groups of rows: blocks that are; null: nobody counts
  float* sums;                           // [pairs][splits][2 * width]
  float* shared_sums;                    // [rows][splits][tiles * 16], tiles of gate and up in turns
  const std::byte* shared_down;          // that of the shared expert, so many bytes: a block of its first tokens asks for a share
  int32_t down_bytes, down_share;
};

struct Down {
  Routing routing;
  Int4Shape weight;
  DenseShape shared;
  uint32_t shared_blocks, blocks_an_item, blocks_a_group;
  int32_t tiles_a_warp, splits;
  int32_t width, shared_width;           // the latter a multiple of 16
  int32_t row_bytes;                     // of an activation row in shared memory
  const int32_t *done, *shared_done;
  int32_t blocks_done, shared_blocks_done;   // when all are
  const float *sums, *shared_sums;
  int32_t hidden;
  float* out;                            // [pairs][hidden]
  float* shared_out;                     // [rows][hidden]
};

struct Combine {
  LiveRows n;
  int32_t k, hidden;
  const float *outputs, *shared_outputs;
  const float* weight;                   // [n, k]
  bf16* out;
  float* partial;
  int32_t* done;                         // [n_done], to be zero again
  uint32_t n_done;
};

// A block is done with what it has written for part `of`: any block that waits for that sees it.
__device__ inline void count_done(int32_t* done, int of) {
  if (!done) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(done + of, 1);
  }
}

// Until `blocks` are done with part `of`, or, if nobody counts, the kernel before is.
__device__ inline void wait_for_done(const int32_t* done, int of, int blocks) {
  if (!done) return wait_for_previous();
  if (threadIdx.x == 0)
    for (int32_t n = 0; n < blocks;) {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(n) : "l"(done + of) : "memory");
      if (n < blocks) __nanosleep(40);
    }
  __syncthreads();
}

// A warp's share of a product with all of its tokens: chain after chain over its slices, the chains added up.
// `under_way`: the weights of the first stages are being fetched already.
template <class Weight, int kGroups>
__device__ inline void multiply_slices(typename Weight::Fetch weight, TokenFetch<kGroups> x, int stages,
                                       const Slicing& slicing, int first, bool under_way, std::byte* ring, int lane,
                                       float (&total)[kGroups][Weight::kQuads][4]) {
  constexpr int kStage = kWeightStage + kGroups * kTokenStage, kRing = stages_with(kGroups);
  int stage = slicing.border(stages, first);
  const int end = slicing.border(stages, first + slicing.n());
#pragma unroll
  for (int i = 0; i < kRing; ++i) {
    if (stage + i < end) {
      if (!under_way) weight(ring + i * kStage, lane);
      x(ring + i * kStage + kWeightStage, lane);
    }
    cp_async_commit();
  }
  int place = 0;
  for (int slice = 0; slice < slicing.n(); ++slice) {
    float sum[kGroups][Weight::kQuads][4] = {};
    for (const int until = slicing.border(stages, first + slice + 1); stage < until; ++stage) {
      std::byte* at = ring + place * kStage;
      cp_async_wait<kRing - 1>();
      __syncwarp();   // scales and tokens are copied by other lanes
      Weight::multiply(at, RingTokens{at + kWeightStage}, lane, sum);
      __syncwarp();
      if (stage + kRing < end) {
        weight(at, lane);
        x(at + kWeightStage, lane);
      }
      cp_async_commit();
      place = place + 1 == kRing ? 0 : place + 1;
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int q = 0; q < Weight::kQuads; ++q)
#pragma unroll
        for (int i = 0; i < 4; ++i) total[g][q][i] = slice ? total[g][q][i] + sum[g][q][i] : sum[g][q][i];
  }
}

// Adds up the sums of the block's warps, which lie where their rings were, and puts token t's at out + slots[t] * row.
template <class Weight, int kGroups>
__device__ inline void store_sums(const float (&total)[kGroups][Weight::kQuads][4], std::byte* shared,
                                  const int32_t* slots, int count, float* out, int64_t row, int n_outputs) {
  constexpr int kOutputs = Weight::kOutputs, kStride = kOutputs + 4, kWarpSums = kGroups * 8 * kStride;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  auto* sums = reinterpret_cast<float*>(shared);
  __syncthreads();
#pragma unroll
  for (int g = 0; g < kGroups; ++g)
#pragma unroll
    for (int q = 0; q < Weight::kQuads; ++q)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = g * 8 + lane % 4 * 2 + i % 2, o = q * 16 + lane / 4 + i / 2 * 8;
        sums[warp * kWarpSums + token * kStride + o] = total[g][q][i];
      }
  __syncthreads();
  for (int i = threadIdx.x; i < count * kOutputs; i += kExpertThreads) {
    const int token = i / kOutputs, o = i % kOutputs;
    if (o >= n_outputs) continue;
    const float* at = sums + token * kStride + o;
    float sum = at[0];
#pragma unroll
    for (int w = 1; w < kExpertWarps; ++w) sum += at[w * kWarpSums];
    out[slots[token] * row + o] = sum * Weight::kUnscale;
  }
}

// Blocks of an item: all tiles of the first split, then of the next.
template <int kGroups>
__global__ void __launch_bounds__(kExpertThreads, kGroups == 1 ? 4 : 2)
    gate_up_kernel(const __grid_constant__ GateUp p) {
  constexpr int kStage = kWeightStage + kGroups * kTokenStage, kRing = stages_with(kGroups),
                kTokens = 8 * kGroups;
  extern __shared__ __align__(128) std::byte shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  std::byte* ring = shared + warp * kRing * kStage;
  int32_t* slots = reinterpret_cast<int32_t*>(shared + kExpertWarps * kRing * kStage) + warp * kTokens;
  const uint32_t splits = 1u << p.slicing.splits;

  if (blockIdx.x < p.shared_blocks) {
    const uint32_t of_group = blockIdx.x / p.shared.tiles, tile = blockIdx.x - of_group * p.shared.tiles;
    const int split = of_group & (splits - 1), group = of_group >> p.slicing.splits;
    const int first = p.slicing.first(split, warp), begin = p.slicing.border(p.shared.stages, first);
    const int end = p.slicing.border(p.shared.stages, first + p.slicing.n());
    DenseWeight::Fetch weight = DenseWeight{p.shared.fragments, p.shared.steps}.fetch(tile, begin, lane);
    const bool early = group == 0;     // needed whenever there is a row
    if (early) {
#pragma unroll
      for (int i = 0; i < kRing; ++i)
        if (begin + i < end) weight(ring + i * kStage, lane);
      if (lane == 0 && begin + kRing < end)
        ask_for(weight.fragments, (min(end * kStageSteps, p.shared.steps) - (begin + kRing) * kStageSteps) * kPieceBytes);
      if (threadIdx.x == kWarp) {
        const int from = static_cast<int>(blockIdx.x) * p.down_share;
        if (from < p.down_bytes) ask_for(p.shared_down + from, min(p.down_share, p.down_bytes - from));
      }
    }
    const int count = min(kTokens, p.routing.n.get() - group * kTokens);
    wait_for_previous();
    let_next_start();
    if (count <= 0) {
      cp_async_commit();
      cp_async_wait<0>();
      return;
    }
    if (lane < kTokens) slots[lane] = group * kTokens + lane;
    __syncwarp();
    float total[kGroups][DenseWeight::kQuads][4];
    multiply_slices<DenseWeight>(weight, TokenFetch<kGroups>(p.x, p.hidden, kTileGroup, slots, count, 1, begin, lane),
                                 p.shared.stages, p.slicing, first, early, ring, lane, total);
    const int64_t row = p.shared.tiles * 16;
    store_sums<DenseWeight>(total, shared, slots, count, p.shared_sums + split * row + tile * 16, row * splits, 16);
    count_done(p.shared_done, group);
    return;
  }

  const uint32_t block = blockIdx.x - p.shared_blocks, of_item = block / p.weight.tiles;
  const int tile = block - of_item * p.weight.tiles, split = of_item & (splits - 1), item = of_item >> p.slicing.splits;
  if (!p.routing.items) {
    prefetch_table(p.routing.gate_up, p.n_experts, block * kExpertThreads + threadIdx.x);
    prefetch_table(p.routing.down, p.n_experts, block * kExpertThreads + threadIdx.x);
  }
  wait_for_previous();
  let_next_start();
  const Work work = find_work<kTokens>(p.routing, item, false, slots, lane);
  if (work.count == 0) return;
  const int first = p.slicing.first(split, warp), begin = p.slicing.border(p.weight.stages, first);
  const Int4Weight weight{work.weight, work.scales, p.weight.tiles, p.weight.groups};
  float total[kGroups][Int4Weight::kQuads][4];
  multiply_slices<Int4Weight>(
      weight.fetch(tile, begin, lane),
      TokenFetch<kGroups>(p.x, p.hidden, p.weight.spread, slots, work.count, p.routing.k, begin, lane), p.weight.stages,
      p.slicing, first, false, ring, lane, total);
  const int64_t row = p.weight.n_out;
  store_sums<Int4Weight>(total, shared, slots, work.count, p.sums + split * row + tile * kTileOutputs, row * splits,
                         p.weight.n_out - tile * static_cast<int>(kTileOutputs));
  count_done(p.done, item);
}

// Four outputs of gate or up: the sums of its splits, ascending.
__device__ inline float4 sum_of_splits(const float* from, int splits, int64_t stride) {
  const auto load = [&](int s) { return __ldcg(reinterpret_cast<const float4*>(from + s * stride)); };
  float4 sum = load(0);
  if (splits > 1) {
    float4 part[kSplits - 1];
#pragma unroll
    for (int s = 1; s < kSplits; ++s) part[s - 1] = load(s);
#pragma unroll
    for (int s = 0; s < kSplits - 1; ++s) {
      sum.x += part[s].x, sum.y += part[s].y;
      sum.z += part[s].z, sum.w += part[s].w;
    }
  }
  return sum;
}

// The block's tokens as down reads them, to shared memory: bf16(silu(gate) * up). Sums lie at slots[t] * splits * row;
// gate of output j at gate_at(j) and up at up_at(j), for fours of j; the result goes to place(j).
template <class Gate, class Up, class Place>
__device__ inline void stage_activations(const float* sums, int splits, int64_t row, int width, int count,
                                         const int32_t* slots, std::byte* rows, int row_bytes, bool holes,
                                         const Gate& gate_at, const Up& up_at, const Place& place) {
  if (holes) {   // inputs that nothing is put to
    for (int i = threadIdx.x; i < count * row_bytes / 16; i += kExpertThreads)
      reinterpret_cast<uint4*>(rows)[i] = {0, 0, 0, 0};
    __syncthreads();
  }
  const int fours = width / 4;
  for (int i = threadIdx.x; i < count * fours; i += kExpertThreads) {
    const int token = i / fours, j = i % fours * 4;
    const float* from = sums + slots[token] * (splits * row);
    const float4 gate = sum_of_splits(from + gate_at(j), splits, row), up = sum_of_splits(from + up_at(j), splits, row);
    auto* to = reinterpret_cast<__nv_bfloat162*>(rows + token * row_bytes + place(j) * 2);
    to[0] = __floats2bfloat162_rn(swiglu(gate.x, up.x), swiglu(gate.y, up.y));
    to[1] = __floats2bfloat162_rn(swiglu(gate.z, up.z), swiglu(gate.w, up.w));
  }
  __syncthreads();
}

// Tiles of down, from weights whose first stages are under way and activations that are staged.
template <class Weight, int kGroups>
__device__ inline void multiply_tiles(TileFetch<Weight>& fetch, TileRange at, int stages, std::byte* ring,
                                      const std::byte* rows, int row_bytes, const int32_t* slots, int count, int lane,
                                      float* out, int hidden) {
  int place = 0;
  while (at.left > 0) {
    float sum[kGroups][Weight::kQuads][4] = {};
    for (int stage = 0; stage < stages; ++stage) {
      std::byte* from = ring + place * kWeightStage;
      cp_async_wait<kStages - 1>();
      __syncwarp();
      Weight::multiply(from, RowTokens{rows + stage * kStageInputs * 2, row_bytes}, lane, sum);
      __syncwarp();
      fetch(from, lane);
      place = place + 1 == kStages ? 0 : place + 1;
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = g * 8 + lane % 4 * 2 + half;
        if (token >= count) continue;
        float* to = out + static_cast<int64_t>(slots[token]) * hidden;
#pragma unroll
        for (int q = 0; q < Weight::kQuads; ++q)
#pragma unroll
          for (int eight = 0; eight < 2; ++eight) {
            const int o = at.tile * Weight::kOutputs + q * 16 + eight * 8 + lane / 4;
            if (o < hidden) to[o] = sum[g][q][eight * 2 + half] * Weight::kUnscale;
          }
      }
    at.tile += kExpertWarps;
    --at.left;
  }
}

// The tiles of a block's warp: from block * tiles_a_warp * kExpertWarps + warp on.
__device__ inline TileRange tiles_of_warp(int block, int warp, int tiles_a_warp, int tiles) {
  const int first = block * tiles_a_warp * kExpertWarps + warp;
  const int rest = tiles > first ? (tiles - first + kExpertWarps - 1) / kExpertWarps : 0;
  return {first, min(tiles_a_warp, rest)};
}

// What earlier kernels than gate_up_kernel wrote may be read before it has ended: its blocks let this one start after
// waiting for them. Blocks of the shared expert, which there always are, end after it has: kernels to come need not think of it.
template <int kGroups>
__global__ void __launch_bounds__(kExpertThreads, kGroups == 1 ? 5 : 3) down_kernel(const __grid_constant__ Down p) {
  constexpr int kTokens = 8 * kGroups, kRings = kExpertWarps * kStages * kWeightStage;
  extern __shared__ __align__(128) std::byte shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  std::byte* ring = shared + warp * kStages * kWeightStage;
  int32_t* slots = reinterpret_cast<int32_t*>(shared + kRings) + warp * kTokens;
  std::byte* rows = shared + kRings + kExpertWarps * kTokens * 4;

  if (blockIdx.x < p.shared_blocks) {
    const int group = blockIdx.x / p.blocks_a_group;
    const int count = min(kTokens, p.routing.n.get() - group * kTokens);
    if (count <= 0) {
      wait_for_previous();
      return;
    }
    const TileRange at = tiles_of_warp(blockIdx.x - group * p.blocks_a_group, warp, p.tiles_a_warp, p.shared.tiles);
    TileFetch<DenseWeight> fetch({p.shared.fragments, p.shared.steps}, at, p.shared.stages, lane);
#pragma unroll
    for (int i = 0; i < kStages; ++i) fetch(ring + i * kWeightStage, lane);
    if (lane < kTokens) slots[lane] = group * kTokens + lane;
    __syncwarp();
    wait_for_done(p.shared_done, group, p.shared_blocks_done);
    let_next_start();
    const auto gate_at = [](int j) { return j / 16 * 32 + j % 16; };
    stage_activations(p.shared_sums, p.splits, 2 * p.shared_width, p.shared_width, count, slots, rows, p.row_bytes,
                      p.shared_width % kStageInputs != 0, gate_at, [&](int j) { return gate_at(j) + 16; },
                      [](int j) { return j; });
    multiply_tiles<DenseWeight, kGroups>(fetch, at, p.shared.stages, ring, rows, p.row_bytes, slots, count, lane,
                                         p.shared_out, p.hidden);
    wait_for_previous();
    return;
  }

  const uint32_t block = blockIdx.x - p.shared_blocks, item = block / p.blocks_an_item;
  const Work work = find_work<kTokens>(p.routing, static_cast<int>(item), true, slots, lane);
  if (work.count == 0) return;
  const TileRange at = tiles_of_warp(block - item * p.blocks_an_item, warp, p.tiles_a_warp, p.weight.tiles);
  TileFetch<Int4Weight> fetch({work.weight, work.scales, p.weight.tiles, p.weight.groups}, at, p.weight.stages, lane);
#pragma unroll
  for (int i = 0; i < kStages; ++i) fetch(ring + i * kWeightStage, lane);
  wait_for_done(p.done, static_cast<int>(item), p.blocks_done);
  let_next_start();
  stage_activations(p.sums, p.splits, 2 * p.width, p.width, work.count, slots, rows, p.row_bytes,
                    p.weight.spread < kTileGroup || p.width % kStageInputs != 0, [](int j) { return j; },
                    [&](int j) { return p.width + j; },
                    [&](int j) { return j / p.weight.spread * static_cast<int>(kTileGroup) + j % p.weight.spread; });
  multiply_tiles<Int4Weight, kGroups>(fetch, at, p.weight.stages, ring, rows, p.row_bytes, slots, work.count, lane,
                                      p.out, p.hidden);
}

// Four outputs a thread.
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ Combine p) {
  constexpr int kAtOnce = 8;
  const int64_t row = blockIdx.y;
  const int j = (blockIdx.x * kCombineThreads + threadIdx.x) * 4;
  const bool live = row < p.n.get() && j < p.hidden;
  wait_for_previous();
  let_next_start();
  const uint32_t block = blockIdx.y * gridDim.x + blockIdx.x;
  const uint32_t threads = gridDim.x * gridDim.y * kCombineThreads;
  for (uint32_t i = block * kCombineThreads + threadIdx.x; i < p.n_done; i += threads) p.done[i] = 0;
  if (!live) return;
  const auto load = [&](const float* from, int64_t of) {
    return __ldcg(reinterpret_cast<const float4*>(from + of * p.hidden + j));
  };
  float sum[4] = {};
  for (int first = 0; first < p.k; first += kAtOnce) {
    float4 y[kAtOnce];
    float weight[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i < p.k) {
        y[i] = load(p.outputs, row * p.k + first + i);
        weight[i] = p.weight[row * p.k + first + i];
      }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i < p.k) {
        sum[0] = fmaf(weight[i], y[i].x, sum[0]);
        sum[1] = fmaf(weight[i], y[i].y, sum[1]);
        sum[2] = fmaf(weight[i], y[i].z, sum[2]);
        sum[3] = fmaf(weight[i], y[i].w, sum[3]);
      }
  }
  const float4 shared = load(p.shared_outputs, row);
  if (p.partial) {
    *reinterpret_cast<float4*>(p.partial + row * p.hidden + j) =
        make_float4(sum[0] + shared.x, sum[1] + shared.y, sum[2] + shared.z, sum[3] + shared.w);
    return;
  }
  auto* out = reinterpret_cast<__nv_bfloat162*>(p.out + row * p.hidden + j);
  const float2 low = __bfloat1622float2(out[0]), high = __bfloat1622float2(out[1]);
  out[0] = __floats2bfloat162_rn(low.x + (sum[0] + shared.x), low.y + (sum[1] + shared.y));
  out[1] = __floats2bfloat162_rn(high.x + (sum[2] + shared.z), high.y + (sum[3] + shared.w));
}

// How a call is carried out, and where things lie in its scratch. Bits do not depend on it.
struct Plan {
  bool listed;
  int64_t tokens, n_pairs, n_items, splits, slices;
  int32_t* list_size;
  WorkItem* items;
  int32_t* pairs;
  float *sums, *shared_sums, *out, *shared_out;
  size_t bytes = 0;

  Plan(void* base, int64_t rows, int64_t k, int64_t n_experts, int64_t width, int64_t shared_width, int64_t hidden,
       int64_t tokens)                   // an item's pairs at most
      : tokens(tokens), n_pairs(rows * k) {
    listed = tokens > kScanTokens || n_pairs > kScanPairs;
    n_items = listed ? most_items(n_pairs, n_experts, tokens) : n_pairs;
    const bool many_slices = hidden >= kSplitInputs, few = n_items <= kFewItems;
    splits = many_slices && few ? kSplits : 1;
    slices = many_slices && !few ? kSplits : 1;
    auto* at = static_cast<std::byte*>(base);
    const auto take = [&](auto*& pointer, int64_t count) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(at + bytes);
      bytes += static_cast<size_t>(divide_up(count * static_cast<int64_t>(sizeof(*pointer)), 128) * 128);
    };
    take(list_size, 2);                   // and a zero
    take(items, listed ? n_items : 0);
    take(pairs, listed ? n_items * tokens : 0);
    take(sums, n_pairs * splits * 2 * width);
    take(shared_sums, rows * splits * 2 * tiles_of(shared_width) * kTileRows);
    take(out, n_pairs * hidden);
    take(shared_out, rows * hidden);
  }
};

// Bytes of an activation row of down in shared memory: whole stages, and a chunk so that rows lie in different banks.
int64_t activation_row(const Matrix& down, const Matrix& shared_down) {
  const int64_t stages = std::max(Int4Shape(down).stages, DenseShape(shared_down, 0).stages);
  return stages * kStageInputs * 2 + 16;
}

size_t gate_up_shared(int64_t groups) {
  const int64_t ring = stages_with(groups) * (kWeightStage + groups * kTokenStage);
  return static_cast<size_t>(kExpertWarps * (ring + 8 * groups * 4));
}

size_t down_shared(int64_t groups, int64_t row_bytes) {
  return static_cast<size_t>(kExpertWarps * (kStages * kWeightStage + 8 * groups * 4) + 8 * groups * row_bytes);
}

template <class Args>
void launch(const char* name, void (*kernel)(Args), int64_t blocks, size_t shared, cudaStream_t stream,
            const Args& args) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)), name);
  launch_overlapping(name, kernel, dim3(static_cast<unsigned>(blocks)), kExpertThreads, shared, stream, args);
}

void combine(cudaStream_t stream, const ExpertsArgs& args, const Plan& plan, int32_t* done, int64_t n_done) {
  const dim3 grid(static_cast<unsigned>(divide_up(args.hidden, 4 * kCombineThreads)),
                  static_cast<unsigned>(args.n.most));
  const Combine third{LiveRows(args.n), static_cast<int32_t>(args.k), static_cast<int32_t>(args.hidden), plan.out,
                      plan.shared_out, args.weight, static_cast<bf16*>(args.out), args.partial, done, static_cast<uint32_t>(n_done)};
  launch_overlapping("combine_kernel", combine_kernel, grid, kCombineThreads, 0, stream, third);
}

}  // namespace

// A call with fewer rows may be carried out in another way: the most that any needs.
size_t CudaOps::experts_scratch_bytes(int64_t rows, int64_t k, int64_t n_experts, int64_t width, int64_t shared_width,
                                      int64_t hidden) const {
  size_t most = 0;
  for (const int64_t n : {rows, std::min(rows, kScanPairs / k), std::min(rows, kFewItems / k)})
    for (const int64_t tokens : {kScanTokens, kWideTokens, kManyTokens})
      most = std::max(most, Plan(nullptr, n, k, n_experts, width, shared_width, hidden, tokens).bytes);
  return most;
}

void CudaOps::experts(const ExpertsArgs& args) {
  if (args.n.most == 0) return;
  const Int4Shape gate_up(args.gate_up.host[0]), down(args.down.host[0]);
  const int64_t shared_width = tiles_of(args.shared_down->n_in) * kTileRows;
  const int64_t row_bytes = activation_row(args.down.host[0], *args.shared_down);
  if (down_shared(1, row_bytes) > kMostShared)
    fail(Status::unsupported, "moe_intermediate_size", std::to_string(args.width) + ", of shared experts " +
         std::to_string(args.shared_down->n_in), "experts whose activations fit the shared memory of a block");
  const bool wide = args.n.most * args.k >= kWideFrom * args.n_experts &&
                    down_shared(kWideTokens / 8, row_bytes) <= kMostShared;
  const bool many = args.n.most * args.k >= kManyFrom * args.n_experts && takes_many_experts(args, static_cast<int64_t>(shared_limit_));
  const Plan plan(args.scratch, args.n.most, args.k, args.n_experts, args.width, args.shared_down->n_in, args.hidden,
                  many ? kManyTokens : wide ? kWideTokens : kScanTokens);
  const int64_t row_groups = divide_up(args.n.most, plan.tokens);
  const auto to32 = [](int64_t value) { return static_cast<int32_t>(value); };

  const Routing routing{LiveRows(args.n), to32(args.k), args.expert, args.gate_up.device, args.down.device,
                        plan.list_size, plan.listed ? plan.items : nullptr, plan.pairs};
  if (plan.listed)
    list_work(stream_, {LiveRows(args.n), to32(args.k), to32(args.n_experts), to32(plan.tokens), args.expert,
                        args.gate_up.device, args.down.device, plan.list_size, plan.items, plan.pairs});

  if (many) {
    many_experts(stream_, args, routing, args.hidden >= kSplitInputs ? 2 * kLogSplits : kLogSplits,
                 {plan.list_size + 1, reinterpret_cast<bf16*>(plan.sums), reinterpret_cast<bf16*>(plan.shared_sums), plan.out,
                  plan.shared_out});
    return combine(stream_, args, plan, nullptr, 0);
  }

  if (!plan.listed && takes_few_experts(args, static_cast<int64_t>(shared_limit_)))
    return few_experts(stream_, args, routing, reinterpret_cast<bf16*>(plan.sums), reinterpret_cast<bf16*>(plan.shared_sums));

  const DenseShape shared_gate_up(*args.shared_gate_up, 2 * shared_width / kTileRows);
  const DenseShape shared_down(*args.shared_down, tiles_of(args.hidden));
  const int64_t down_bytes = std::min<int64_t>(packed_size(shared_down.tiles, shared_down.steps) * 2, kMostAsked);
  const int64_t shared_blocks = row_groups * shared_gate_up.tiles * plan.splits;
  const Slicing slicing{plan.splits > 1 ? kLogSplits : 0, plan.slices > 1 ? kLogSplits : 0};
  const int64_t n_parts = plan.n_items + row_groups;
  // With few items all are done at about the same time, and counting costs more than it gains.
  int32_t* done = plan.n_items > kFewItems && n_parts <= kExpertsParts ? experts_done_.as<int32_t>() : nullptr;
  int32_t* shared_done = done ? done + plan.n_items : nullptr;
  const GateUp first{routing, to32(args.n_experts), static_cast<const bf16*>(args.x), to32(args.hidden), gate_up,
                     shared_gate_up, static_cast<uint32_t>(shared_blocks), slicing, done, shared_done, plan.sums,
                     plan.shared_sums,                      shared_down.fragments, to32(down_bytes),
                     to32(divide_up(down_bytes, shared_gate_up.tiles * plan.splits * kPieceBytes) * kPieceBytes)};
  launch("gate_up_kernel", wide ? gate_up_kernel<kWideTokens / 8> : gate_up_kernel<1>,
         shared_blocks + plan.n_items * gate_up.tiles * plan.splits, gate_up_shared(plan.tokens / 8), stream_, first);

  // The fewer items, the fewer tiles a block: its share of weights pays for what all blocks of an item do alike.
  const int64_t tiles_a_warp = plan.n_pairs <= 16 ? 1 : plan.n_pairs <= 128 ? 2 : 4;
  const auto blocks_of = [&](int64_t tiles) { return divide_up(tiles, tiles_a_warp * kExpertWarps); };
  const Down second{routing, down, shared_down, static_cast<uint32_t>(row_groups * blocks_of(shared_down.tiles)),
                    static_cast<uint32_t>(blocks_of(down.tiles)), static_cast<uint32_t>(blocks_of(shared_down.tiles)),
                    to32(tiles_a_warp), to32(plan.splits), to32(args.width), to32(shared_width), to32(row_bytes),
                    done, shared_done, to32(gate_up.tiles * plan.splits), to32(shared_gate_up.tiles * plan.splits),
                    plan.sums, plan.shared_sums, to32(args.hidden), plan.out, plan.shared_out};
  launch("down_kernel", wide ? down_kernel<kWideTokens / 8> : down_kernel<1>,
         second.shared_blocks + plan.n_items * second.blocks_an_item, down_shared(plan.tokens / 8, row_bytes), stream_,
         second);

  combine(stream_, args, plan, done, done ? n_parts : 0);
}

}  // namespace kdt::cuda
