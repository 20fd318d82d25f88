// The fold of latent attention on sm_90a for up to eight queries of an item, of 512 + 64 dims: keys or values are the 64 rows of
// wgmma and queries its columns, as in latent_fold.cuh, whose bits it has. Blocks, what brings queries and keys, and the barriers are
// those of latent_wide.cuh, but one warpgroup scores and weighs every tile, and the other adds their values meanwhile.
#pragma once

#include "cuda/latent_wide.cuh"

namespace kdt::cuda {

constexpr int kFewColumns = 8;

// Of eight rows of queries in every group of 64 dims the place of the next rows is free: weights of the slots' tiles, bf16 [8][64].
__device__ inline SharedAddress few_weights(const WideMemory& memory, int slot) { return memory.queries() + (slot + 1) * 1024; }

// The warpgroup that scores. A warp has 16 keys of a tile, a lane two columns.
__device__ inline void score_few(const MlaFold& p, const WideMemory& memory, WideShared& shared) {
  constexpr int kBarrier = 3;
  const int warp = threadIdx.x % kGroupThreads / kWarp, lane = threadIdx.x % kWarp, column = lane % 4 * 2;
  int used[2] = {}, turn = 0;
  for (int number = 0;; ++number) {
    barrier_wait(&shared.queries_full, number % 2);
    const int n_tiles = shared.n_tiles;
    if (n_tiles == kDone) return;
    const int2 end = *reinterpret_cast<const int2*>(&shared.end[column]);
    float2 most = make_float2(-INFINITY, -INFINITY);
    int first = shared.begin + warp * 16 + lane / 4;
    for (int t = 0; t < n_tiles; ++t, first += kTile) {
      const int slot = t % 2;
      barrier_wait(&shared.full[slot], (slot == 0 ? used[0] : used[1]) % 2);
      used[0] += slot == 0, used[1] += slot;
      float s[4] = {};
      wgmma_begin(s);
      wgmma_fence();
      const uint64_t key = wgmma_operand(memory.slot(slot)), query = wgmma_operand(memory.queries());
#pragma unroll 1
      for (int at = 0; at < kDimGroups * (kGroupBytes >> 4); at += kGroupBytes >> 4)
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma<false>(s, key + at + step * 2, query + at + step * 2);   // 32 bytes a step
      wgmma_commit();
      wgmma_wait();
      wgmma_begin(s);
      leave(&shared.empty[slot]);
      if (t + 1 == n_tiles) leave(&shared.queries_empty);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[i] = first + i / 2 * 8 < (i % 2 == 0 ? end.x : end.y) ? __fmul_rn(s[i], p.scale) : -INFINITY;
      float2 highest = make_float2(fmaxf(s[0], s[2]), fmaxf(s[1], s[3]));
#pragma unroll
      for (int step = 4; step < kWarp; step *= 2) {
        highest.x = fmaxf(highest.x, __shfl_xor_sync(0xffffffffu, highest.x, step));
        highest.y = fmaxf(highest.y, __shfl_xor_sync(0xffffffffu, highest.y, step));
      }
      turn ^= 1;
      auto* top = reinterpret_cast<float2*>(shared.l[turn][1]);   // [warps][pairs of columns]
      if (lane < 4) top[warp * 4 + lane] = highest;
      meet(kBarrier, kGroupThreads);
      const float2 before = most;
#pragma unroll
      for (int k = 0; k < kKeyGroups; ++k) {
        const float2 of = top[k * 4 + lane % 4];
        most.x = fmaxf(most.x, of.x), most.y = fmaxf(most.y, of.y);
      }
      // Nothing seen yet: weights are 2^-inf, not NaN.
      const float base[2] = {most.x == -INFINITY ? 0.0f : most.x, most.y == -INFINITY ? 0.0f : most.y};
      if (warp == 0 && lane < 4) {
        shared.most_keep[slot][column] = make_float2(most.x, before.x == most.x ? 1.0f : exp2_fast(before.x - most.x));
        shared.most_keep[slot][column + 1] = make_float2(most.y, before.y == most.y ? 1.0f : exp2_fast(before.y - most.y));
      }
      uint32_t of_keys[2];                              // eight keys each
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const __nv_bfloat162 two = __floats2bfloat162_rn(exp2_fast(s[2 * i] - base[0]), exp2_fast(s[2 * i + 1] - base[1]));
        of_keys[i] = *reinterpret_cast<const uint32_t*>(&two);
      }
      store_transposed(chunk_at(few_weights(memory, slot), lane % 8, kTile * 2, warp * 2 + lane / 8 % 2), of_keys[0], of_keys[1]);
      fence_shared();
      leave(&shared.scored[slot]);
    }
  }
}

// The warpgroup that adds values: a warp has 16 of every 64 dims, a lane two columns; warp 0 has the sums of weights.
__device__ inline void add_few(const MlaFold& p, const WideMemory& memory, WideShared& shared) {
  constexpr int kBarrier = 1, kTiles = kWideValueTiles / 4;   // of 64 dims
  const int warp = threadIdx.x % kGroupThreads / kWarp, lane = threadIdx.x % kWarp, c = lane % 4 * 2;
  int used[2] = {};
  for (int number = 0;; ++number) {
    barrier_wait(&shared.queries_full, number % 2);
    const int n_tiles = shared.n_tiles, segment = shared.segment;
    if (n_tiles == kDone) return;
    const int2 column = *reinterpret_cast<const int2*>(&shared.column[c]);
    leave(&shared.queries_empty);
    float o[kTiles][4] = {}, l[2][4] = {};              // l: of even and of odd tiles
    float2 most = make_float2(0.0f, 0.0f);
    for (int t = 0; t < n_tiles; ++t) {
      const int slot = t % 2, phase = (slot == 0 ? used[0] : used[1]) % 2;
      used[0] += slot == 0, used[1] += slot;
      barrier_wait(&shared.full[slot], phase);
      barrier_wait(&shared.scored[slot], phase);
      const float4 of_two = *reinterpret_cast<const float4*>(&shared.most_keep[slot][c]);
      const float2 keep = make_float2(of_two.y, of_two.w);
      most = make_float2(of_two.x, of_two.z);
      if (__any_sync(0xffffffffu, keep.x != 1.0f || keep.y != 1.0f)) {   // times 1 changes no bit
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) o[m][i] = __fmul_rn(o[m][i], i % 2 == 0 ? keep.x : keep.y);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float factor = i % 2 == 0 ? keep.x : keep.y;
          l[0][i] = __fmul_rn(l[0][i], factor), l[1][i] = __fmul_rn(l[1][i], factor);
        }
      }
#pragma unroll
      for (int m = 0; m < kTiles; ++m) wgmma_begin(o[m]);
      wgmma_fence();
      const uint64_t value = wgmma_operand(memory.slot(slot)), weight = wgmma_operand(few_weights(memory, slot));
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int k = 0; k < kKeyGroups; ++k)            // 16 rows of keys; 32 bytes of weights
          wgmma<true>(o[m], value + m * (kGroupBytes >> 4) + k * (16 * 128 >> 4), weight + k * 2);
      wgmma_commit();
      if (warp == 0) {
        const uint32_t one = lane < 4 ? 0x3f803f80u : 0;   // a row of ones, then rows of zeros
        float sum[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = slot == 0 ? l[0][i] : l[1][i];
#pragma unroll
        for (int k = 0; k < kKeyGroups; k += 2) {
          uint32_t b[4];
          load_matrices(b, chunk_at(few_weights(memory, slot), lane % 8, kTile * 2, k * 2 + lane / 8));
          mma(sum, {one, 0, one, 0}, {b[0], b[1]});
          mma(sum, {one, 0, one, 0}, {b[2], b[3]});
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) (slot == 0 ? l[0][i] : l[1][i]) = sum[i];
      }
      wgmma_wait();
#pragma unroll
      for (int m = 0; m < kTiles; ++m) wgmma_begin(o[m]);
      leave(&shared.empty[slot]);
    }

    float* sums = shared.l[number % 2][0];              // [1] is for scores
    if (warp == 0 && lane < 4) {
      const float2 both = make_float2(__fadd_rn(l[0][0], l[1][0]), __fadd_rn(l[0][1], l[1][1]));
      *reinterpret_cast<float2*>(&sums[c]) = both;
      if (column.x >= 0) p.extremes[static_cast<int64_t>(column.x) * p.n_segments + segment] = make_float2(most.x, both.x);
      if (column.y >= 0) p.extremes[static_cast<int64_t>(column.y) * p.n_segments + segment] = make_float2(most.y, both.y);
    }
    meet(kBarrier, kGroupThreads);
    // Two lanes have dims d and d + 1 of the same query, and eight below. One stores tile m, the other m + 1.
    const float2 both = *reinterpret_cast<const float2*>(&sums[c]);
    const bool odd = lane / 4 % 2 == 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int of_query = i == 0 ? column.x : column.y;
      if (of_query < 0) continue;
      const float by = __frcp_rn(i == 0 ? both.x : both.y);
      uint16_t* to = p.means + (static_cast<int64_t>(of_query) * p.n_segments + segment) * kMaxValueDims;
      const unsigned lanes = 0x11111111u << lane % 4;   // of the query
#pragma unroll
      for (int m = 0; m < kTiles; m += 2) {
        const float2 mine = odd ? make_float2(o[m + 1][i], o[m + 1][i + 2]) : make_float2(o[m][i], o[m][i + 2]);
        const float2 give = odd ? make_float2(o[m][i], o[m][i + 2]) : make_float2(o[m + 1][i], o[m + 1][i + 2]);
        const float2 got = make_float2(__shfl_xor_sync(lanes, give.x, 4), __shfl_xor_sync(lanes, give.y, 4));
        const float2 even = odd ? got : mine, after = odd ? mine : got;
        const int tile = (m + odd) * 4 + warp;          // of 16 dims
        *reinterpret_cast<uint2*>(to + tile / 2 * 32 + lane / 8 * 8 + tile % 2 * 4) =
            make_uint2(two_halves(__fmul_rn(even.x, by), __fmul_rn(after.x, by)),
                       two_halves(__fmul_rn(even.y, by), __fmul_rn(after.y, by)));
      }
    }
  }
}

__global__ void __launch_bounds__(kWideThreads, 1) few_fold_kernel(const __grid_constant__ WideFold wide) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) std::byte memory_bytes[];
  const WideMemory memory{shared_address(memory_bytes)};
  auto& shared = *reinterpret_cast<WideShared*>(memory_bytes + 3 * kSlotBytes);
  begin_turns(shared);
  const int group = warpgroup();
  if (group == 0) bring(wide, memory, shared);
  else if (group == 1) score_few(wide.fold, memory, shared);
  else add_few(wide.fold, memory, shared);
#endif
}

}  // namespace kdt::cuda
