// Products with BF16 weights for up to sixteen rows: no block shares its tiles of outputs with another, so none waits for
// another. The bits are those of linear.cu: the same ranges of K steps, whose sums are added in the same order.
//
// A block owns kTiles tiles. Its warps go through the ranges, warp w through w, w + kWarps …; each has a ring in shared memory
// of stages of two K steps, the weights as they lie and of every row 64 bytes. Rings are filled ahead of everything: with the
// weights before the kernel before has ended.
#include "cuda/linear_product.cuh"

namespace kdt::cuda {
namespace {

constexpr int kStageSteps = 2, kStepBytes = 512, kRowBytes = 64;   // of a stage: K steps; of a tile's step; of a row
constexpr int kRowsBytes = kTokens * kRowBytes;                    // of eight rows

template <int kGroups, int kTiles>
constexpr int kFewStage = kTiles * kStageSteps * kStepBytes + kGroups * kRowsBytes;

// Steps of a warp's ranges, one after the other.
struct Cursor {
  int step, left, range;          // left: of the range
};

template <int kGroups, int kTiles, int kWarps, int kStages>
__global__ void __launch_bounds__(kWarps* kWarp) few_kernel(const __grid_constant__ Product p) {
  constexpr int kStage = kFewStage<kGroups, kTiles>, kRing = kStages * kStage, kThreads = kWarps * kWarp;
  extern __shared__ __align__(128) std::byte shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int first_tile = static_cast<int>(blockIdx.x) * kTiles, n_ranges = p.ranks * kParts;
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + warp * kRing;
  const auto at_range = [&](int range) {
    const int begin = min(range * p.warp_steps, p.steps);
    return Cursor{begin, range < n_ranges ? min(p.warp_steps, p.steps - begin) : 0, range};
  };
  // The next stage; of a range that has no steps none.
  const auto advance = [&](Cursor& at) {
    at.step += kStageSteps, at.left -= kStageSteps;
    if (at.left <= 0 && at.range < n_ranges) at = at_range(at.range + kWarps);
  };
  const std::byte* weight[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
    weight[t] = reinterpret_cast<const std::byte*>(fragment_at(p.weight, min(first_tile + t, p.tiles - 1), 0, p.steps, lane));
  const auto fetch_weights = [&](int step, uint32_t stage) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int s = 0; s < kStageSteps; ++s)
        copy_once16(stage + (t * kStageSteps + s) * kStepBytes + lane * 16,
                    weight[t] + static_cast<int64_t>(step + s) * kStepBytes);
  };
  Cursor fetched = at_range(warp);
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (fetched.left > 0) fetch_weights(fetched.step, ring + s * kStage);
    advance(fetched);
  }
  const int live = p.n.get();
  wait_for_previous();
  let_next_start();
  if (live <= 0) {
    cp_async_commit();
    cp_async_wait<0>();
    return;
  }

  // A thread an output of a row; a warp's are next to one another in a row. What the first is added to is fetched now.
  constexpr int kOutputs = kTiles * static_cast<int>(kTileRows);
  const bool gated = p.kind == DenseOut::swiglu;
  const int width = gated ? kOutputs / 2 : kOutputs;
  auto* out = static_cast<bf16*>(p.out);
  const auto output_at = [&](int i) -> int64_t {
    const int64_t output = static_cast<int64_t>(blockIdx.x) * width + i % width;
    return output < p.n_out ? row_at(p.out_rows, i / width, p.n_out) + output : -1;
  };
  float before = 0;
  if (p.kind == DenseOut::add && static_cast<int>(threadIdx.x) < live * width)
    if (const int64_t at = output_at(threadIdx.x); at >= 0) before = __bfloat162float(out[at]);

  // A row's chunks of 16 bytes are swapped about, so that four rows' fragments lie in different banks.
  const std::byte* row[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g)   // columns past the last row have what lies there, and are dropped
    row[g] = reinterpret_cast<const std::byte*>(p.x + row_at(p.x_rows, min(g * kTokens + lane / 4, live - 1), p.n_in)) +
             lane % 4 * 16;
  constexpr int kRowsAt = kTiles * kStageSteps * kStepBytes;
  const int swap = lane / 8 % 2 * 2;   // row lane / 4: of rows 2, 3, 6, 7
  const uint32_t row_to = kRowsAt + lane / 4 * kRowBytes + ((lane % 4) ^ swap) * 16;
  const auto fetch_rows = [&](int step, uint32_t stage) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      if (g * kTokens + lane / 4 < live)
        cp_async16(stage + row_to + g * kRowsBytes, row[g] + step * static_cast<int>(kStepInputs * 2));
  };
  {
    Cursor at = at_range(warp);
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      if (at.left > 0) fetch_rows(at.step, ring + s * kStage);
      advance(at);
      cp_async_commit();
    }
  }

  // Sums of ranges: float4 [ranges][tiles][groups][32 lanes], behind the rings.
  auto* sums = reinterpret_cast<float4*>(shared + kWarps * kRing);
  uint32_t place = 0;
  for (int range = warp; range < n_ranges; range += kWarps) {
    float sum[kTiles][kGroups][4] = {};
    for (int left = at_range(range).left; left > 0; left -= kStageSteps) {
      cp_async_wait<kStages - 2>();
      __syncwarp();
      const uint32_t stage = ring + place;
#pragma unroll
      for (int s = 0; s < kStageSteps; ++s) {
        uint4 a[kTiles];
        uint2 b[kGroups];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) a[t] = shared16(stage + (t * kStageSteps + s) * kStepBytes + lane * 16);
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
          b[g] = shared8(stage + kRowsAt + g * kRowsBytes + lane / 4 * kRowBytes + ((s * 2 + lane % 4 / 2) ^ swap) * 16 +
                         lane % 2 * 8);
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
          for (int g = 0; g < kGroups; ++g) mma(sum[t][g], {a[t].x, a[t].y, a[t].z, a[t].w}, {b[g].x, b[g].y});
      }
      // The stage before is free: all lanes have read it.
      if (fetched.left > 0) {
        const uint32_t to = ring + (place == 0 ? kRing - kStage : place - kStage);
        fetch_weights(fetched.step, to);
        fetch_rows(fetched.step, to);
        advance(fetched);
      }
      cp_async_commit();
      place = place == kRing - kStage ? 0 : place + kStage;
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
        sums[((range * kTiles + t) * kGroups + g) * kWarp + lane] =
            make_float4(sum[t][g][0], sum[t][g][1], sum[t][g][2], sum[t][g][3]);
  }
  __syncthreads();

  constexpr int kOfRange = kTiles * kGroups * kWarp * 4;
  const auto* parts = reinterpret_cast<const float*>(sums);
  const auto total = [&](int token, int o) {
    const int of_lane = (o % 8 * 4 + token % kTokens / 2) * 4 + token % 2 + o / 8 % 2 * 2;
    const float* from = parts + ((o / 16 * kGroups + token / kTokens) * kWarp) * 4 + of_lane;
    float all = 0;
    for (int r = 0; r < p.ranks; ++r) {
      float part[kParts];
#pragma unroll
      for (int w = 0; w < kParts; ++w) part[w] = from[(r * kParts + w) * kOfRange];
      float sum = part[0];
#pragma unroll
      for (int w = 1; w < kParts; ++w) sum += part[w];
      all = r == 0 ? sum : all + sum;
    }
    return all;
  };
  for (int i = threadIdx.x; i < live * width; i += kThreads) {
    const int64_t at = output_at(i);
    if (at < 0) continue;
    const int token = i / width, o = i % width, of_tiles = gated ? o / 16 * 32 + o % 16 : o;
    if (p.kind == DenseOut::add)
      out[at] = __float2bfloat16_rn((i < kThreads ? before : __bfloat162float(out[at])) + total(token, of_tiles));
    else
      put(p, at, total(token, of_tiles), gated ? total(token, of_tiles + 16) : 0.0f);
  }
}

template <int kGroups, int kTiles, int kWarps, int kStages>
void launch(cudaStream_t stream, const Product& product) {
  const int shared = kWarps * kStages * kFewStage<kGroups, kTiles> + product.ranks * kParts * kTiles * kGroups * kWarp * 16;
  const auto kernel = few_kernel<kGroups, kTiles, kWarps, kStages>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "few_kernel");
  launch_overlapping("few_kernel", kernel, dim3(static_cast<unsigned>(divide_up(product.tiles, kTiles))), kWarps * kWarp,
                     static_cast<size_t>(shared), stream, product);
}

}  // namespace

bool few_rows(cudaStream_t stream, const Product& p, int64_t shared_limit) {
  constexpr int64_t kDeep = 256, kMany = 400;   // K steps; tiles
  constexpr int64_t kShared = 200 << 10;        // what the largest variant takes is less
  if (shared_limit < kShared) return false;
  const bool whole = p.x_rows.stride % 8 == 0 && p.n_in % 32 == 0 && reinterpret_cast<uintptr_t>(p.x) % 16 == 0;
  if (!whole || p.n.most > 2 * kTokens || p.ranks > 4 || p.warp_steps % kStageSteps != 0) return false;
  const bool one = p.n.most <= kTokens;
  const auto run = [&](auto of_one, auto of_two) { one ? of_one(stream, p) : of_two(stream, p); };
  // Tiles of gate and up are a pair. Otherwise a block has two where there are many; with one a block there is room for more
  // stages.
  if (p.kind == DenseOut::swiglu || p.tiles >= kMany) run(launch<1, 2, 8, 4>, launch<2, 2, 8, 4>);
  else if (p.tiles <= 144 && p.steps >= kDeep) run(launch<1, 1, 16, 6>, launch<2, 1, 16, 5>);
  else run(launch<1, 1, 16, 4>, launch<2, 1, 16, 4>);
  return true;
}

}  // namespace kdt::cuda
