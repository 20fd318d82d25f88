// The router, and the list of what its choices give each expert to do.
#include <string>

#include "base/error.h"
#include "cuda/linear.cuh"
#include "cuda/moe.cuh"

namespace kdt::cuda {
namespace {

constexpr int kRouteRows = 4;            // of a block, one a warp
constexpr int kMostExperts = 1024;       // in the registers of a warp
constexpr int kListThreads = 1024;
constexpr size_t kListShared = 96 << 10;

struct Choose {
  LiveRows n;
  int32_t n_experts, k;
  const float* logits;                   // [n, n_experts]
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

// A warp a row. Lane l looks after experts l, l + 32 …, all in registers; it keeps the best of them that is not taken yet.
template <int kSlots>
__global__ void __launch_bounds__(kRouteRows* kWarp) choose_kernel(const __grid_constant__ Choose p) {
  extern __shared__ float shared_scores[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  float* chosen = shared_scores + warp * p.k;
  float bias[kSlots];
#pragma unroll
  for (int s = 0; s < kSlots; ++s) bias[s] = s * kWarp + lane < p.n_experts ? p.bias[s * kWarp + lane] : 0.0f;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRouteRows + warp;
  const bool live = row < p.n.get();
  wait_for_previous();
  let_next_start();
  if (!live) return;

  float score[kSlots];
  uint32_t key[kSlots];
  const float* logits = p.logits + row * p.n_experts;
#pragma unroll
  for (int s = 0; s < kSlots; ++s) score[s] = s * kWarp + lane < p.n_experts ? logits[s * kWarp + lane] : 0.0f;
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    score[s] = 1.0f / (1.0f + expf(-score[s]));
    key[s] = s * kWarp + lane < p.n_experts ? key_of(score[s] + bias[s]) : kTaken;
  }
  float sum = 0;
  for (int rank = 0; rank < p.k; ++rank) {
    uint32_t best_key = kTaken;
    int best = p.n_experts;
    float best_score = 0;
#pragma unroll
    for (int s = 0; s < kSlots; ++s)
      if (key[s] > best_key) best_key = key[s], best = s * kWarp + lane, best_score = score[s];   // of equals the lower
    const uint32_t top = __reduce_max_sync(0xffffffffu, best_key);
    const int winner = __reduce_min_sync(0xffffffffu, best_key == top ? best : p.n_experts);
    const float of_winner = __shfl_sync(0xffffffffu, best_score, winner % kWarp);
    sum += of_winner;
    if (lane == 0) {
      chosen[rank] = of_winner;
      p.expert[row * p.k + rank] = winner;
    }
#pragma unroll
    for (int s = 0; s < kSlots; ++s)
      if (s * kWarp + lane == winner) key[s] = kTaken;
  }
  __syncwarp();
  for (int rank = lane; rank < p.k; rank += kWarp)
    p.weight[row * p.k + rank] = (p.normalise ? chosen[rank] / (sum + 1e-20f) : chosen[rank]) * p.scaling;
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
    if (lane == kWarp - 1) *p.n_items = through;
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
  dense(stream_, {args.n, static_cast<const bf16*>(args.x), *args.gate, args.scores, DenseOut::fp32});
  const Choose choose{LiveRows(args.n), static_cast<int32_t>(args.n_experts), static_cast<int32_t>(args.k), args.scores,
                      args.bias, args.normalise, args.scaling, args.expert, args.weight};
  const auto run = [&](auto kernel) {
    launch_overlapping("choose_kernel", kernel, dim3(static_cast<unsigned>(divide_up(args.n.most, kRouteRows))),
                       kRouteRows * kWarp, static_cast<size_t>(kRouteRows * args.k) * sizeof(float), stream_, choose);
  };
  if (args.n_experts > kMostExperts)
    fail(Status::unsupported, "n_routed_experts", std::to_string(args.n_experts), "at most 1024 on a GPU");
  if (args.n_experts <= 2 * kWarp) run(choose_kernel<2>);
  else if (args.n_experts <= 12 * kWarp) run(choose_kernel<12>);
  else run(choose_kernel<kMostExperts / kWarp>);
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
