// Attention of up to 64 queries over tiles of 64 keys, folded one after the other into a running softmax, and the merge of
// the sums of segments. Both attentions are made of these. A query's result does not depend on who else is in the block.
//
// Keys are on the 16-row side of mma.sync m16n8k16, queries are its columns:
//   scores    S  = K Q^T   one sum a (key, query), over dims ascending by 16
//   weights   P  = bf16(2^(S · scale - m)), m the largest of the query's scores so far, in tiles of 64 keys
//   values    O  = O · keep + V^T P, over keys ascending by 16; keep = 2^(m before - m)
//   their sum l  = l · keep + 1^T P, by the same instruction, so weights are rounded alike in both
// A key that a query does not see has weight 0 and adds nothing; its place in shared memory must be finite.
//
// Rows in shared memory are multiples of 128 bytes; their 16-byte chunks c are swapped about, c ^ (row % 8), so that eight
// rows of a matrix are in different banks.
#pragma once

#include <string>

#include "base/error.h"
#include "cuda/fragments.cuh"
#include "cuda/latent.cuh"

namespace kdt::cuda {

constexpr int kFoldWarps = 8, kFoldThreads = kFoldWarps * kWarp;
constexpr int kColumns = 64;            // queries of a block, at most
constexpr int kKeyGroups = kTile / 16;
constexpr int kWeightsBytes = kTile * kColumns * 2;   // bf16 [64 keys][64 queries]
constexpr double kLog2E = 1.4426950408889634;   // scores are scaled into powers of 2

// What the threads of a block tell one another.
struct FoldShared {
  float top[kKeyGroups][kColumns];      // the largest scores of 16 keys
  float most[2][kColumns];              // m, before and after a tile
  float keep[kColumns];
  int32_t begin[kColumns], end[kColumns];   // positions that a query sees of what is folded: none where end <= begin
  int32_t column[kColumns];             // where the sums of a query go; -1: nowhere
  int32_t item[8];
};

struct FoldMemory {
  SharedAddress queries;                // [columns][dims]
  SharedAddress weights;
  int key_row, value_row;               // bytes
  int dim_groups;                       // of 64: of keys and queries
  int value_tiles;                      // of 16 dims
};

__device__ inline SharedAddress chunk_at(SharedAddress memory, int row, int row_bytes, int chunk) {
  return memory + row * row_bytes + ((chunk ^ (row % 8)) << 4);
}

// Where element e of a segment's sums belongs: lanes store what they hold side by side.
template <int kM>
__device__ constexpr int dim_of_sum(int e) {
  return kM == 1 ? e / 16 * 16 + e % 2 * 8 + e % 16 / 2 : e / 32 * 32 + e % 4 * 8 + e % 32 / 4;
}

// The largest of a warp's scores of queries `column` and the next: of a lane's keys `of_column` and `of_next`.
__device__ inline void show_top(FoldShared& shared, int key_group, int column, float of_column, float of_next) {
  float top[2] = {of_column, of_next};
#pragma unroll
  for (int step = 4; step < kWarp; step *= 2)
#pragma unroll
    for (int i = 0; i < 2; ++i) top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], step));
  if (threadIdx.x % kWarp < 4) *reinterpret_cast<float2*>(&shared.top[key_group][column]) = make_float2(top[0], top[1]);
}

// The state of kQ tiles of 8 queries; a warp holds kM tiles of 16 value dims of all of them.
template <int kQ, int kM>
class Fold {
 public:
  // Folds a tile whose keys have positions from `first` on. m is read from most[side] and written to most[1 - side]. Threads
  // must meet before (the tile is there) and after (its memory is free).
  __device__ void tile(const FoldMemory& memory, FoldShared& shared, SharedAddress keys, SharedAddress values,
                       int first, float scale, int side) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int keys_of = warp % kKeyGroups * 16, first_tile = warp / kKeyGroups * kHalf;
    const bool scoring = first_tile < kQ;
    float s[kHalf][4] = {};
    if (scoring) {
      score(memory, keys, keys_of, first_tile, s);
#pragma unroll
      for (int c = 0; c < kHalf; ++c) {
        const int column = (first_tile + c) * 8 + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int position = first + keys_of + lane / 4 + i / 2 * 8;
          const bool seen = position >= shared.begin[column + i % 2] && position < shared.end[column + i % 2];
          s[c][i] = seen ? __fmul_rn(s[c][i], scale) : -INFINITY;
        }
        show_top(shared, warp % kKeyGroups, column, fmaxf(s[c][0], s[c][2]), fmaxf(s[c][1], s[c][3]));
      }
    }
    __syncthreads();
    if (scoring) weigh(memory, shared, keys_of, first_tile, side, s);
    __syncthreads();
    add_values(memory, shared, values);
  }

  // Writes the sums of the queries that have a column: o [width] and (m, l), of segment `segment` of `n_segments`.
  __device__ void store(const FoldMemory& memory, const FoldShared& shared, int side, float* sums, float2* extremes,
                        int n_segments, int segment) const {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
    for (int n = 0; n < kQ; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = shared.column[n * 8 + lane % 4 * 2 + i];
        if (column < 0) continue;
        const int64_t at = static_cast<int64_t>(column) * n_segments + segment;
        float* to = sums + at * (128 * kM) + warp * (16 * kM);
        if constexpr (kM == 1) {
          if (warp < memory.value_tiles)
            *reinterpret_cast<float2*>(to + lane / 4 * 2) = make_float2(o_[0][n][i], o_[0][n][i + 2]);
        } else {
#pragma unroll
          for (int m = 0; m < kM; m += 2)
            if (warp * kM + m < memory.value_tiles)
              *reinterpret_cast<float4*>(to + m * 16 + lane / 4 * 4) =
                  make_float4(o_[m][n][i], o_[m][n][i + 2], o_[m + 1][n][i], o_[m + 1][n][i + 2]);
        }
        if (warp == n && lane < 4) extremes[at] = make_float2(shared.most[side][n * 8 + lane * 2 + i], l_[i]);
      }
  }

  // The same with means, o / l, as fp16 [width] in place of o. All threads call it, after they have met.
  __device__ void store_means(const FoldMemory& memory, FoldShared& shared, int side, uint16_t* means, float2* extremes,
                              int n_segments, int segment) const {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (warp < kQ && lane < 4)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int c = warp * 8 + lane * 2 + i, column = shared.column[c];
        shared.keep[c] = __frcp_rn(l_[i]);
        if (column >= 0) extremes[static_cast<int64_t>(column) * n_segments + segment] = make_float2(shared.most[side][c], l_[i]);
      }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kQ; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int c = n * 8 + lane % 4 * 2 + i, column = shared.column[c];
        if (column < 0) continue;
        const float by = shared.keep[c];
        uint16_t* to = means + (static_cast<int64_t>(column) * n_segments + segment) * (128 * kM) + warp * (16 * kM);
        const auto two = [&](int m) { return two_halves(__fmul_rn(o_[m][n][i], by), __fmul_rn(o_[m][n][i + 2], by)); };
        if constexpr (kM == 1) {
          if (warp < memory.value_tiles) *reinterpret_cast<uint32_t*>(to + lane / 4 * 2) = two(0);
        } else {
#pragma unroll
          for (int m = 0; m < kM; m += 2)
            if (warp * kM + m < memory.value_tiles)
              *reinterpret_cast<uint2*>(to + m * 16 + lane / 4 * 4) = make_uint2(two(m), two(m + 1));
        }
      }
  }

 private:
  static constexpr int kHalf = kQ > 1 ? kQ / 2 : 1;   // tiles of queries that a warp scores, for 16 keys

  __device__ static void score(const FoldMemory& memory, SharedAddress keys, int keys_of, int first_tile,
                               float (&s)[kHalf][4]) {
    const int lane = threadIdx.x % kWarp, swap = lane % 8;
    const SharedAddress key_row = keys + (keys_of + lane % 16) * memory.key_row;
    const SharedAddress query_row =
        memory.queries + (first_tile * 8 + (kHalf > 1 ? lane / 16 * 8 : 0) + lane % 8) * memory.key_row;
    for (int group = 0; group < memory.dim_groups; ++group) {
      const SharedAddress key_group = key_row + group * 128, query_group = query_row + group * 128;
#pragma unroll
      for (int step = 0; step < 4; step += 2) {
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) load_matrices(a[i], key_group + (((step * 2 + i * 2 + lane / 16) ^ swap) << 4));
        if constexpr (kHalf == 1) {
          uint32_t b[4];                // of two steps
          load_matrices(b, query_group + (((step * 2 + lane / 8) ^ swap) << 4));
          mma(s[0], a[0], {b[0], b[1]});
          mma(s[0], a[1], {b[2], b[3]});
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int c = 0; c < kHalf; c += 2) {
              uint32_t b[4];            // of two tiles
              const SharedAddress of_tiles = query_group + c * 8 * memory.key_row;
              load_matrices(b, of_tiles + (((step * 2 + i * 2 + lane / 8 % 2) ^ swap) << 4));
              mma(s[c], a[i], {b[0], b[1]});
              mma(s[c + 1], a[i], {b[2], b[3]});
            }
        }
      }
    }
  }

  __device__ static void weigh(const FoldMemory& memory, FoldShared& shared, int keys_of, int first_tile, int side,
                               const float (&s)[kHalf][4]) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int c = 0; c < kHalf; ++c) {
      const int column = (first_tile + c) * 8 + lane % 4 * 2;
      float base[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float before = shared.most[side][column + i];
        float most = before;
#pragma unroll
        for (int k = 0; k < kKeyGroups; ++k) most = fmaxf(most, shared.top[k][column + i]);
        base[i] = most == -INFINITY ? 0.0f : most;    // nothing seen yet: weights are 2^-inf, not NaN
        if (keys_of == 0 && lane < 4) {
          shared.most[1 - side][column + i] = most;
          shared.keep[column + i] = before == most ? 1.0f : exp2_fast(before - most);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = keys_of + lane / 4 + i * 8;
        const __nv_bfloat162 p =
            __floats2bfloat162_rn(exp2_fast(s[c][2 * i] - base[0]), exp2_fast(s[c][2 * i + 1] - base[1]));
        store_shared(chunk_at(memory.weights, key, kColumns * 2, first_tile + c) + lane % 4 * 4,
                     *reinterpret_cast<const uint32_t*>(&p));
      }
    }
  }

  __device__ void add_values(const FoldMemory& memory, const FoldShared& shared, SharedAddress values) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    rescale(shared);
    if (warp >= kQ && warp * kM >= memory.value_tiles) return;
    const uint32_t one = lane < 4 ? 0x3f803f80u : 0;   // a row of ones, then rows of zeros
#pragma unroll
    for (int k = 0; k < kKeyGroups; ++k) {
      const int key = k * 16 + lane % 8;
      const SharedAddress weight_row = memory.weights + (key + lane / 8 % 2 * 8) * (kColumns * 2);
      if (warp < kQ) {
        uint32_t b[2];
        load_transposed(b, weight_row + ((warp ^ (lane % 8)) << 4));
        mma(l_, {one, 0, one, 0}, b);
      }
      uint32_t b[kQ][2];
      if constexpr (kQ == 1) {
        load_transposed(b[0], weight_row + ((lane % 8) << 4));
      } else {
#pragma unroll
        for (int n = 0; n < kQ; n += 2) {
          uint32_t of_two[4];
          load_transposed(of_two, weight_row + (((n + lane / 16) ^ (lane % 8)) << 4));
          b[n][0] = of_two[0], b[n][1] = of_two[1], b[n + 1][0] = of_two[2], b[n + 1][1] = of_two[3];
        }
      }
      const SharedAddress value_row = values + (key + lane / 16 * 8) * memory.value_row;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const int tile = warp * kM + m;
        if (tile >= memory.value_tiles) break;
        uint32_t a[4];
        load_transposed(a, value_row + (((tile * 2 + lane / 8 % 2) ^ (lane % 8)) << 4));
#pragma unroll
        for (int n = 0; n < kQ; ++n) mma(o_[m][n], a, b[n]);
      }
    }
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
        for (int i = 0; i < 4; ++i) o_[m][n][i] = __fmul_rn(o_[m][n][i], i % 2 == 0 ? keep[n].x : keep[n].y);
      if (warp == n)
#pragma unroll
        for (int i = 0; i < 4; ++i) l_[i] = __fmul_rn(l_[i], i % 2 == 0 ? keep[n].x : keep[n].y);
    }
  }

  float o_[kM][kQ][4] = {};
  float l_[4] = {};      // of the queries of tile `warp`, in lanes 0 to 3
};

// Copies rows of `chunks` 16-byte chunks, asynchronously, to a tile of kTile rows. source(r, i) is where row r, the warp's
// i-th, lies; null: it becomes zeros. All lanes call it. `any` is an address that may be read.
template <class F>
__device__ void copy_tile(SharedAddress to, int row_bytes, int chunks, const void* any, const F& source) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < kTile / kFoldWarps; ++i) {
    const int row = warp + i * kFoldWarps;
    const std::byte* from = source(row, i);
    for (int c = lane; c < chunks; c += kWarp)
      cp_async16(chunk_at(to, row, row_bytes, c), from ? from + c * 16 : any, from != nullptr);
  }
}

// The same of the first n_columns queries, a multiple of 8.
template <class F>
__device__ void copy_queries(SharedAddress to, int row_bytes, int n_columns, const void* any, const F& source) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int column = warp; column < n_columns; column += kFoldWarps) {
    const std::byte* from = source(column);
    for (int c = lane; c < row_bytes / 16; c += kWarp)
      cp_async16(chunk_at(to, column, row_bytes, c), from ? from + c * 16 : any, from != nullptr);
  }
}

// Zeros behind the `chunks` chunks that copy_tile writes, once: of `rows` rows, a multiple of 8.
__device__ inline void zero_padding(SharedAddress to, int rows, int row_bytes, int chunks) {
  for (int row = threadIdx.x; row < rows; row += kFoldThreads)
    for (int c = chunks; c < row_bytes / 16; ++c) store_zeros(chunk_at(to, row, row_bytes, c));
}

// Before the first tile: the maxima, and what queries see, are to be set by all threads, which then meet.
__device__ inline void begin_fold(FoldShared& shared) {
  if (threadIdx.x < kColumns) shared.most[0][threadIdx.x] = -INFINITY;
}

// Merges the sums of segments [begin, end) of one query into bf16 [value_dims], then zeros up to `padded`: with M the
// largest m, w = 2^(m - M): Σ w o / Σ w l. Segments go by number modulo 4 into four sums, ascending in each, then
// (0 + 1) + (2 + 3). Threads: kMergeThreads. Shared: merge_bytes(). sums and extremes are those of segment 0.
constexpr int kMergeGroups = 4;
template <int kM>
constexpr int kMergeThreads = 128 * kM;
template <int kM>
constexpr int64_t merge_bytes(int64_t n_segments) {
  return kMergeGroups * (32 * kM + 1) * 16 + n_segments * 8;
}

template <int kM>
__device__ void merge_segments(const float* sums, const float2* extremes, int begin, int end, int value_dims,
                               int padded, bf16* out) {
  constexpr int kLanes = 32 * kM;       // threads of a group: four floats each
  extern __shared__ __align__(16) std::byte shared[];
  auto* of_groups = reinterpret_cast<float4*>(shared);                     // [groups][lanes + 1]
  auto* weight = reinterpret_cast<float2*>(of_groups + kMergeGroups * (kLanes + 1));   // [segments] w, l
  const int thread = threadIdx.x;

  float most = -INFINITY;
  for (int s = begin + thread; s < end; s += kMergeThreads<kM>) {
    weight[s - begin] = extremes[s];
    most = fmaxf(most, weight[s - begin].x);
  }
  most = warp_max(most);
  auto* of_warps = reinterpret_cast<float*>(of_groups);
  if (thread % kWarp == 0) of_warps[thread / kWarp] = most;
  __syncthreads();
  for (int w = 0; w < kMergeThreads<kM> / kWarp; ++w) most = fmaxf(most, of_warps[w]);
  for (int s = begin + thread; s < end; s += kMergeThreads<kM>)
    weight[s - begin].x = exp2_fast(weight[s - begin].x - most);
  __syncthreads();

  const int group = thread / kLanes, lane = thread % kLanes;
  float4 o = {};
  float l = 0;
  const auto* from = reinterpret_cast<const float4*>(sums) + lane;
  const bool held = dim_of_sum<kM>(lane * 4) < value_dims;     // the least of its dims
#pragma unroll 8
  for (int s = begin + (group - begin % kMergeGroups + kMergeGroups) % kMergeGroups; s < end; s += kMergeGroups) {
    const float2 w = weight[s - begin];
    const float4 v = held ? from[static_cast<int64_t>(s) * kLanes] : float4{};
    l = fmaf(w.x, w.y, l);
    o.x = fmaf(w.x, v.x, o.x), o.y = fmaf(w.x, v.y, o.y), o.z = fmaf(w.x, v.z, o.z), o.w = fmaf(w.x, v.w, o.w);
  }
  of_groups[group * (kLanes + 1) + lane] = o;
  if (lane == 0) of_groups[group * (kLanes + 1) + kLanes].x = l;
  __syncthreads();
  const auto* element = reinterpret_cast<const float*>(of_groups);
  constexpr int kRow = (kLanes + 1) * 4;
  const auto total = [&](int e) {
    return __fadd_rn(__fadd_rn(element[e], element[kRow + e]), __fadd_rn(element[2 * kRow + e], element[3 * kRow + e]));
  };
  const float sum = total(kLanes * 4);
  for (int e = thread; e < kLanes * 4; e += kMergeThreads<kM>) {
    const int dim = dim_of_sum<kM>(e);
    if (dim < value_dims) out[dim] = __float2bfloat16_rn(__fdiv_rn(total(e), sum));
    else if (dim < padded) out[dim] = __float2bfloat16_rn(0.0f);
  }
}

// How much of shared memory a block of queries takes: the ring of tiles, the queries, the weights, FoldShared.
struct FoldShape {
  int columns = 0, stages = 0;
  int64_t bytes = 0;
};

// The first that fits, most work at a time first. tile_bytes: of keys and values. Error(unsupported) when none does.
inline FoldShape fold_shape(int64_t tile_bytes, int64_t query_bytes, int64_t limit) {
  constexpr int kShapes[][2] = {{64, 2}, {32, 2}, {64, 1}, {32, 1}, {16, 1}, {8, 1}};
  constexpr int64_t kOther = kWeightsBytes + static_cast<int64_t>(sizeof(FoldShared));
  for (const auto [columns, stages] : kShapes) {
    const int64_t bytes = stages * tile_bytes + columns * query_bytes + kOther;
    if (bytes <= limit) return {columns, stages, bytes};
  }
  fail(Status::unsupported, "attention", std::to_string(query_bytes / 2) + " dims of a key", "what shared memory holds");
}

}  // namespace kdt::cuda
