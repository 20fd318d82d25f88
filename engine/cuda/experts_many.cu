// INT4 experts for many rows, on sm_90a: items of up to 64 pairs of an expert, whose tokens are the columns of wgmma. The bits are
// those of experts.cu: the same chains over the same inputs, added in the same order, of the same weights.
//
//   gate_up_many   a block takes 128 outputs of gate and the same of up of an item, a warpgroup each, and leaves what SwiGLU makes of
//                  them, in BF16
//   down_many      a block takes a run of outputs of an item, its warpgroups 128 in turns, and leaves fp32 outputs of every pair
//
// Blocks are as many as multiprocessors. Those of gate_up_many take work as they are done, as some begin while the shared expert's
// still run; those of down_many in strides. The first warpgroup brings, running ahead: weights by the copy engine, as they lie
// (checkpoint/int4_tiles.h), and tokens, row by row, to rows of 128 bytes whose chunks are swapped about.
// The other two multiply. Of 128 outputs, two tiles, a warp makes the A fragments of half a tile from 8 bytes of a lane: of quads
// 2 (warp % 2) and the next, in tile warp / 2.
#include "cuda/experts_int4.cuh"
#include "cuda/experts_many.cuh"
#include "cuda/linear_product.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/wgmma_rows.cuh"

namespace kdt::cuda {
namespace {

constexpr int kGroupThreads = 4 * kWarp, kThreads = 3 * kGroupThreads;
constexpr int kPairTiles = 2, kPairOutputs = kPairTiles * static_cast<int>(kTileOutputs);   // of a warpgroup
constexpr int kPairStep = kPairTiles * kPieceBytes, kPairScales = kPairTiles * kScaleBytes;
constexpr int kPairStage = kStageSteps * kPairStep + 2 * kPairScales;                       // 64 inputs of 128 outputs
constexpr int kTokensStage = kManyTokens * kStageInputs * 2;                                // 64 inputs of an item's tokens
constexpr int kPairParts = kStageSteps + 2;                                                 // copies that bring a pair's stage
constexpr float kUnscale = Int4Weight::kUnscale;

// gate_up_many
constexpr int kGateUpStage = kTokensStage + 2 * kPairStage, kGateUpStages = 8, kLag = 3;
constexpr int kSumStride = kPairOutputs + 4, kSumBytes = kManyTokens * kSumStride * 4;      // of a warpgroup
constexpr int kGateUpBytes = kGateUpStages * (kGateUpStage + 20) + 2 * kSumBytes + 2 * 4;
constexpr int kDone = -1;
static_assert(kGateUpStage % 1024 == 0);
// down_many
constexpr int kDownStages = 28, kMostWidthStages = 4;
constexpr int kTokensBytes = kMostWidthStages * kTokensStage;
constexpr int kDownBytes = 2 * kTokensBytes + kDownStages * (kPairStage + 16) + 2 * (16 + kManyTokens * 4);

struct GateUpMany {
  Routing routing;
  const bf16* x;
  int32_t hidden, width, tiles, stages;
  int32_t log_chains;
  int32_t* taken;              // how much work blocks have taken besides their first; 0 at first
  bf16* out;                   // [pairs][width]
};

struct DownMany {
  Routing routing;
  const bf16* x;               // [pairs][width]
  int32_t width, hidden, tiles, stages;
  int32_t runs, pairs_a_run;   // of an item: how many, and of how many tile pairs
  float* out;                  // [pairs][hidden]
};

struct ManyItem {
  const std::byte *weight, *scales;
  int count;
};

__device__ inline ManyItem item_at(const Routing& r, int item, bool down) {
  const auto from = reinterpret_cast<const unsigned long long*>(r.items + item);
  return {reinterpret_cast<const std::byte*>(__ldcg(from + (down ? 2 : 0))),
          reinterpret_cast<const std::byte*>(__ldcg(from + (down ? 3 : 1))), static_cast<int>(__ldcg(from + 4))};
}

// One of kPairParts copies that bring 64 inputs of tiles `tile` and the next: [step][tile] words, then [group][tile] scales.
__device__ inline void bring_pair(SharedAddress to, const ManyItem& item, int tiles, int tile, int stage, int part, uint64_t* full) {
  const int64_t step = stage * kStageSteps + part, group = stage * 2 + part - kStageSteps;
  if (part < kStageSteps) bring_bytes(to + part * kPairStep, item.weight + (step * tiles + tile) * kPieceBytes, kPairStep, full);
  else bring_bytes(to + kStageSteps * kPairStep + (part - kStageSteps) * kPairScales,
                   item.scales + (group * tiles + tile) * kScaleBytes, kPairScales, full);
}

// A fragments of 32 inputs of a pair of tiles: of two steps, for two wgmma each.
using Fragments = uint32_t[4][4];

// Makes those of half a stage.
__device__ inline void load_weights(Fragments& a, SharedAddress pair, int half) {
  const int warp = threadIdx.x % kGroupThreads / kWarp, lane = threadIdx.x % kWarp, quads = warp % 2 * 8;
  const SharedAddress words = pair + half * 2 * kPairStep + warp / 2 * kPieceBytes + lane * 16 + quads;
  const SharedAddress scales = pair + kStageSteps * kPairStep + half * kPairScales + warp / 2 * kScaleBytes + lane / 4 * 16 + quads;
  const uint2 scale = shared8(scales), first = shared8(words), second = shared8(words + kPairStep);
  const Scales low(scale.x), high(scale.y);
  low.weights(first.x, a[0]);
  high.weights(first.y, a[1]);
  low.weights(second.x, a[2]);
  high.weights(second.y, a[3]);
}

// Adds stage after stage to the sums of a pair of tiles. Weights of half a stage are made while the half before is multiplied.
template <int kTokens>
struct PairSums {
  float sum[2][kTokens / 2] = {};
  Fragments even = {}, odd = {};

  // Begins to add 64 inputs, or begins the sums with them. given() when those of the stage before are in.
  template <class F>
  __device__ void add(SharedAddress pair, SharedAddress tokens, bool begun, const F& given) {
    const uint64_t b = wgmma_operand(tokens);
    load_weights(even, pair, 0);
    run(even, b, begun);
    wgmma_wait_but<1>();
    wgmma_hold(odd);
    if (begun) given();
    load_weights(odd, pair, 1);
    run(odd, b + 4, true);
    wgmma_wait_but<1>();
    wgmma_hold(even);
  }
  // Waits for the last.
  __device__ void wait() {
    wgmma_wait();
    wgmma_hold(odd);
    wgmma_begin(sum[0]);
    wgmma_begin(sum[1]);
  }

 private:
  __device__ void run(const Fragments& a, uint64_t b, bool begun) {
    wgmma_begin(sum[0]);
    wgmma_begin(sum[1]);
    wgmma_fence();
#pragma unroll
    for (int f = 0; f < 4; ++f) wgmma_rows<kTokens>(sum[f % 2], a[f], b + f / 2 * 2, f > 1 || begun);
    wgmma_commit();
  }
};

// Of sum[i][k] of a thread: its token, and its output of the pair's 128.
__device__ inline int token_of(int k) { return k / 4 * 8 + threadIdx.x % 4 * 2 + k % 2; }
__device__ inline int output_of(int i, int k) {
  const int warp = threadIdx.x % kGroupThreads / kWarp, lane = threadIdx.x % kWarp;
  return warp / 2 * 64 + (warp % 2 * 2 + i) * 16 + lane / 4 + k % 4 / 2 * 8;
}

__device__ inline void leave(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) barrier_arrive(barrier);
}

// Calls with(tokens) with the least multiple of 16 that `count` tokens fit in.
template <class F>
__device__ inline void with_tokens(int count, const F& with) {
  switch ((count + 15) / 16) {
    case 1: with(std::integral_constant<int, 16>()); break;
    case 2: with(std::integral_constant<int, 32>()); break;
    case 3: with(std::integral_constant<int, 48>()); break;
    default: with(std::integral_constant<int, 64>());
  }
}

// How much work there is.
__device__ inline int n_work(const Routing& r, int of_item) { return __ldcg(r.n_items) * of_item; }

// A stage: tokens, the pair of gate, the pair of up.
struct GateUpMemory {
  SharedAddress at;
  float* sums;                 // [2 warpgroups][tokens][outputs]; before, of a warpgroup, [sums of a thread][threads]
  uint64_t *full, *empty;
  int32_t *number, *next;      // which work a stage belongs to; the work after that which is being brought, by turns
  __device__ explicit GateUpMemory(std::byte* shared)
      : at(shared_address(shared)), sums(reinterpret_cast<float*>(shared + kGateUpStages * kGateUpStage)),
        full(reinterpret_cast<uint64_t*>(shared + kGateUpStages * kGateUpStage + 2 * kSumBytes)), empty(full + kGateUpStages),
        number(reinterpret_cast<int32_t*>(empty + kGateUpStages)), next(number + kGateUpStages) {}
};

__device__ void bring_gate_up(const GateUpMany& p, const GateUpMemory& memory) {
  const int thread = threadIdx.x, chunk = thread % 8, columns = p.width / kPairOutputs;
  const int part = thread / kWarp + thread % kWarp * 4;   // a warp asks for one copy after the other: each for as few
  constexpr int kTaken = 4;
  Place<kGateUpStages> place, ready;
  int pending = 0;
  const auto give = [&] {
    fence_shared();
    barrier_arrive(&memory.full[ready.at]);
    ready.next();
  };
  const int works = n_work(p.routing, columns);
  int number = static_cast<int>(blockIdx.x);
  for (int turn = 0; number < works; turn ^= 1) {
    if (thread == 0) memory.next[turn] = static_cast<int>(gridDim.x) + atomicAdd(p.taken, 1);
    const int index = number / columns, tile = number % columns * kPairTiles;
    const ManyItem item = item_at(p.routing, index, false);
    const bf16* row[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = thread / 8 + 16 * i;
      row[i] = nullptr;
      if (token < item.count) {
        const uint32_t pair = static_cast<uint32_t>(__ldcg(p.routing.pairs + static_cast<int64_t>(index) * kManyTokens + token));
        row[i] = p.x + static_cast<int64_t>(pair / static_cast<uint32_t>(p.routing.k)) * p.hidden + chunk * 8;
      }
    }
    for (int stage = 0; stage < p.stages; ++stage) {
      const SharedAddress to = memory.at + place.at * kGateUpStage;
      uint64_t* full = &memory.full[place.at];
      barrier_wait(&memory.empty[place.at], place.phase ^ 1);
      if (thread == 0) {
        memory.number[place.at] = number;
        barrier_arrive(full, 2 * kPairStage);
      }
      if (part < 2 * kPairParts) {
        const int up = part / kPairParts;
        bring_pair(to + kTokensStage + up * kPairStage, item, p.tiles, tile + up * p.tiles / 2, stage, part % kPairParts, full);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = thread / 8 + 16 * i;
        if (row[i]) cp_async16(to + token * 128 + ((chunk ^ token % 8) << 4), row[i] + stage * kStageInputs);
      }
      cp_async_commit();
      place.next();
      if (pending < kLag) {
        ++pending;
      } else {
        cp_async_wait<kLag>();
        give();
      }
    }
    meet(kTaken, kGroupThreads);
    number = memory.next[turn];
  }
  cp_async_wait<0>();
  for (; pending > 0; --pending) give();
  barrier_wait(&memory.empty[place.at], place.phase ^ 1);
  if (thread == 0) {
    memory.number[place.at] = kDone;
    barrier_arrive(&memory.full[place.at]);
  }
  give();
}

template <int kTokens>
__device__ void sum_gate_up(const GateUpMany& p, const GateUpMemory& memory, Place<kGateUpStages>& place, int group) {
  constexpr int kSums = kTokens / 2, kTogether = 4;
  const int thread = threadIdx.x % kGroupThreads;
  float* sums = memory.sums + group * (kSumBytes / 4);
  PairSums<kTokens> chain;
  float four[2][kSums] = {};
  Place<kGateUpStages> done = place;
  const auto give = [&] {
    leave(&memory.empty[done.at]);
    done.next();
  };
  int stage = 0;
#pragma unroll 1
  for (int c = 0; c < 1 << p.log_chains; ++c) {
    bool begun = false;
#pragma unroll 1
    for (const int end = p.stages * (c + 1) >> p.log_chains; stage < end; ++stage) {
      const SharedAddress at = memory.at + place.at * kGateUpStage;
      barrier_wait(&memory.full[place.at], place.phase);
      chain.add(at + kTokensStage + group * kPairStage, at, begun, give);
      place.next();
      begun = true;
    }
    chain.wait();
    give();
    // The first of four is added to nothing; a number and -0 is the number.
    if (c % kTogether == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int k = 0; k < kSums; ++k) four[i][k] = -0.0f;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int k = 0; k < kSums; ++k) four[i][k] += chain.sum[i][k];
    if (c % kTogether + 1 < kTogether || p.log_chains == 2) continue;
    float* total = sums + thread;
    if (c >= kTogether) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int k = 0; k < kSums; ++k) four[i][k] = total[(i * kSums + k) * kGroupThreads] + four[i][k];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int k = 0; k < kSums; ++k) total[(i * kSums + k) * kGroupThreads] = four[i][k];
  }
  constexpr int kBarrier = 2;   // and 3
  meet(kBarrier + group, kGroupThreads);
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int k = 0; k < kSums; ++k) sums[token_of(k) * kSumStride + output_of(i, k)] = four[i][k] * kUnscale;
}

__device__ void gate_up_many_block(const GateUpMany& p) {
  extern __shared__ __align__(1024) std::byte shared[];
  const GateUpMemory memory(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kGateUpStages; ++i) {
      barrier_init(&memory.full[i], kGroupThreads + 1);
      barrier_init(&memory.empty[i], 8);
    }
    fence_shared();
  }
  let_next_start();
  __syncthreads();
  const int group = warpgroup() - 1;
  if (group < 0) {
    give_registers<88>();
    bring_gate_up(p, memory);
  } else {
    take_registers<208>();
    constexpr int kSummed = 1;
    const int columns = p.width / kPairOutputs;
    Place<kGateUpStages> place;
    for (;;) {
      barrier_wait(&memory.full[place.at], place.phase);
      const int number = memory.number[place.at];
      if (number == kDone) break;
      const int index = number / columns, first = number % columns * kPairOutputs;
      const int count = item_at(p.routing, index, false).count;
      with_tokens(count, [&](auto tokens) { sum_gate_up<tokens()>(p, memory, place, group); });
      meet(kSummed, 2 * kGroupThreads);
      for (int i = threadIdx.x - kGroupThreads; i < count * (kPairOutputs / 4); i += 2 * kGroupThreads) {
        const int token = i / (kPairOutputs / 4), o = i % (kPairOutputs / 4) * 4;
        const float* from = memory.sums + token * kSumStride + o;
        const float4 gate = *reinterpret_cast<const float4*>(from), up = *reinterpret_cast<const float4*>(from + kSumBytes / 4);
        const auto swiglu = [](float g, float u) { return g / (1.0f + expf(-g)) * u; };
        const int64_t pair = __ldcg(p.routing.pairs + static_cast<int64_t>(index) * kManyTokens + token);
        auto* to = reinterpret_cast<__nv_bfloat162*>(p.out + pair * p.width + first + o);
        to[0] = __floats2bfloat162_rn(swiglu(gate.x, up.x), swiglu(gate.y, up.y));
        to[1] = __floats2bfloat162_rn(swiglu(gate.z, up.z), swiglu(gate.w, up.w));
      }
      meet(kSummed, 2 * kGroupThreads);
    }
  }
  wait_for_previous();
}
__global__ void __launch_bounds__(kThreads, 1) gate_up_many_kernel(const __grid_constant__ GateUpMany p) {
  if constexpr (kHasWgmma) gate_up_many_block(p);
}

struct DownMemory {
  SharedAddress tokens, weights;
  int32_t* slots;              // [2][tokens]: pairs
  uint64_t *full, *empty, *tokens_full, *tokens_empty;
  __device__ explicit DownMemory(std::byte* shared)
      : tokens(shared_address(shared)), weights(tokens + 2 * kTokensBytes),
        slots(reinterpret_cast<int32_t*>(shared + 2 * kTokensBytes + kDownStages * kPairStage)),
        full(reinterpret_cast<uint64_t*>(slots + 2 * kManyTokens)), empty(full + kDownStages), tokens_full(empty + kDownStages),
        tokens_empty(tokens_full + 2) {}
};

// What a number of the work stands for.
struct DownWork {
  int index, first_pair, n_pairs;   // the item; of its tile pairs
  __device__ DownWork(const DownMany& p, int number)
      : index(number / p.runs), first_pair(number % p.runs * p.pairs_a_run),
        n_pairs(min(p.pairs_a_run, p.tiles / kPairTiles - first_pair)) {}
};

constexpr int kWeightWarps = 2, kTokenThreads = kGroupThreads - kWeightWarps * kWarp;

__device__ void bring_down_weights(const DownMany& p, const DownMemory& memory) {
  const int part = threadIdx.x / kWarp + threadIdx.x % kWarp * kWeightWarps;
  Place<kDownStages> place;
  for (int number = blockIdx.x; number < n_work(p.routing, p.runs); number += gridDim.x) {
    const DownWork work(p, number);
    const ManyItem item = item_at(p.routing, work.index, true);
    for (int pair = 0; pair < work.n_pairs; ++pair)
      for (int stage = 0; stage < p.stages; ++stage) {
        uint64_t* full = &memory.full[place.at];
        barrier_wait(&memory.empty[place.at], place.phase ^ 1);
        if (part == 0) barrier_arrive(full, kPairStage);
        if (part < kPairParts)
          bring_pair(memory.weights + place.at * kPairStage, item, p.tiles, (work.first_pair + pair) * kPairTiles, stage, part, full);
        place.next();
      }
  }
}

__device__ void bring_down_tokens(const DownMany& p, const DownMemory& memory) {
  const int thread = threadIdx.x - kWeightWarps * kWarp, chunks = p.width / 8;
  Place<2> place;
  wait_for_previous();
  for (int number = blockIdx.x; number < n_work(p.routing, p.runs); number += gridDim.x) {
    const DownWork work(p, number);
    const int count = item_at(p.routing, work.index, true).count;
    const int32_t* pairs = p.routing.pairs + static_cast<int64_t>(work.index) * kManyTokens;
    barrier_wait(&memory.tokens_empty[place.at], place.phase ^ 1);
    const SharedAddress to = memory.tokens + place.at * kTokensBytes;
    for (int i = thread; i < count * chunks; i += kTokenThreads) {
      const int token = i / chunks, c = i % chunks;
      cp_async16(to + c / 8 * kTokensStage + token * 128 + ((c % 8 ^ token % 8) << 4),
                 p.x + static_cast<int64_t>(__ldcg(pairs + token)) * p.width + c * 8);
    }
    cp_async_commit();
    for (int i = thread; i < count; i += kTokenThreads) memory.slots[place.at * kManyTokens + i] = __ldcg(pairs + i);
    cp_async_wait<0>();
    fence_shared();
    barrier_arrive(&memory.tokens_full[place.at]);
    place.next();
  }
}

// Every second tile pair of the work. `at`: the stages that have gone through the ring before it.
template <int kTokens>
__device__ void sum_down(const DownMany& p, const DownMemory& memory, const DownWork& work, int tokens_at, int count, int64_t at, int pair) {
  constexpr int kSums = kTokens / 2;
  const int32_t* slots = memory.slots + tokens_at * kManyTokens;
  for (; pair < work.n_pairs; pair += 2) {
    PairSums<kTokens> sums;
    uint32_t before = 0;
    for (int stage = 0; stage < p.stages; ++stage) {
      const uint32_t number = static_cast<uint32_t>(at + pair * p.stages + stage), place = number % kDownStages;
      barrier_wait(&memory.full[place], number / kDownStages % 2);
      sums.add(memory.weights + place * kPairStage, memory.tokens + tokens_at * kTokensBytes + stage * kTokensStage, stage > 0,
               [&] { leave(&memory.empty[before]); });
      before = place;
    }
    sums.wait();
    leave(&memory.empty[before]);
    float* out = p.out + (work.first_pair + pair) * kPairOutputs;
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      if (token_of(k) >= count) continue;
      float* to = out + static_cast<int64_t>(slots[token_of(k)]) * p.hidden;
#pragma unroll
      for (int i = 0; i < 2; ++i) to[output_of(i, k)] = sums.sum[i][k] * kUnscale;
    }
  }
}

__device__ void down_many_block(const DownMany& p) {
  extern __shared__ __align__(1024) std::byte shared[];
  const DownMemory memory(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kDownStages; ++i) {
      barrier_init(&memory.full[i], 1);
      barrier_init(&memory.empty[i], 4);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&memory.tokens_full[i], kTokenThreads);
      barrier_init(&memory.tokens_empty[i], 8);
    }
    fence_shared();
  }
  let_next_start();
  __syncthreads();
  const int group = warpgroup() - 1;
  if (group < 0) {
    give_registers<88>();
    if (threadIdx.x < kWeightWarps * kWarp) bring_down_weights(p, memory);
    else bring_down_tokens(p, memory);
  } else {
    take_registers<208>();
    wait_for_previous();
    Place<2> place;
    int64_t at = 0;
    for (int number = blockIdx.x, turn = group; number < n_work(p.routing, p.runs); number += gridDim.x) {
      const DownWork work(p, number);
      const int count = item_at(p.routing, work.index, true).count;
      barrier_wait(&memory.tokens_full[place.at], place.phase);
      with_tokens(count, [&](auto tokens) { sum_down<tokens()>(p, memory, work, place.at, count, at, turn); });
      leave(&memory.tokens_empty[place.at]);
      place.next();
      at += work.n_pairs * p.stages;
      turn = (turn + work.n_pairs) % 2;   // who was last is not first
    }
  }
  wait_for_previous();
}
__global__ void __launch_bounds__(kThreads, 1) down_many_kernel(const __grid_constant__ DownMany p) {
  if constexpr (kHasWgmma) down_many_block(p);
}

template <class Args>
void launch(const char* name, void (*kernel)(Args), int blocks, int shared, cudaStream_t stream, const Args& args) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), name);
  launch_overlapping(name, kernel, dim3(static_cast<unsigned>(blocks)), kThreads, static_cast<size_t>(shared), stream, args);
}

}  // namespace

bool takes_many_experts(const ExpertsArgs& args, int64_t shared_limit) {
  const bool tiles = args.gate_up.host->group_size == kTileGroup && args.width % kPairOutputs == 0 && args.hidden % kPairOutputs == 0 &&
                     args.hidden >= 4 * kStageInputs && args.width <= kMostWidthStages * kStageInputs;
  return tiles && args.shared_down->n_in % kTileRows == 0 && shared_limit >= std::max(kGateUpBytes, kDownBytes) &&
         reinterpret_cast<uintptr_t>(args.x) % 16 == 0 && is_hopper("gate_up_many_kernel", gate_up_many_kernel);
}

// Gate and up of the experts begin while those of the shared one still run.
void many_experts(cudaStream_t stream, const ExpertsArgs& args, const Routing& routing, int log_chains, const ManyScratch& scratch) {
  constexpr int64_t kRunPairs = 14;
  const auto to32 = [](int64_t value) { return static_cast<int32_t>(value); };
  const int64_t shared_width = args.shared_down->n_in;
  const auto* x = static_cast<const bf16*>(args.x);
  Product product = describe({args.n, x, *args.shared_gate_up, scratch.shared_hidden, DenseOut::swiglu});
  product.chains = {1 << log_chains, 4, to32(divide_up(product.steps, kStageSteps)), 1 << log_chains, kStageSteps};
  many_rows(stream, product);
  const GateUpMany gate_up{routing, x, to32(args.hidden), to32(args.width), to32(2 * args.width / kTileOutputs),
                           to32(args.hidden / kStageInputs), log_chains, scratch.taken, scratch.hidden};
  launch("gate_up_many_kernel", gate_up_many_kernel, multiprocessors(), kGateUpBytes, stream, gate_up);
  const DownMany down{routing, scratch.hidden, to32(args.width), to32(args.hidden), to32(args.hidden / kTileOutputs),
                      to32(args.width / kStageInputs), to32(divide_up(args.hidden / kPairOutputs, kRunPairs)), to32(kRunPairs),
                      scratch.out};
  launch("down_many_kernel", down_many_kernel, multiprocessors(), kDownBytes, stream, down);
  product = describe({args.n, scratch.shared_hidden, *args.shared_down, scratch.shared_out, DenseOut::fp32, {shared_width}, {}});
  product.chains = {1, 1, product.steps, 1, 1};
  many_rows(stream, product);
}

}  // namespace kdt::cuda
