// The mixture of experts for a few rows, up to 32 pairs (row, rank), in two launches:
//
//   1. gate | up and SwiGLU, rounded to BF16. A cluster of eight blocks has one tile of gate and the tile of up beside it, of one
//      item of work (pairs of an expert) or of the shared expert: four blocks each, one for every four slices of the inputs. Each
//      sends its sums to where they are added up, a share of the outputs in every block.
//   2. down and the combination. A block has one tile of 64 outputs of all experts and of the shared one: eight warps share out
//      the items, four have 16 outputs of the shared expert each. Their sums meet in shared memory.
//
// Sums are added in the order of experts.cu.
#include "cuda/experts_few.cuh"
#include "cuda/experts_shapes.cuh"
#include "cuda/fragments.cuh"

namespace kdt::cuda {
namespace {

constexpr int kMostPairs = kWarp, kMostRows = 8;
constexpr int kCluster = 2 * kSplits;
constexpr int kItemWarps = 8, kSharedWarps = 4, kDownThreads = (kItemWarps + kSharedWarps) * kWarp;
constexpr int kRing = 3, kDownRing = 4;                // stages of a warp's; three leave room for a block of down
constexpr int kDenseStage = kStageSteps * kPieceBytes;
constexpr int kDownRings = kDownRing * (kItemWarps * kWeightStage + kSharedWarps * kDenseStage);
constexpr int kOutputs = static_cast<int>(kTileOutputs), kSumRow = kOutputs + 4;
constexpr int64_t kStaticShared = 1 << 10;             // of few_down_kernel, at most
constexpr unsigned kAll = 0xffffffffu;

struct GateUp {
  Routing routing;
  int32_t n_experts;
  const bf16* x;                         // [n, hidden]
  int32_t hidden, width, shared_width;
  Int4Shape weight;
  DenseShape shared;
  uint32_t shared_blocks;                // the first of the grid
  bf16 *out, *shared_out;                // [pairs][width], [rows][shared_width]
  const std::byte* shared_down;          // that of the shared expert, so many bytes: a block asks for a share
  int32_t down_bytes, down_share;
};

struct Down {
  Routing routing;
  const float* weight_of;                // [n, k]
  Int4Shape weight;
  DenseShape shared;
  int32_t width, shared_width, row_bytes;   // the latter of a row of either, in shared memory
  const bf16 *x, *shared_x;
  int32_t hidden;
  bf16* out;                             // [n, hidden]
  float* partial;
};

__device__ inline void arrive_in_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ inline void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}
// A float to the same place of another block of the cluster.
__device__ inline void send(float* to, int rank, float value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nst.shared::cluster.f32 [there], %2;\n}"
               :: "r"(shared_address(to)), "r"(rank), "f"(value) : "memory");
#endif
}

// As RingTokens, of kRows rows: columns of an mma past them repeat them, and are dropped.
template <int kRows>
struct FewTokens {
  const std::byte* at;
  __device__ const std::byte* chunk(int, int token, int c) const {
    const int row = token % kRows;
    return at + row * (2 * kStageInputs) + (c ^ row) * 16;
  }
};

// As TokenFetch.
template <int kRows>
struct FewFetch {
  static constexpr int kEach = (kRows + 3) / 4;
  const bf16* row[kEach];
  int left;

  __device__ FewFetch(const bf16* x, int n_in, const int32_t* slots, int count, uint32_t divide, int stage, int lane)
      : left(n_in - stage * kStageInputs - lane % 8 * 8) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int token = lane / 8 + 4 * i;
      row[i] = nullptr;
      if (token < count)
        row[i] = x + static_cast<int64_t>(static_cast<uint32_t>(slots[token]) / divide) * n_in + stage * kStageInputs + lane % 8 * 8;
    }
  }
  __device__ void operator()(std::byte* to, int lane) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int token = lane / 8 + 4 * i;
      if (row[i]) {
        copy_or_zero(to + token * (2 * kStageInputs) + (lane % 8 ^ token % 8) * 16, row[i], left > 0);
        row[i] += kStageInputs;
      }
    }
    left -= kStageInputs;
  }
};

template <int kRows>
constexpr int kStage = kWeightStage + kRows * 2 * kStageInputs;

// A slice of the inputs by a warp. `under_way`: the weights of its first stages are; if not, the next kernel may start once they
// are, as it fetches weights, too.
template <class Weight, int kRows>
__device__ inline void multiply_slice(typename Weight::Fetch weight, FewFetch<kRows> x, int n_stages, bool under_way,
                                      std::byte* ring, int lane, float (&sum)[1][Weight::kQuads][4]) {
#pragma unroll
  for (int i = 0; i < kRing; ++i) {
    if (i < n_stages) {
      if (!under_way) weight(ring + i * kStage<kRows>, lane);
      x(ring + i * kStage<kRows> + kWeightStage, lane);
    }
    cp_async_commit();
  }
  if (!under_way) let_next_start();
  for (int i = 0, place = 0; i < n_stages; ++i) {
    std::byte* at = ring + place * kStage<kRows>;
    cp_async_wait<kRing - 1>();
    __syncwarp();   // scales and tokens are copied by other lanes
    Weight::multiply(at, FewTokens<kRows>{at + kWeightStage}, lane, sum);
    __syncwarp();
    if (i + kRing < n_stages) {
      weight(at, lane);
      x(at + kWeightStage, lane);
    }
    cp_async_commit();
    place = place + 1 == kRing ? 0 : place + 1;
  }
}

// The sums of the block's warps, added up and sent to the blocks of the cluster, `parts` of each, who put what becomes of
// them at out + slots[t] * width.
template <class Weight, int kRows>
__device__ inline void finish(const float (&sum)[1][Weight::kQuads][4], std::byte* shared, float* parts, int rank,
                              const int32_t* slots, int count, bf16* out, int width) {
  constexpr int kAllOutputs = Weight::kOutputs, kEach = kAllOutputs / kCluster, kStride = kAllOutputs + 4,
                kWarpSums = kRows * kStride;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  auto* sums = reinterpret_cast<float*>(shared);
  __syncthreads();
#pragma unroll
  for (int q = 0; q < Weight::kQuads; ++q)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = lane % 4 * 2 + i % 2, o = q * 16 + lane / 4 + i / 2 * 8;
      if (token < kRows) sums[warp * kWarpSums + token * kStride + o] = sum[0][q][i];
    }
  __syncthreads();
  wait_for_cluster();   // all of its blocks have begun
  for (int i = threadIdx.x; i < count * kAllOutputs; i += kExpertThreads) {
    const int token = i / kAllOutputs, o = i % kAllOutputs;
    const float* at = sums + token * kStride + o;
    float total = at[0];
#pragma unroll
    for (int w = 1; w < kExpertWarps; ++w) total += at[w * kWarpSums];
    send(parts + (rank * kRows + token) * kEach + o % kEach, o / kEach, total * Weight::kUnscale);
  }
  arrive_in_cluster();
  wait_for_cluster();
  for (int i = threadIdx.x; i < count * kEach; i += kExpertThreads) {
    const int token = i / kEach, o = i % kEach;
    const auto total = [&](int first) {
      const float* at = parts + (first * kRows + token) * kEach + o;
      float of_splits = at[0];
#pragma unroll
      for (int s = 1; s < kSplits; ++s) of_splits += at[s * kRows * kEach];
      return of_splits;
    };
    out[static_cast<int64_t>(slots[token]) * width + rank * kEach + o] = __float2bfloat16_rn(swiglu(total(0), total(kSplits)));
  }
}

template <int kRows>
__global__ void __launch_bounds__(kExpertThreads, 6) few_gate_up_kernel(const __grid_constant__ GateUp p) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ float parts[kCluster * kRows * (kOutputs / kCluster)];
  __shared__ int32_t slots_of[kExpertWarps][kRows];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  std::byte* ring = shared + warp * kRing * kStage<kRows>;
  int32_t* slots = slots_of[warp];
  const int rank = static_cast<int>(blockIdx.x % kCluster), split = rank % kSplits, up = rank / kSplits;
  const int slice = split * kExpertWarps + warp;
  const auto border = [](int stages, int at) { return stages * at >> (kLogSplits + kLogWarps); };
  arrive_in_cluster();

  if (blockIdx.x < p.shared_blocks) {
    const int pair = static_cast<int>(blockIdx.x / kCluster), begin = border(p.shared.stages, slice);
    const int n_stages = border(p.shared.stages, slice + 1) - begin;
    DenseWeight::Fetch weight = DenseWeight{p.shared.fragments, p.shared.steps}.fetch(2 * pair + up, begin, lane);
#pragma unroll
    for (int i = 0; i < kRing; ++i)
      if (i < n_stages) weight(ring + i * kStage<kRows>, lane);
    if (lane == 0 && n_stages > kRing)
      ask_for(weight.fragments, (min((begin + n_stages) * kStageSteps, p.shared.steps) - (begin + kRing) * kStageSteps) * kPieceBytes);
    if (threadIdx.x == kWarp) {
      const int from = static_cast<int>(blockIdx.x) * p.down_share;
      if (from < p.down_bytes) ask_for(p.shared_down + from, min(p.down_share, p.down_bytes - from));
    }
    const int count = min(kRows, p.routing.n.get());
    if (lane < kRows) slots[lane] = lane;
    __syncwarp();
    wait_for_previous();
    let_next_start();
    if (count <= 0) {
      cp_async_commit();
      cp_async_wait<0>();
      return;
    }
    float sum[1][DenseWeight::kQuads][4] = {};
    multiply_slice<DenseWeight, kRows>(weight, FewFetch<kRows>(p.x, p.hidden, slots, count, 1, begin, lane), n_stages, true,
                                              ring, lane, sum);
    finish<DenseWeight, kRows>(sum, shared, parts, rank, slots, count, p.shared_out + pair * DenseWeight::kOutputs, p.shared_width);
    return;
  }

  const uint32_t block = blockIdx.x - p.shared_blocks, half_tiles = static_cast<uint32_t>(p.weight.tiles) / 2;
  const int item = static_cast<int>(block / kCluster / half_tiles), tile = static_cast<int>(block / kCluster - item * half_tiles);
  prefetch_table(p.routing.gate_up, p.n_experts, static_cast<int>(block) * kExpertThreads + threadIdx.x);
  prefetch_table(p.routing.down, p.n_experts, static_cast<int>(block) * kExpertThreads + threadIdx.x);
  const int n_pairs = p.routing.n.get() * p.routing.k, begin = border(p.weight.stages, slice);
  const int n_stages = border(p.weight.stages, slice + 1) - begin;
  wait_for_previous();
  if (item >= n_pairs) return;
  const int choice = lane < n_pairs ? __ldcg(p.routing.expert + lane) : -1;
  const int expert = __shfl_sync(kAll, choice, item);
  const unsigned same = __ballot_sync(kAll, choice == expert);
  const int before = __popc(same & ((1u << item) - 1)), mine = __popc(same & ((1u << lane) - 1)) - before;
  if (before % kRows != 0) return;   // of the item of an earlier pair
  const Matrix* matrix = p.routing.gate_up + expert;
  const Int4Weight weight{static_cast<const std::byte*>(matrix->data), static_cast<const std::byte*>(matrix->scales),
                          p.weight.tiles, p.weight.groups};
  if (choice == expert && mine >= 0 && mine < kRows) slots[mine] = lane;
  __syncwarp();
  const int count = min(__popc(same) - before, kRows);
  float sum[1][Int4Weight::kQuads][4] = {};
  multiply_slice<Int4Weight, kRows>(weight.fetch(tile + up * static_cast<int>(half_tiles), begin, lane),
                                           FewFetch<kRows>(p.x, p.hidden, slots, count, p.routing.k, begin, lane), n_stages, false,
                                           ring, lane, sum);
  finish<Int4Weight, kRows>(sum, shared, parts, rank, slots, count, p.out + tile * Int4Weight::kOutputs, p.width);
}

// A lane's row of activations: of column lane % 8 or lane / 4 of an mma, as the weights' kind has it.
struct LaneRow {
  const std::byte* row;
  __device__ const std::byte* chunk(int, int, int c) const { return row + c * 16; }
};

// Rows of BF16 to shared memory, by the whole block: several loads under way at a time.
__device__ inline void bring_rows(const bf16* from, int n_rows, int width, std::byte* to, int row_bytes) {
  constexpr int kAtOnce = 4;
  const int chunks = width / 8, all = n_rows * chunks;
  for (int first = threadIdx.x; first < all; first += kAtOnce * kDownThreads) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i * kDownThreads < all) v[i] = __ldcg(reinterpret_cast<const uint4*>(from) + first + i * kDownThreads);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (const int at = first + i * kDownThreads; at < all)
        *reinterpret_cast<uint4*>(to + at / chunks * row_bytes + at % chunks * 16) = v[i];
  }
}

__global__ void __launch_bounds__(kDownThreads, 2) few_down_kernel(const __grid_constant__ Down p) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ int32_t slots_of[kItemWarps][kMostRows];
  __shared__ float pair_weights[kMostPairs];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, tile = static_cast<int>(blockIdx.x);
  const int n_rows = p.routing.n.get(), k = p.routing.k, n_pairs = n_rows * k;
  std::byte* rows = shared + kDownRings;                                       // [pairs + rows]
  auto* sums = reinterpret_cast<float*>(rows + (n_pairs + n_rows) * p.row_bytes);   // the same
  if (threadIdx.x < n_pairs) pair_weights[threadIdx.x] = p.weight_of[threadIdx.x];
  const auto begin_together = [&] {
    wait_for_previous();
    let_next_start();
    bring_rows(p.x, n_pairs, p.width, rows, p.row_bytes);
    bring_rows(p.shared_x, n_rows, p.shared_width, rows + n_pairs * p.row_bytes, p.row_bytes);
    __syncthreads();
  };

  if (warp < kItemWarps) {
    std::byte* ring = shared + warp * kDownRing * kWeightStage;
    int32_t* slots = slots_of[warp];
    const int choice = lane < n_pairs ? __ldcg(p.routing.expert + lane) : -1;
    const unsigned same = __match_any_sync(kAll, choice), below = (1u << lane) - 1;
    const int before = __popc(same & below);
    const bool first = lane < n_pairs && before % kMostRows == 0;
    const unsigned firsts = __ballot_sync(kAll, first);
    unsigned items = __ballot_sync(kAll, first && __popc(firsts & below) % kItemWarps == warp);   // of this warp
    unsigned long long data = 0, scales = 0;
    if (first) {
      data = reinterpret_cast<unsigned long long>(p.routing.down[choice].data);
      scales = reinterpret_cast<unsigned long long>(p.routing.down[choice].scales);
    }
    const auto fetch_of = [&](unsigned of) {
      const int from = __ffs(of) - 1;
      return Int4Weight{reinterpret_cast<const std::byte*>(__shfl_sync(kAll, data, from)),
                        reinterpret_cast<const std::byte*>(__shfl_sync(kAll, scales, from)), p.weight.tiles, p.weight.groups}
          .fetch(tile, 0, lane);
    };
    unsigned ahead = items;
    int ahead_stage = 0;
    Int4Weight::Fetch fetch{};
    if (ahead) fetch = fetch_of(ahead);
    const auto bring = [&](std::byte* to) {
      if (ahead) {
        fetch(to, lane);
        if (++ahead_stage == p.weight.stages) {
          ahead_stage = 0;
          ahead &= ahead - 1;
          if (ahead) fetch = fetch_of(ahead);
        }
      }
      cp_async_commit();
    };
#pragma unroll
    for (int i = 0; i < kDownRing; ++i) bring(ring + i * kWeightStage);
    begin_together();
    for (int place = 0; items; items &= items - 1) {
      const int from = __ffs(items) - 1, expert = __shfl_sync(kAll, choice, from), ordinal = before - __shfl_sync(kAll, before, from);
      const int count = min(__popc(__ballot_sync(kAll, choice == expert && ordinal >= 0)), kMostRows);
      if (choice == expert && ordinal >= 0 && ordinal < kMostRows) slots[ordinal] = lane;
      __syncwarp();
      const std::byte* row = rows + slots[min(lane % 8, count - 1)] * p.row_bytes;
      float sum[1][Int4Weight::kQuads][4] = {};
      for (int stage = 0; stage < p.weight.stages; ++stage) {
        std::byte* at = ring + place * kWeightStage;
        cp_async_wait<kDownRing - 1>();
        __syncwarp();
        Int4Weight::multiply(at, LaneRow{row + stage * kStageInputs * 2}, lane, sum);
        __syncwarp();
        bring(at);
        place = place + 1 == kDownRing ? 0 : place + 1;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = lane % 4 * 2 + half;
        if (token >= count) continue;
        float* to = sums + slots[token] * kSumRow;
#pragma unroll
        for (int q = 0; q < Int4Weight::kQuads; ++q)
#pragma unroll
          for (int eight = 0; eight < 2; ++eight)
            to[q * 16 + eight * 8 + lane / 4] = sum[0][q][eight * 2 + half] * Int4Weight::kUnscale;
      }
      __syncwarp();
    }
  } else {
    const int of_tile = warp - kItemWarps, dense_tile = tile * kSharedWarps + of_tile;
    std::byte* ring = shared + kDownRing * (kItemWarps * kWeightStage + of_tile * kDenseStage);
    const int n_stages = dense_tile < p.shared.tiles ? p.shared.stages : 0;
    DenseWeight::Fetch fetch = DenseWeight{p.shared.fragments, p.shared.steps}.fetch(dense_tile, 0, lane);
#pragma unroll
    for (int i = 0; i < kDownRing; ++i) {
      if (i < n_stages) fetch(ring + i * kDenseStage, lane);
      cp_async_commit();
    }
    begin_together();
    const std::byte* row = rows + (n_pairs + max(min(lane / 4, n_rows - 1), 0)) * p.row_bytes;
    float sum[1][DenseWeight::kQuads][4] = {};
    for (int stage = 0, place = 0; stage < n_stages; ++stage) {
      std::byte* at = ring + place * kDenseStage;
      cp_async_wait<kDownRing - 1>();
      __syncwarp();
      DenseWeight::multiply(at, LaneRow{row + stage * kStageInputs * 2}, lane, sum);
      __syncwarp();
      if (stage + kDownRing < n_stages) fetch(at, lane);
      cp_async_commit();
      place = place + 1 == kDownRing ? 0 : place + 1;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = lane % 4 * 2 + i % 2;
      if (token < n_rows) sums[(n_pairs + token) * kSumRow + of_tile * 16 + lane / 4 + i / 2 * 8] = sum[0][0][i];
    }
  }

  __syncthreads();
  for (int i = threadIdx.x; i < n_rows * kOutputs; i += kDownThreads) {
    const int row = i / kOutputs, o = i % kOutputs;
    if (tile * kOutputs + o >= p.hidden) continue;
    float sum = 0;
#pragma unroll 8
    for (int j = row * k; j < (row + 1) * k; ++j) sum = fmaf(pair_weights[j], sums[j * kSumRow + o], sum);
    sum += sums[(n_pairs + row) * kSumRow + o];
    const int64_t to = static_cast<int64_t>(row) * p.hidden + tile * kOutputs + o;
    if (p.partial) p.partial[to] = sum;
    else p.out[to] = __float2bfloat16_rn(__bfloat162float(p.out[to]) + sum);
  }
}

int64_t shared_width_of(const ExpertsArgs& args) { return tiles_of(args.shared_down->n_in) * kTileRows; }

int64_t row_bytes_of(const ExpertsArgs& args) { return std::max(args.width, shared_width_of(args)) * 2 + 16; }

int64_t down_shared(const ExpertsArgs& args) {
  return kDownRings + args.n.most * (args.k + 1) * (row_bytes_of(args) + kSumRow * 4);
}

// Both kernels want as much of a multiprocessor's memory as it can share, so that blocks of both are on it at once.
template <class Args>
void launch(const char* name, void (*kernel)(Args), int64_t blocks, unsigned threads, int64_t shared, cudaStream_t stream,
            const Args& args, unsigned cluster) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)), name);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared), name);
  launch_overlapping(name, kernel, dim3(static_cast<unsigned>(blocks)), threads, static_cast<size_t>(shared), stream, args, cluster);
}

template <int kRows>
void launch_gate_up(int64_t blocks, cudaStream_t stream, const GateUp& args) {
  launch("few_gate_up_kernel", few_gate_up_kernel<kRows>, blocks, kExpertThreads, kExpertWarps * kRing * kStage<kRows>, stream, args,
         kCluster);
}

}  // namespace

bool takes_few_experts(const ExpertsArgs& args, int64_t shared_limit) {
  return args.n.most <= kMostRows && args.n.most * args.k <= kMostPairs && args.hidden >= kSplitInputs && args.hidden % 64 == 0 &&
         args.width % kTileOutputs == 0 && shared_width_of(args) % kStageInputs == 0 &&
         args.gate_up.host[0].group_size >= kTileGroup && args.down.host[0].group_size >= kTileGroup &&
         down_shared(args) + kStaticShared <= shared_limit && has_clusters("few_down_kernel", few_down_kernel);
}

void few_experts(cudaStream_t stream, const ExpertsArgs& args, const Routing& routing, bf16* hidden, bf16* shared_hidden) {
  const auto to32 = [](int64_t value) { return static_cast<int32_t>(value); };
  const int64_t shared_width = shared_width_of(args);
  const Int4Shape weight(args.gate_up.host[0]);
  const DenseShape shared_gate_up(*args.shared_gate_up, 2 * shared_width / kTileRows), shared_down(*args.shared_down, tiles_of(args.hidden));
  const int64_t shared_blocks = shared_gate_up.tiles / 2 * kCluster;
  const int64_t down_bytes = std::min<int64_t>(packed_size(shared_down.tiles, shared_down.steps) * 2, kMostAsked);
  const GateUp first{routing, to32(args.n_experts), static_cast<const bf16*>(args.x), to32(args.hidden), to32(args.width),
                     to32(shared_width), weight, shared_gate_up, static_cast<uint32_t>(shared_blocks), hidden, shared_hidden,
                     shared_down.fragments, to32(down_bytes), to32(divide_up(down_bytes, shared_blocks * kPieceBytes) * kPieceBytes)};
  const int64_t blocks = shared_blocks + args.n.most * args.k * weight.tiles / 2 * kCluster;
  if (args.n.most == 1) launch_gate_up<1>(blocks, stream, first);
  else if (args.n.most <= 4) launch_gate_up<4>(blocks, stream, first);
  else launch_gate_up<kMostRows>(blocks, stream, first);

  const Down second{routing, args.weight, Int4Shape(args.down.host[0]), shared_down, to32(args.width), to32(shared_width),
                    to32(row_bytes_of(args)), hidden, shared_hidden, to32(args.hidden), static_cast<bf16*>(args.out), args.partial};
  launch("few_down_kernel", few_down_kernel, divide_up(args.hidden, kOutputs), kDownThreads, down_shared(args), stream, second, 1);
}

}  // namespace kdt::cuda
