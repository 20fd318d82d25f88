// The fold of latent attention: keys are values too, and wgmma takes both from the same tile in shared memory where there is
// one (sm_90a). Elsewhere it is that of fold.cuh. Sums, and their order, are the same.
//
// With wgmma a tile of rows lies in groups of 64 dims: bf16 [groups][rows][64], chunks swapped about as in fold.cuh. So a
// group of keys is an operand with rows along K (scores: K are dims), and one with rows across it (values: K are keys).
// Weights are bf16 [64 queries][64 keys].
#pragma once

#include "cuda/fold.cuh"
#include "cuda/wgmma.cuh"

namespace kdt::cuda {

// Where a chunk of 16 bytes of a row lies, of `rows` rows.
__device__ inline SharedAddress latent_chunk(SharedAddress memory, int rows, int row_bytes, int row, int chunk) {
  if constexpr (kHasWgmma)
    return memory + chunk / 8 * rows * 128 + row * 128 + (((chunk ^ row) % 8) << 4);
  else
    return chunk_at(memory, row, row_bytes, chunk);
}

// From a chunk of a row to the eighth after it.
__device__ constexpr int latent_group_bytes(int rows) { return kHasWgmma ? rows * 128 : 128; }

// Of element e of a segment's sums: the K step of 16 dims it belongs to, and which of them it is.
struct SumPlace {
  int step, within;
};
template <int kM>
__device__ constexpr SumPlace place_of_sum(int e) {
  if constexpr (kHasWgmma && kM == 4) return {e / 32 * 2 + e % 8 / 4, e % 4 / 2 * 8 + e % 32 / 8 * 2 + e % 2};
  const int dim = dim_of_sum<kM>(e);
  return {dim / 16, dim % 16};
}

// As Fold: a warpgroup holds kM tiles of 64 value dims. Queries see from the first key on (FoldShared::begin is 0). Sums of
// weights are taken over even tiles and over odd ones.
template <int kQ, int kM>
class WgmmaFold {
 public:
  __device__ void tile(const FoldMemory& memory, FoldShared& shared, SharedAddress keys, int first, float scale, int side) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int keys_of = warp % kKeyGroups * 16, first_tile = warp / kKeyGroups * kHalf;
    const int group = warpgroup();
    const bool scoring = group * kHalf < kQ;
    if (scoring) {
      float s[kHalf * 4] = {};
      wgmma_begin(s);
      int dims = 0;
      do {
        wgmma_fence();
        const uint64_t key = wgmma_operand(keys + dims * (kTile * 128));
        const uint64_t query = wgmma_operand(memory.queries + (dims * kQ + group * kHalf) * 1024);
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma<false>(s, key + step * 2, query + step * 2);   // 32 bytes a step
        wgmma_commit();
      } while (++dims < memory.dim_groups);
      wgmma_wait();
      wgmma_begin(s);
#pragma unroll
      for (int c = 0; c < kHalf; ++c) {
        const int column = (first_tile + c) * 8 + lane % 4 * 2;
        const int2 end = *reinterpret_cast<const int2*>(&shared.end[column]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int position = first + keys_of + lane / 4 + i / 2 * 8;
          const float scaled = __fmul_rn(s[c * 4 + i], scale);
          s[c * 4 + i] = position < (i % 2 == 0 ? end.x : end.y) ? scaled : -INFINITY;
        }
        show_top(shared, warp % kKeyGroups, column, fmaxf(s[c * 4], s[c * 4 + 2]), fmaxf(s[c * 4 + 1], s[c * 4 + 3]));
      }
      __syncthreads();
      weigh(memory, shared, keys_of, first_tile, side, s);
    } else {
      __syncthreads();
    }
    fence_shared();
    __syncthreads();
    add_values(memory, shared, keys, group, side);
  }

  __device__ void store_means(const FoldMemory& memory, FoldShared& shared, int side, uint16_t* means, float2* extremes,
                              int n_segments, int segment) const {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (warp < kQ && lane < 4)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int c = warp * 8 + lane * 2 + i, column = shared.column[c];
        const float l = __fadd_rn(l_[0][i], l_[1][i]);
        shared.keep[c] = __frcp_rn(l);
        if (column >= 0) extremes[static_cast<int64_t>(column) * n_segments + segment] = make_float2(shared.most[side][c], l);
      }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kQ; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int c = n * 8 + lane % 4 * 2 + i, column = shared.column[c], e = n * 4 + i;
        if (column < 0) continue;
        const float by = shared.keep[c];
        uint16_t* to = means + (static_cast<int64_t>(column) * n_segments + segment) * (128 * kM);
        if constexpr (kM == 1) {
          if (has_tile(memory, warp / 4, 0))
            *reinterpret_cast<uint32_t*>(to + warp * 16 + lane / 4 * 2) =
                two_halves(__fmul_rn(o_[0][e], by), __fmul_rn(o_[0][e + 2], by));
        } else {
          // Two lanes have dims d and d + 1 of the same query, and eight below. One stores tile m, the other m + 1.
          const bool odd = lane / 4 % 2 == 1;
#pragma unroll
          for (int m = 0; m < kM; m += 2) {
            const float2 mine = odd ? make_float2(o_[m + 1][e], o_[m + 1][e + 2]) : make_float2(o_[m][e], o_[m][e + 2]);
            const float2 give = odd ? make_float2(o_[m][e], o_[m][e + 2]) : make_float2(o_[m + 1][e], o_[m + 1][e + 2]);
            const unsigned lanes = kEight << lane % 4;
            const float2 got = make_float2(__shfl_xor_sync(lanes, give.x, 4), __shfl_xor_sync(lanes, give.y, 4));
            const float2 even = odd ? got : mine, after = odd ? mine : got;
            const int tile = (warp / 4 * kM + m + odd) * 4 + warp % 4;   // of 16 dims
            if (has_tile(memory, warp / 4, m + odd))
              *reinterpret_cast<uint2*>(to + tile / 2 * 32 + lane / 8 * 8 + tile % 2 * 4) =
                  make_uint2(two_halves(__fmul_rn(even.x, by), __fmul_rn(after.x, by)),
                             two_halves(__fmul_rn(even.y, by), __fmul_rn(after.y, by)));
          }
        }
      }
  }

 private:
  static constexpr int kHalf = kQ > 1 ? kQ / 2 : 1;   // tiles of queries that a warpgroup scores
  static constexpr unsigned kEight = 0x11111111u;     // the lanes of a query

  // Whether a warpgroup's m-th tile of 64 dims has any.
  __device__ static bool has_tile(const FoldMemory& memory, int group, int m) {
    return (group * kM + m) * 4 < memory.value_tiles;
  }

  __device__ static void weigh(const FoldMemory& memory, FoldShared& shared, int keys_of, int first_tile, int side,
                               const float (&s)[kHalf * 4]) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int c = 0; c < kHalf; ++c) {
      const int column = (first_tile + c) * 8 + lane % 4 * 2;
      const float2 before = *reinterpret_cast<const float2*>(&shared.most[side][column]);
      float2 most = before;
#pragma unroll
      for (int k = 0; k < kKeyGroups; ++k) {
        const float2 top = *reinterpret_cast<const float2*>(&shared.top[k][column]);
        most.x = fmaxf(most.x, top.x), most.y = fmaxf(most.y, top.y);
      }
      // Nothing seen yet: weights are 2^-inf, not NaN.
      const float base[2] = {most.x == -INFINITY ? 0.0f : most.x, most.y == -INFINITY ? 0.0f : most.y};
      if (keys_of == 0 && lane < 4) {
        *reinterpret_cast<float2*>(&shared.most[1 - side][column]) = most;
        *reinterpret_cast<float2*>(&shared.keep[column]) =
            make_float2(before.x == most.x ? 1.0f : exp2_fast(before.x - most.x),
                        before.y == most.y ? 1.0f : exp2_fast(before.y - most.y));
      }
      uint32_t of_keys[2];                            // eight keys each
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const __nv_bfloat162 p = __floats2bfloat162_rn(exp2_fast(s[c * 4 + 2 * i] - base[0]),
                                                       exp2_fast(s[c * 4 + 2 * i + 1] - base[1]));
        of_keys[i] = *reinterpret_cast<const uint32_t*>(&p);
      }
      store_transposed(chunk_at(memory.weights, (first_tile + c) * 8 + lane % 8, kTile * 2, keys_of / 8 + lane / 8 % 2),
                       of_keys[0], of_keys[1]);
    }
  }

  __device__ void add_values(const FoldMemory& memory, const FoldShared& shared, SharedAddress values, int group,
                             int side) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    rescale(shared);
#pragma unroll
    for (int m = 0; m < kM; ++m) wgmma_begin(o_[m]);
    wgmma_fence();
    const uint64_t weight = wgmma_operand(memory.weights);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      // A tile that has no dims takes some others': nothing may branch here, and its sums are not stored.
      const int tile = has_tile(memory, group, m) ? group * kM + m : 0;
      const uint64_t value = wgmma_operand(values + tile * (kTile * 128));
#pragma unroll
      for (int k = 0; k < kKeyGroups; ++k)             // 16 rows of keys; 32 bytes of weights
        wgmma<true>(o_[m], value + k * (16 * 128 >> 4), weight + k * 2);
    }
    wgmma_commit();
    if (warp < kQ) {
      const uint32_t one = lane < 4 ? 0x3f803f80u : 0;   // a row of ones, then rows of zeros
      float sum[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = side == 0 ? l_[0][i] : l_[1][i];
#pragma unroll
      for (int k = 0; k < kKeyGroups; k += 2) {
        uint32_t b[4];
        load_matrices(b, chunk_at(memory.weights, warp * 8 + lane % 8, kTile * 2, k * 2 + lane / 8));
        mma(sum, {one, 0, one, 0}, {b[0], b[1]});
        mma(sum, {one, 0, one, 0}, {b[2], b[3]});
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) (side == 0 ? l_[0][i] : l_[1][i]) = sum[i];
    }
    wgmma_wait();
#pragma unroll
    for (int m = 0; m < kM; ++m) wgmma_begin(o_[m]);
  }

  __device__ void rescale(const FoldShared& shared) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    float2 keep[kQ];
    bool changed = false;
#pragma unroll
    for (int n = 0; n < kQ; ++n) {
      keep[n] = *reinterpret_cast<const float2*>(&shared.keep[n * 8 + lane % 4 * 2]);
      changed = changed || keep[n].x != 1.0f || keep[n].y != 1.0f;
    }
    if (!__any_sync(0xffffffffu, changed)) return;     // times 1 changes no bit
#pragma unroll
    for (int n = 0; n < kQ; ++n) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) o_[m][n * 4 + i] = __fmul_rn(o_[m][n * 4 + i], i % 2 == 0 ? keep[n].x : keep[n].y);
      if (warp == n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float factor = i % 2 == 0 ? keep[n].x : keep[n].y;
          l_[0][i] = __fmul_rn(l_[0][i], factor), l_[1][i] = __fmul_rn(l_[1][i], factor);
        }
    }
  }

  float o_[kM][kQ * 4] = {};
  float l_[2][4] = {};   // of even and odd tiles, of the queries of tile `warp`, in lanes 0 to 3
};

}  // namespace kdt::cuda
