// Products with BF16 weights for many rows, on sm_90a: weights and rows go through shared memory by the copy engine, and the sums are
// those of wgmma. The bits are those of linear.cu: the same chains of K steps, whose sums are added in the same order.
//
// A block is three warpgroups. One thread of the first brings stages of 64 inputs; the other two have 64 outputs by 128 tokens each,
// next to one another along the outputs or along the tokens. A lane takes its fragments of A from the tile as linear.cuh has it:
// of the inputs 4t … 4t + 3 that lie together the hardware wants 2t, 2t + 1 and 2t + 8, 2t + 9, so it reads two of other lanes'
// halves. Tokens lie as the tensor map swaps them about.
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

struct Many {
  CUtensorMap x, weight;                // [row][input], [tile][step][elements]
  Product p;
};

template <int kAlongOutputs>
struct Shape {
  static constexpr int kAlongRows = 2 / kAlongOutputs;
  static constexpr int kTiles = kAlongOutputs * kGroupTiles, kRows = kAlongRows * kGroupRows;
  static constexpr int kWeightBytes = kTiles * kTileBytes, kStage = kWeightBytes + kRows * kRowBytes;
  static constexpr int kStages = kAlongOutputs == 2 ? 5 : 4;
  static constexpr int kTotals = kStages * kStage, kBarriers = kTotals + 2 * kTotalBytes, kBytes = kBarriers + 2 * kStages * 8;
  static_assert(2 * kGroupRows * kSumStride * 4 <= kTotals);
};

struct Barriers {
  uint64_t *full, *empty;
};

template <int kAlongOutputs>
__device__ void bring(const Many& many, SharedAddress memory, const Barriers& barriers, int first_tile, int first_row) {
  using S = Shape<kAlongOutputs>;
  const Product& p = many.p;
  const int n_stages = (p.steps + kStageSteps - 1) / kStageSteps;
  const auto weights = [&](int stage, int place) {
    barrier_arrive(&barriers.full[place], S::kStage);
    bring_box(memory + place * S::kStage, many.weight, 0, stage * kStageSteps, first_tile, &barriers.full[place]);
  };
  const auto rows = [&](int stage, int place) {
    bring_box(memory + place * S::kStage + S::kWeightBytes, many.x, stage * kStageInputs, first_row, 0, &barriers.full[place]);
  };
  for (int s = 0; s < min(S::kStages, n_stages); ++s) weights(s, s);
  wait_for_previous();
  let_next_start();
  for (int s = 0; s < min(S::kStages, n_stages); ++s) rows(s, s);
  Place<S::kStages> place;
  for (int s = S::kStages; s < n_stages; ++s) {
    barrier_wait(&barriers.empty[place.at], place.phase);
    weights(s, place.at);
    rows(s, place.at);
    place.next();
  }
}

// What a warpgroup sums up.
class Sums {
 public:
  // The next kSteps steps, from shared memory: of this warp's tile, and of the tokens.
  template <int kSteps>
  __device__ void run(SharedAddress tile, uint64_t tokens, bool begun) {
    const int lane = threadIdx.x % kWarp;
    const bool swapped = lane / 8 % 2 != 0;   // of four rows two read their second half first: no two in the same banks
    const SharedAddress first = tile + lane / 4 * 64 + lane % 4 * 8 + (swapped ? 32 : 0), second = first ^ 32;
    uint32_t a[kSteps][4];
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
    wgmma_wait();
    wgmma_begin(chain_);
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[s][i]) :: "memory");
  }

  // Ends chain i, which may have had no steps. `totals`: the warpgroup's, float [sums of a thread][threads].
  __device__ void end_chain(const Chains& chains, int i, bool begun, float* totals) {
    const int of_sum = i % chains.together;
    if (!begun) {
#pragma unroll
      for (int k = 0; k < kSums; ++k) chain_[k] = 0;
    }
    if (of_sum == 0) {
#pragma unroll
      for (int k = 0; k < kSums; ++k) sum_[k] = chain_[k];
    } else {
#pragma unroll
      for (int k = 0; k < kSums; ++k) sum_[k] += chain_[k];
    }
    if (of_sum + 1 < chains.together || chains.n == chains.together) return;
    float* total = totals + threadIdx.x % kGroupThreads;
    if (i >= chains.together) {
#pragma unroll
      for (int k = 0; k < kSums; ++k) sum_[k] = total[k * kGroupThreads] + sum_[k];
    }
    if (i + 1 == chains.n) return;
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

// What becomes of a warpgroup's sums: a thread has four outputs of a row at a time.
__device__ inline void finish(const Product& p, const float* sums, int first_tile, int first_row, int live) {
  const bool gated = p.kind == DenseOut::swiglu;
  const int fours = gated ? kGroupOutputs / 8 : kGroupOutputs / 4, first_output = first_tile * (gated ? 8 : 16);
  for (int i = threadIdx.x % kGroupThreads; i < kGroupRows * fours; i += kGroupThreads) {
    const int token = i / fours, o = i % fours * 4, row = first_row + token;
    if (row >= live || first_output + o >= p.n_out) continue;
    const float* from = sums + token * kSumStride + (gated ? o / 16 * 32 + o % 16 : o);
    const float4 four = *reinterpret_cast<const float4*>(from);
    float v[4] = {four.x, four.y, four.z, four.w};
    const int64_t at = row_at(p.out_rows, row, p.n_out) + first_output + o;
    auto* out = static_cast<bf16*>(p.out) + at;
    if (p.kind == DenseOut::fp32) {
      *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = four;
      continue;
    }
    if (gated) {
      const float4 up = *reinterpret_cast<const float4*>(from + 16);
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

// Grid: x runs of rows, y sets of tiles: blocks that read the same weights follow one another.
template <int kAlongOutputs>
__device__ void many_block(const Many& many) {
  using S = Shape<kAlongOutputs>;
  extern __shared__ __align__(1024) std::byte shared[];
  const SharedAddress memory = shared_address(shared);
  const Product& p = many.p;
  auto* of_barriers = reinterpret_cast<uint64_t*>(shared + S::kBarriers);
  const Barriers barriers{of_barriers, of_barriers + S::kStages};
  const int first_tile = static_cast<int>(blockIdx.y) * S::kTiles, first_row = static_cast<int>(blockIdx.x) * S::kRows;
  const int live = p.n.get();
  if (first_row >= live) {
    wait_for_previous();
    return;
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(&barriers.full[i], 1);
      barrier_init(&barriers.empty[i], 8);
    }
    fence_shared();
  }
  __syncthreads();
  const int group = warpgroup() - 1;
  if (group < 0) {
    give_registers<24>();
    if (threadIdx.x == 0) bring<kAlongOutputs>(many, memory, barriers, first_tile, first_row);
    return;
  }
  take_registers<240>();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) % kGroupThreads / kWarp, 0), lane = threadIdx.x % kWarp;
  const int group_tile = kAlongOutputs == 2 ? group * kGroupTiles : 0, group_row = kAlongOutputs == 2 ? 0 : group * kGroupRows;
  const SharedAddress tile = memory + (group_tile + warp) * kTileBytes;
  const uint64_t tokens = wgmma_operand(memory + S::kWeightBytes + group_row * kRowBytes);
  auto* totals = reinterpret_cast<float*>(shared + S::kTotals + group * kTotalBytes);
  Sums sums;
  Place<S::kStages> place;
  int step = 0;
  for (int i = 0; i < p.chains.n; ++i) {
    const int end = p.chains.end(i, p.steps);
    bool begun = false;
    while (step < end) {
      const int within = step % kStageSteps, n = min(end - step, kStageSteps - within);
      if (within == 0) barrier_wait(&barriers.full[place.at], place.phase);
      const SharedAddress at = tile + place.at * S::kStage + within * kStepBytes;
      const uint64_t of_tokens = tokens + static_cast<uint64_t>((place.at * S::kStage >> 4) + within * 2);
      switch (n) {
        case 1: sums.run<1>(at, of_tokens, begun); break;
        case 2: sums.run<2>(at, of_tokens, begun); break;
        case 3: sums.run<3>(at, of_tokens, begun); break;
        default: sums.run<4>(at, of_tokens, begun);
      }
      begun = true;
      step += n;
      if (step % kStageSteps == 0 || step == p.steps) {
        __syncwarp();
        if (lane == 0) barrier_arrive(&barriers.empty[place.at]);
        place.next();
      }
    }
    sums.end_chain(p.chains, i, begun, totals);
  }

  // The ring becomes the sums of both groups.
  constexpr int kDone = 1, kStored = 2;   // and 3
  auto* of_group = reinterpret_cast<float*>(shared) + group * kGroupRows * kSumStride;
  meet(kDone, 2 * kGroupThreads);
  sums.store(of_group);
  wait_for_previous();
  meet(kStored + group, kGroupThreads);
  finish(p, of_group, first_tile + group_tile, first_row + group_row, live);
}
template <int kAlongOutputs>
__global__ void __launch_bounds__(kThreads, 1) many_kernel(const __grid_constant__ Many many) {
  if constexpr (kHasWgmma) many_block<kAlongOutputs>(many);
}

template <int kAlongOutputs>
int64_t blocks_of(const Product& p) {
  using S = Shape<kAlongOutputs>;
  return divide_up(p.tiles, S::kTiles) * divide_up(p.n.most, S::kRows);
}

template <int kAlongOutputs>
void launch(cudaStream_t stream, const Product& p) {
  using S = Shape<kAlongOutputs>;
  const int64_t row_bytes = (p.x_rows.stride > 0 ? p.x_rows.stride : p.n_in) * 2;
  const int64_t tile_bytes = int64_t{p.steps} * kStepBytes;
  const Many many{tensor_map(p.x, {p.n_in, p.n.most, 1}, {row_bytes, row_bytes * p.n.most}, {S::kRows, 1}),
                  tensor_map(p.weight, {kPlainRow, p.steps, p.tiles}, {kStepBytes, tile_bytes}, {kStageSteps, S::kTiles}, kPlainRow), p};
  const auto kernel = many_kernel<kAlongOutputs>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes), "many_kernel");
  const dim3 grid(static_cast<unsigned>(divide_up(p.n.most, S::kRows)), static_cast<unsigned>(divide_up(p.tiles, S::kTiles)));
  launch_overlapping("many_kernel", kernel, grid, kThreads, S::kBytes, stream, many);
}

}  // namespace

bool takes_many_rows(const Product& p, int64_t shared_limit) {
  constexpr int64_t kMany = 128, kLeastBlocks = 24, kShared = std::max(Shape<1>::kBytes, Shape<2>::kBytes);
  if (p.n.most < kMany || shared_limit < kShared || !is_hopper("many_kernel", many_kernel<1>)) return false;
  const auto whole = [](const void* address, const RowLayout& rows, int64_t width, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(address) % 16 == 0 && (rows.stride > 0 ? rows.stride : width) * bytes % 16 == 0;
  };
  return !p.x_rows.index && whole(p.x, p.x_rows, p.n_in, 2) && p.n_out % 4 == 0 &&
         whole(p.out, p.out_rows, p.n_out, p.kind == DenseOut::fp32 ? 4 : 2) && blocks_of<2>(p) >= kLeastBlocks;
}

void many_rows(cudaStream_t stream, const Product& p) {
  const int64_t sms = multiprocessors();
  if (divide_up(blocks_of<1>(p), sms) < divide_up(blocks_of<2>(p), sms)) launch<1>(stream, p);
  else launch<2>(stream, p);
}

}  // namespace kdt::cuda
