// The router, and the list of what its choices give each expert to do.
#include <string>

#include "base/error.h"
#include "cuda/linear_product.cuh"
#include "cuda/moe.cuh"

namespace kdt::cuda {
namespace {

constexpr int kMostExperts = 1024;       // a thread each
constexpr int kRouterTiles = 2, kRouterSteps = 8;   // of a block; of a warp, at most
constexpr int64_t kRouterRows = 64;
constexpr int kListThreads = 1024;
constexpr size_t kListShared = 96 << 10;

// Logits, each in `parts` that lie `part_stride` apart and are added up ascending.
struct Choose {
  LiveRows n;
  int32_t n_experts, k;
  const float* logits;                   // [parts][n, n_experts]
  int32_t parts;
  int64_t part_stride;
  const float* bias;
  bool normalise;
  float scaling;
  int32_t* expert;
  float* weight;
};

constexpr uint32_t kTaken = 0, kNan = 1;   // keys below those of all numbers

// Larger for larger numbers. NaN is below all of them, and both zeros are one.
__device__ inline uint32_t key_of(float value) {
  if (isnan(value)) return kNan;
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// How many of `count` keys (a multiple of four of them, aligned) come before the one at `mine`: larger ones, and equal ones
// that stand before it.
__device__ inline int rank_among(const uint32_t* keys, int count, int mine, uint32_t key) {
  int rank = 0;
#pragma unroll 8
  for (int i = 0; i < count; i += 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(keys + i);
    const uint32_t other[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) rank += i + j < mine ? other[j] >= key : other[j] > key;   // not its own
  }
  return rank;
}

// A block a row, a thread an expert. Every warp finds the k best of its 32, and of those the block.
__global__ void __launch_bounds__(kMostExperts) choose_kernel(const __grid_constant__ Choose p) {
  extern __shared__ __align__(16) uint32_t shared_keys[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, n_warps = blockDim.x / kWarp;
  const int keep = min(p.k, kWarp), n_kept = n_warps * keep, n_fours = (n_kept + 3) / 4 * 4;
  uint32_t* kept_keys = shared_keys + blockDim.x;          // [fours]
  auto* kept = reinterpret_cast<int32_t*>(kept_keys + n_fours);        // [kept] experts
  auto* kept_scores = reinterpret_cast<float*>(kept + n_kept);         // [kept]
  float* chosen = kept_scores + n_kept;                    // [k]
  const int64_t row = blockIdx.x;
  const int e = threadIdx.x;
  const bool there = e < p.n_experts;
  const float bias = there ? p.bias[e] : 0.0f;
  const bool live = row < p.n.get();
  wait_for_previous();
  let_next_start();
  if (!live) return;

  float logit = 0;
  if (there) {
    const float* from = p.logits + row * p.n_experts + e;
    if (p.parts == 1) {
      logit = *from;
    } else {
      float part[kParts];
#pragma unroll
      for (int i = 0; i < kParts; ++i) part[i] = i < p.parts ? __ldcg(from + i * p.part_stride) : 0.0f;
      logit = part[0];
#pragma unroll
      for (int i = 1; i < kParts; ++i)
        if (i < p.parts) logit += part[i];
    }
  }
  const float score = 1.0f / (1.0f + expf(-logit));
  const uint32_t key = there ? key_of(score + bias) : kTaken;
  shared_keys[e] = key;
  if (e < n_fours) kept_keys[e] = kTaken;
  __syncthreads();
  const int place = rank_among(shared_keys + warp * kWarp, kWarp, lane, key);
  if (place < keep) {
    const int at = warp * keep + place;
    kept_keys[at] = key;
    kept[at] = e;
    kept_scores[at] = score;
  }
  __syncthreads();
  if (e < n_kept && kept_keys[e] != kTaken) {   // of equals the lower expert stands before
    const int rank = rank_among(kept_keys, n_fours, e, kept_keys[e]);
    if (rank < p.k) {
      chosen[rank] = kept_scores[e];
      p.expert[row * p.k + rank] = kept[e];
    }
  }
  __syncthreads();
  if (e >= p.k) return;
  float sum = 0;
  for (int rank = 0; rank < p.k; ++rank) sum += chosen[rank];
  p.weight[row * p.k + e] = (p.normalise ? chosen[e] / (sum + 1e-20f) : chosen[e]) * p.scaling;
}

// Logits of a few rows, the ranges of K steps of linear.cu not yet all added up: fp32 [grid.y][n.most][n_out]. A block has
// kRouterTiles tiles of experts and kParts of the ranges, a warp each. Its weights are in registers before the kernel
// before has ended, and serve one group of eight rows after the other.
__global__ void __launch_bounds__(kParts* kWarp) router_kernel(const __grid_constant__ Product p) {
  constexpr int kThreads = kParts * kWarp, kOutputs = kRouterTiles * static_cast<int>(kTileRows), kRow = kOutputs + 4;
  constexpr int kOfWarp = kTokens * kRow;
  static_assert(kThreads == kTokens * kOutputs);
  __shared__ float sums[2][kParts * kOfWarp];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int first_tile = static_cast<int>(blockIdx.x) * kRouterTiles;
  const int begin = min((static_cast<int>(blockIdx.y) * kParts + warp) * p.warp_steps, p.steps);
  const int count = min(p.warp_steps, p.steps - begin);
  uint4 a[kRouterTiles][kRouterSteps];
#pragma unroll
  for (int t = 0; t < kRouterTiles; ++t)
#pragma unroll
    for (int s = 0; s < kRouterSteps; ++s) {
      a[t][s] = {0, 0, 0, 0};
      if (s < count) a[t][s] = load_once(fragment_at(p.weight, min(first_tile + t, p.tiles - 1), begin + s, p.steps, lane));
    }
  const int live = p.n.get();
  wait_for_previous();
  let_next_start();
  const auto load = [&](int first, uint2 (&b)[kRouterSteps]) {   // columns past the last row repeat it, and are dropped
    const bf16* row = p.x + row_at(p.x_rows, min(first + lane / 4, live - 1), p.n_in) + begin * kStepInputs + lane % 4 * 4;
#pragma unroll
    for (int s = 0; s < kRouterSteps; ++s)
      if (s < count) b[s] = *reinterpret_cast<const uint2*>(row + s * kStepInputs);
  };
  uint2 b[kRouterSteps] = {};
  if (live > 0) load(0, b);
  for (int first = 0, at = 0; first < live; first += kTokens, at ^= 1) {
    float sum[kRouterTiles][4] = {};
#pragma unroll
    for (int s = 0; s < kRouterSteps; ++s)
      if (s < count)
#pragma unroll
        for (int t = 0; t < kRouterTiles; ++t) mma(sum[t], {a[t][s].x, a[t][s].y, a[t][s].z, a[t][s].w}, {b[s].x, b[s].y});
    if (first + kTokens < live) load(first + kTokens, b);
#pragma unroll
    for (int t = 0; t < kRouterTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[at][warp * kOfWarp + (lane % 4 * 2 + i % 2) * kRow + t * 16 + lane / 4 + i / 2 * 8] = sum[t][i];
    __syncthreads();   // who writes the same half next has met here all who read it
    const int token = threadIdx.x / kOutputs, o = threadIdx.x % kOutputs;
    const float* from = &sums[at][token * kRow + o];
    float total = from[0];
#pragma unroll
    for (int w = 1; w < kParts; ++w) total += from[w * kOfWarp];
    const int64_t output = first_tile * kTileRows + o;
    if (first + token < live && output < p.n_out)
      static_cast<float*>(p.out)[(static_cast<int64_t>(blockIdx.y) * p.n.most + first + token) * p.n_out + output] = total;
  }
}

// One block. Pairs are cut into one run a warp: a warp counts its run's pairs of every expert, the counts become first
// places, and the warp puts its pairs there in order.
__global__ void __launch_bounds__(kListThreads) list_kernel(const __grid_constant__ ListArgs p) {
  extern __shared__ __align__(16) std::byte shared[];
  auto* count = reinterpret_cast<int32_t*>(shared);            // [runs][n_experts]
  const int runs = blockDim.x / kWarp, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  int32_t* total = count + runs * p.n_experts;                 // [n_experts]
  int32_t* first = total + p.n_experts;                        // [n_experts] an expert's first item
  for (int i = threadIdx.x; i < p.n_experts; i += blockDim.x) {
    prefetch_table(p.gate_up, p.n_experts, i);
    prefetch_table(p.down, p.n_experts, i);
  }
  for (int i = threadIdx.x; i < runs * p.n_experts; i += blockDim.x) count[i] = 0;
  wait_for_previous();
  let_next_start();
  __syncthreads();

  const int n_pairs = p.n.get() * p.k;
  const int run = (n_pairs + runs * kWarp - 1) / (runs * kWarp) * kWarp;
  const int begin = warp * run, end = min(begin + run, n_pairs);
  int32_t* mine = count + warp * p.n_experts;
  // Calls put(pair, its expert, pairs of that expert in this run before it) for the run, in order.
  const auto walk = [&](const auto& put) {
    for (int base = begin; base < end; base += kWarp) {
      const int pair = base + lane;
      const bool there = pair < end;
      const int expert = there ? p.expert[pair] : -1;
      const unsigned same = __match_any_sync(0xffffffffu, expert);
      const int at = there ? mine[expert] : 0;
      __syncwarp();
      const int before = __popc(same & ((1u << lane) - 1));
      if (there && before == 0) mine[expert] = at + __popc(same);
      if (there) put(pair, expert, at + before);
      __syncwarp();
    }
  };
  walk([](int, int, int) {});
  __syncthreads();
  for (int e = threadIdx.x; e < p.n_experts; e += blockDim.x) {
    int32_t sum = 0;
    for (int w = 0; w < runs; ++w) {
      const int32_t of_run = count[w * p.n_experts + e];
      count[w * p.n_experts + e] = sum;
      sum += of_run;
    }
    total[e] = sum;
  }
  __syncthreads();
  if (warp == 0) {
    const int share = (p.n_experts + kWarp - 1) / kWarp, from = lane * share, to = min(from + share, p.n_experts);
    int items = 0;
    for (int e = from; e < to; ++e) items += (total[e] + p.tokens - 1) / p.tokens;
    int through = items;   // of this lane and all before it
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, through, step);
      if (lane >= step) through += other;
    }
    if (lane == kWarp - 1) p.n_items[0] = through, p.n_items[1] = 0;
    int at = through - items;
    for (int e = from; e < to; ++e) {
      first[e] = at;
      at += (total[e] + p.tokens - 1) / p.tokens;
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.n_experts; e += blockDim.x) {
    const auto bytes = [](const void* data) { return static_cast<const std::byte*>(data); };
    for (int done = 0, item = first[e]; done < total[e]; done += p.tokens, ++item)
      p.items[item] = {bytes(p.gate_up[e].data), bytes(p.gate_up[e].scales), bytes(p.down[e].data),
                       bytes(p.down[e].scales), min(p.tokens, total[e] - done)};
  }
  walk([&](int pair, int expert, int ordinal) {
    p.pairs[static_cast<int64_t>(first[expert] + ordinal / p.tokens) * p.tokens + ordinal % p.tokens] = pair;
  });
}

}  // namespace

void CudaOps::route(const RouteArgs& args) {
  if (args.n.most == 0) return;
  if (args.n_experts > kMostExperts)
    fail(Status::unsupported, "n_routed_experts", std::to_string(args.n_experts), "at most 1024 on a GPU");
  Choose choose{LiveRows(args.n), static_cast<int32_t>(args.n_experts), static_cast<int32_t>(args.k), args.scores, 1, 0,
                args.bias, args.normalise, args.scaling, args.expert, args.weight};
  DenseArgs scores{args.n, static_cast<const bf16*>(args.x), *args.gate, args.scores, DenseOut::fp32};
  Product product = describe(scores);
  if (args.n.most <= kRouterRows && product.copied && product.ranks > 1 && product.warp_steps <= kRouterSteps) {
    choose.logits = router_parts_.as<float>();
    choose.parts = product.ranks;
    choose.part_stride = args.n.most * args.n_experts;
    product.out = router_parts_.data();
    const dim3 grid(static_cast<unsigned>(divide_up(product.tiles, kRouterTiles)), static_cast<unsigned>(product.ranks));
    launch_overlapping("router_kernel", router_kernel, grid, kParts * kWarp, 0, stream_, product);
  } else {
    dense(stream_, scores);
  }
  const int64_t threads = divide_up(args.n_experts, kWarp) * kWarp, kept = threads / kWarp * std::min<int64_t>(args.k, kWarp);
  const int64_t words = threads + divide_up(kept, 4) * 4 + 2 * kept + args.k;
  launch_overlapping("choose_kernel", choose_kernel, dim3(static_cast<unsigned>(args.n.most)), static_cast<unsigned>(threads),
                     static_cast<size_t>(words) * 4, stream_, choose);
}

void list_work(cudaStream_t stream, const ListArgs& args) {
  const size_t row = static_cast<size_t>(args.n_experts) * 4;
  const auto most_runs = static_cast<int64_t>(kListShared / row) - 2;   // how many warps the counts have room for
  const int64_t runs = std::clamp<int64_t>(divide_up(static_cast<int64_t>(args.n.most) * args.k, kWarp), 1,
                                           std::clamp<int64_t>(most_runs, 1, kListThreads / kWarp));
  const size_t shared = static_cast<size_t>(runs + 2) * row;
  check(cudaFuncSetAttribute(list_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
        "list_kernel");
  launch_overlapping("list_kernel", list_kernel, dim3(1), static_cast<unsigned>(runs * kWarp), shared, stream, args);
}

}  // namespace kdt::cuda
