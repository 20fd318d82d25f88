// Products with BF16 weights for many rows, on sm_90a: weights and rows go through shared memory by the copy engine, and the sums are
// those of wgmma. The bits are those of linear.cu: the same chains of K steps, whose sums are added in the same order.
//
// A block is three warpgroups. One thread of the first brings stages of 64 inputs; the other two have 64 outputs by 128 tokens each,
// next to one another along the outputs, or along the tokens where no more than 64 outputs are left. Two blocks that are neighbours
// along the tokens are a cluster: each brings half of the weights to both. Or, where there are few blocks and eight sums of chains to
// add, eight blocks are: each has the chains of one sum. A lane takes its fragments of A from the tile as linear.cuh has it: of the
// inputs 4t … 4t + 3 that lie together the hardware wants 2t, 2t + 1 and 2t + 8, 2t + 9, so it reads two of other lanes' halves.
// Tokens lie as the tensor map swaps them about.
#include "cuda/linear_product.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/wgmma_rows.cuh"

namespace kdt::cuda {
namespace {

constexpr int kGroupThreads = 4 * kWarp, kThreads = 3 * kGroupThreads;
constexpr int kGroupTiles = 4, kGroupOutputs = 64, kGroupRows = 128;   // of a warpgroup
constexpr int kStageSteps = 4, kStageInputs = 64;
constexpr int kStepBytes = 512, kTileBytes = kStageSteps * kStepBytes, kRowBytes = kStageInputs * 2;
constexpr int kSumStride = kGroupOutputs + 4;
constexpr int kTotalBytes = kGroupOutputs * kGroupRows * 4;
constexpr int kSplit = 8;               // blocks that share out chains: of a portable cluster

struct Many {
  CUtensorMap x, weight;                // [row][input], [tile][step][elements]
  Product p;
  int32_t share, split;                 // blocks of a cluster that share weights, 1 or 2; or chains, 1 or kSplit
  int32_t blocks_a_row, whole_blocks;   // of blocks with 128 outputs: of all rows, of all
};

template <int kAlongOutputs>
struct Shape {
  static constexpr int kAlongRows = 2 / kAlongOutputs;
  static constexpr int kTiles = kAlongOutputs * kGroupTiles, kRows = kAlongRows * kGroupRows;
  static constexpr int kWeightBytes = kTiles * kTileBytes, kStage = kWeightBytes + kRows * kRowBytes;
  static constexpr int kStages = kAlongOutputs == 2 ? 5 : 4;
  static constexpr int kTotals = kStages * kStage, kBarriers = kTotals + 2 * kTotalBytes;
  static_assert(2 * kGroupRows * kSumStride * 4 <= kTotals);
};

struct Barriers {
  uint64_t *full, *empty;
};

// What a block has to do.
struct Part {
  int first_tile, first_row, first_chain, n_chains;
};

// What barrier_init did is seen by the cluster's other block.
__device__ inline void fence_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// All threads of a cluster's blocks.
__device__ inline void meet_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}
__device__ inline int rank_in_cluster() {
  int rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
// The barrier that lies at the same place in a block of the cluster.
__device__ inline void arrive_in(uint64_t* barrier, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" :: "r"(shared_address(barrier)), "r"(rank) : "memory");
#endif
}
// Four floats at an address of shared memory, in a block of the cluster.
__device__ inline float4 shared16_in(SharedAddress at, int rank) {
  float4 v{};
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
               "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at), "r"(rank) : "memory");
#endif
  return v;
}
// As bring_box, to the same place in both blocks of the cluster.
__device__ inline void bring_box_to_both(SharedAddress to, const CUtensorMap& map, int x, int y, int z, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
               "[%1, {%2, %3, %4}], [%5], %6;"
               :: "r"(to), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "h"(static_cast<uint16_t>(3)) : "memory");
#endif
}

__device__ inline int first_step(const Product& p, const Part& part) {
  return part.first_chain > 0 ? p.chains.end(part.first_chain - 1, p.steps) : 0;
}

template <int kAlongOutputs>
__device__ void bring(const Many& many, SharedAddress memory, const Barriers& barriers, const Part& part) {
  using S = Shape<kAlongOutputs>;
  const Product& p = many.p;
  const int rank = many.share == 2 ? rank_in_cluster() : 0;
  const auto weights = [&](int step, int place) {
    uint64_t* full = &barriers.full[place];
    const SharedAddress to = memory + place * S::kStage;
    barrier_arrive(full, S::kStage);
#pragma unroll
    for (int i = 0; i < kAlongOutputs; ++i) {
      const int tile = many.share == 2 ? i * kGroupTiles + rank * kGroupTiles / 2 : i * kGroupTiles;
      if (many.share == 2) bring_box_to_both(to + tile * kTileBytes, many.weight, 0, step, part.first_tile + tile, full);
      else bring_box(to + tile * kTileBytes, many.weight, 0, step, part.first_tile + tile, full);
    }
  };
  const auto rows = [&](int step, int place) {
#pragma unroll
    for (int i = 0; i < S::kAlongRows; ++i)
      bring_box(memory + place * S::kStage + S::kWeightBytes + i * kGroupRows * kRowBytes, many.x,
                step * static_cast<int>(kStepInputs), part.first_row + i * kGroupRows, 0, &barriers.full[place]);
  };
  // Calls with(stage, its first step): every chain begins a stage.
  const auto stages = [&](const auto& with) {
    for (int i = 0, step = first_step(p, part), stage = 0; i < part.n_chains; ++i)
      for (const int end = p.chains.end(part.first_chain + i, p.steps); step < end; ++stage, step = min(step + kStageSteps, end))
        if (!with(stage, step)) return;
  };
  stages([&](int stage, int step) {
    if (stage < S::kStages) weights(step, stage);
    return stage + 1 < S::kStages;
  });
  wait_for_previous();
  let_next_start();
  Place<S::kStages> place;
  stages([&](int stage, int step) {
    if (stage >= S::kStages) {
      barrier_wait(&barriers.empty[place.at], place.phase ^ 1);
      weights(step, place.at);
    }
    rows(step, place.at);
    place.next();
    return true;
  });
}

// What a warpgroup sums up.
class Sums {
 public:
  // Begins to add the first kSteps steps of a stage to the chain, or begins the chain with them.
  template <int kSteps>
  __device__ void run(uint32_t (&a)[kSteps][4], SharedAddress tile, uint64_t tokens, bool begun) {
    const int lane = threadIdx.x % kWarp;
    const bool swapped = lane / 8 % 2 != 0;   // of four rows two read their second half first: no two in the same banks
    const SharedAddress first = tile + lane / 4 * 64 + lane % 4 * 8 + (swapped ? 32 : 0), second = first ^ 32;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint2 x = shared8(first + s * kStepBytes), y = shared8(second + s * kStepBytes);
      a[s][0] = swapped ? y.x : x.x, a[s][1] = swapped ? y.y : x.y;
      a[s][2] = swapped ? x.x : y.x, a[s][3] = swapped ? x.y : y.y;
    }
    wgmma_begin(chain_);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) wgmma_rows<kGroupRows>(chain_, a[s], tokens + s * 2, s > 0 || begun);
    wgmma_commit();
  }
  __device__ void wait() {
    wgmma_wait();
    wgmma_begin(chain_);
  }

  // Ends chain i of n. `totals`: the warpgroup's, float [sums of a thread][threads].
  __device__ void end_chain(int together, int i, int n, float* totals) {
    const int of_sum = i % together;
    if (of_sum == 0) {
#pragma unroll
      for (int k = 0; k < kSums; ++k) sum_[k] = chain_[k];
    } else {
#pragma unroll
      for (int k = 0; k < kSums; ++k) sum_[k] += chain_[k];
    }
    if (of_sum + 1 < together || n == together) return;
    float* total = totals + threadIdx.x % kGroupThreads;
    if (i >= together) {
#pragma unroll
      for (int k = 0; k < kSums; ++k) sum_[k] = total[k * kGroupThreads] + sum_[k];
    }
    if (i + 1 == n) return;
#pragma unroll
    for (int k = 0; k < kSums; ++k) total[k * kGroupThreads] = sum_[k];
  }

  // To float [tokens][outputs].
  __device__ void store(float* sums) const {
    const int warp = threadIdx.x % kGroupThreads / kWarp, lane = threadIdx.x % kWarp;
    float* to = sums + lane % 4 * 2 * kSumStride + warp * 16 + lane / 4;
#pragma unroll
    for (int k = 0; k < kSums; ++k) to[(k / 4 * 8 + k % 2) * kSumStride + k % 4 / 2 * 8] = sum_[k];
  }

 private:
  static constexpr int kSums = kGroupRows / 2;
  float chain_[kSums] = {}, sum_[kSums];
};

__device__ inline uint2 four_bf16(const float (&v)[4]) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(v[0], v[1]), high = __floats2bfloat162_rn(v[2], v[3]);
  return {*reinterpret_cast<const uint32_t*>(&low), *reinterpret_cast<const uint32_t*>(&high)};
}

// Four sums, or the sums of those of all blocks that share out chains, ascending.
template <int kBlocks>
__device__ inline float4 four_sums(const float* at) {
  float4 of[kBlocks];                   // all are under way before the first is added
  if constexpr (kBlocks == 1) {
    of[0] = *reinterpret_cast<const float4*>(at);
  } else {
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) of[r] = shared16_in(shared_address(at), r);
#pragma unroll
    for (int r = 1; r < kBlocks; ++r) of[0].x += of[r].x, of[0].y += of[r].y, of[0].z += of[r].z, of[0].w += of[r].w;
  }
  return of[0];
}

// What becomes of a warpgroup's sums: a thread has four outputs of a row at a time. Blocks that share out chains share out those too.
template <int kBlocks>
__device__ inline void finish(const Product& p, const float* sums, int first_tile, int first_row, int live) {
  const bool gated = p.kind == DenseOut::swiglu;
  const int fours = gated ? kGroupOutputs / 8 : kGroupOutputs / 4, first_output = first_tile * (gated ? 8 : 16);
  const int share = kBlocks > 1 ? rank_in_cluster() * kGroupThreads : 0;
  for (int i = threadIdx.x % kGroupThreads + share; i < kGroupRows * fours; i += kBlocks * kGroupThreads) {
    const int token = i / fours, o = i % fours * 4, row = first_row + token;
    if (row >= live || first_output + o >= p.n_out) continue;
    const float* from = sums + token * kSumStride + (gated ? o / 16 * 32 + o % 16 : o);
    const float4 four = four_sums<kBlocks>(from);
    float v[4] = {four.x, four.y, four.z, four.w};
    const int64_t at = row_at(p.out_rows, row, p.n_out) + first_output + o;
    auto* out = static_cast<bf16*>(p.out) + at;
    if (p.kind == DenseOut::fp32) {
      *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = four;
      continue;
    }
    if (gated) {
      const float4 up = four_sums<kBlocks>(from + 16);
      const float by[4] = {up.x, up.y, up.z, up.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) v[k] = v[k] / (1.0f + expf(-v[k])) * by[k];
    } else if (p.kind == DenseOut::add) {
      const uint2 before = *reinterpret_cast<const uint2*>(out);
      const auto low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&before.x));
      const auto high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&before.y));
      v[0] = low.x + v[0], v[1] = low.y + v[1], v[2] = high.x + v[2], v[3] = high.y + v[3];
    }
    *reinterpret_cast<uint2*>(out) = four_bf16(v);
  }
}

template <int kAlongOutputs, int kTail>
__device__ void consume(const Many& many, std::byte* shared, const Barriers& barriers, const Part& part, int live) {
  using S = Shape<kAlongOutputs>;
  const Product& p = many.p;
  const SharedAddress memory = shared_address(shared);
  const int group = warpgroup() - 1;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) % kGroupThreads / kWarp, 0), lane = threadIdx.x % kWarp;
  const int group_tile = kAlongOutputs == 2 ? group * kGroupTiles : 0, group_row = kAlongOutputs == 2 ? 0 : group * kGroupRows;
  const SharedAddress tile = memory + (group_tile + warp) * kTileBytes;
  const uint64_t tokens = wgmma_operand(memory + S::kWeightBytes + group_row * kRowBytes);
  auto* totals = reinterpret_cast<float*>(shared + S::kTotals + group * kTotalBytes);
  Sums sums;
  Place<S::kStages> place, done;
  const auto next = [&](auto& a, bool begun) {
    barrier_wait(&barriers.full[place.at], place.phase);
    sums.run(a, tile + place.at * S::kStage, tokens + static_cast<uint64_t>(place.at * S::kStage >> 4), begun);
    place.next();
  };
  const auto give = [&] {                 // the oldest stage that has not been given back
    __syncwarp();
    if (many.split > 1) {
      if (lane == 0) barrier_arrive(&barriers.empty[done.at]);
    } else if (lane < many.share) {
      arrive_in(&barriers.empty[done.at], lane);
    }
    done.next();
  };
  // While a stage's run goes on the next one's fragments are fetched.
  uint32_t even[kStageSteps][4], odd[kStageSteps][4], tail[kTail > 0 ? kTail : 1][4];
  for (int i = 0, step = first_step(p, part); i < part.n_chains; ++i) {
    const int end = p.chains.end(part.first_chain + i, p.steps), n = (end - step) / kStageSteps;
    step = end;
    for (int stage = 0; stage < n; stage += 2) {
      next(even, stage > 0);
      if (stage > 0) {
        wgmma_wait_but<1>();
        wgmma_hold(odd);
        give();
      }
      if (stage + 1 == n) break;
      next(odd, true);
      wgmma_wait_but<1>();
      wgmma_hold(even);
      give();
    }
    if constexpr (kTail > 0) next(tail, n > 0);
    sums.wait();
    wgmma_hold(even);
    wgmma_hold(odd);
    if constexpr (kTail > 0) {
      wgmma_hold(tail);
      if (n > 0) give();
    }
    give();
    sums.end_chain(p.chains.together, i, part.n_chains, totals);
  }

  // The ring becomes the sums of both groups.
  constexpr int kDone = 1, kStored = 2;   // and 3
  auto* of_group = reinterpret_cast<float*>(shared) + group * kGroupRows * kSumStride;
  meet(kDone, 2 * kGroupThreads);
  sums.store(of_group);
  wait_for_previous();
  if (many.split > 1) {
    meet_cluster();
    finish<kSplit>(p, of_group, part.first_tile + group_tile, part.first_row + group_row, live);
  } else {
    meet(kStored + group, kGroupThreads);
    finish<1>(p, of_group, part.first_tile + group_tile, part.first_row + group_row, live);
  }
}

constexpr int kBarriersAt = std::max(Shape<1>::kBarriers, Shape<2>::kBarriers), kMostStages = std::max(Shape<1>::kStages, Shape<2>::kStages);
constexpr int kBytes = kBarriersAt + 2 * kMostStages * 8;

// First the blocks with 128 outputs, those of all rows one after the other, as they read the same weights; then those with 64, of twice
// as many rows.
template <int kTail>
__device__ void many_block(const Many& many) {
  extern __shared__ __align__(1024) std::byte shared[];
  auto* of_barriers = reinterpret_cast<uint64_t*>(shared + kBarriersAt);
  const Barriers barriers{of_barriers, of_barriers + kMostStages};
  const int block = static_cast<int>(blockIdx.x) / many.split, live = many.p.n.get();
  const bool whole = block < many.whole_blocks;
  const Chains& chains = many.p.chains;
  const int first_chain = many.split > 1 ? rank_in_cluster() * chains.together : 0, n_chains = many.split > 1 ? chains.together : chains.n;
  const Part part = whole ? Part{block / many.blocks_a_row * Shape<2>::kTiles, block % many.blocks_a_row * Shape<2>::kRows,
                                 first_chain, n_chains}
                          : Part{many.whole_blocks / many.blocks_a_row * Shape<2>::kTiles,
                                 (block - many.whole_blocks) * Shape<1>::kRows, first_chain, n_chains};
  const int rows = whole ? Shape<2>::kRows : Shape<1>::kRows;
  if (part.first_row / (many.share * rows) * (many.share * rows) >= live) {   // the whole cluster alike
    wait_for_previous();
    return;
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMostStages; ++i) {
      barrier_init(&barriers.full[i], 1);
      barrier_init(&barriers.empty[i], 8 * many.share);
    }
    fence_barriers();
    fence_shared();
  }
  if (many.share == 2) meet_cluster();
  else __syncthreads();
  if (warpgroup() == 0) {
    give_registers<24>();
    if (threadIdx.x == 0) {
      if (whole) bring<2>(many, shared_address(shared), barriers, part);
      else bring<1>(many, shared_address(shared), barriers, part);
    }
    __syncwarp();
    if (many.split > 1) meet_cluster();   // sums are there
  } else {
    take_registers<240>();
    if (whole) consume<2, kTail>(many, shared, barriers, part, live);
    else consume<1, kTail>(many, shared, barriers, part, live);
  }
  if (many.share * many.split > 1) meet_cluster();   // until nobody brings to this block, arrives in it or reads its sums
}
template <int kTail>
__global__ void __launch_bounds__(kThreads, 1) many_kernel(const __grid_constant__ Many many) {
  if constexpr (kHasWgmma) many_block<kTail>(many);
}

// Steps of every chain's last stage if they are fewer than others have, and the same for all chains. -1: they are not.
int tail_of(const Product& p) {
  int tail = -1;
  for (int i = 0, step = 0; i < p.chains.n; ++i) {
    const int end = p.chains.end(i, p.steps), left = (end - step) % kStageSteps;
    if (end == step || (tail >= 0 && tail != left)) return -1;
    tail = left, step = end;
  }
  return tail;
}

// Blocks of 128 outputs by 128 tokens, and how many share out the chains of one: bits do not depend on it.
int64_t blocks_of(const Product& p) { return divide_up(p.tiles, Shape<2>::kTiles) * divide_up(p.n.most, Shape<2>::kRows); }
int64_t split_of(const Product& p) {
  return p.chains.n == kSplit * p.chains.together && 2 * blocks_of(p) <= multiprocessors() ? kSplit : 1;
}

}  // namespace

bool takes_many_rows(const Product& p, int64_t shared_limit) {
  constexpr int64_t kMany = 128, kLeastBlocks = 24;
  if (p.n.most < kMany || shared_limit < kBytes || !is_hopper("many_kernel", many_kernel<0>)) return false;
  const auto whole = [](const void* address, const RowLayout& rows, int64_t width, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(address) % 16 == 0 && (rows.stride > 0 ? rows.stride : width) * bytes % 16 == 0;
  };
  return tail_of(p) >= 0 && !p.x_rows.index && whole(p.x, p.x_rows, p.n_in, 2) && p.n_out % 4 == 0 &&
         whole(p.out, p.out_rows, p.n_out, p.kind == DenseOut::fp32 ? 4 : 2) && blocks_of(p) * split_of(p) >= kLeastBlocks;
}

void many_rows(cudaStream_t stream, const Product& p) {
  const int64_t row_bytes = (p.x_rows.stride > 0 ? p.x_rows.stride : p.n_in) * 2, tile_bytes = int64_t{p.steps} * kStepBytes;
  const int64_t split = split_of(p), share = split == 1 && p.n.most > Shape<2>::kRows ? 2 : 1, left = p.tiles % Shape<2>::kTiles;
  const int64_t of_rows = divide_up(p.n.most, Shape<2>::kRows * share) * share, half = left > 0 && left <= kGroupTiles;
  const int64_t whole_blocks = (half ? p.tiles / Shape<2>::kTiles : divide_up(p.tiles, Shape<2>::kTiles)) * of_rows;
  const int64_t half_blocks = half * divide_up(p.n.most, Shape<1>::kRows * share) * share;
  const auto to32 = [](int64_t value) { return static_cast<int32_t>(value); };
  const Many many{tensor_map(p.x, {p.n_in, p.n.most, 1}, {row_bytes, row_bytes * p.n.most}, {kGroupRows, 1}),
                  tensor_map(p.weight, {kPlainRow, p.steps, p.tiles}, {kStepBytes, tile_bytes}, {kStageSteps, kGroupTiles / share},
                             kPlainRow),
                  p, to32(share), to32(split), to32(of_rows), to32(whole_blocks)};
  const auto kernels = {many_kernel<0>, many_kernel<1>, many_kernel<2>, many_kernel<3>};
  const auto kernel = kernels.begin()[tail_of(p)];
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "many_kernel");
  launch_overlapping("many_kernel", kernel, dim3(static_cast<unsigned>((whole_blocks + half_blocks) * split)), kThreads, kBytes, stream,
                     many, static_cast<unsigned>(share * split));
}

}  // namespace kdt::cuda
