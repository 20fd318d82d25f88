// Where keys and values lie, the borders of attention's segments, and what attention keeps in its working memory.
//
// Latent page of one layer:   bf16 [64 tokens][stride], a row: latent [kv_lora] | rotated k_pe [rope] | zeros. The stride is
//                             kv_lora + rope rounded up to 8, so that rows begin on 16-byte borders: 1152 bytes at 512 + 64.
// Latent scratch of a layer:  bf16 [rows of the pass][stride], the same rows.
// Draft page of one layer:    bf16 keys [kv_heads][64][stride], then values [kv_heads][64][stride], the stride head_dim
//                             rounded up to 8; zeros behind head_dim.
#pragma once

#include <algorithm>

#include "cuda/device.cuh"

namespace kdt::cuda {

constexpr int kTile = kPageTokens;      // positions of a tile of keys: of one page

__host__ __device__ constexpr int64_t round_up(int64_t value, int64_t to) { return divide_up(value, to) * to; }

__host__ __device__ constexpr int64_t row_stride(int64_t dims) { return round_up(dims, 8); }

// Elements of a row of queries or keys in working or shared memory: whole groups of 64, zeros behind `dims`.
__host__ __device__ constexpr int64_t padded_dims(int64_t dims) { return round_up(dims, 64); }

// Borders of segments, a function of absolute position alone: every kFine to kFineEnd, every kMiddle to kMiddleEnd, then
// every kCoarse. All are multiples of a tile. A segment is folded by one block: these set how parallel a long context is.
template <int kFine, int kFineEnd, int kMiddle, int kMiddleEnd, int kCoarse>
struct Segments {
  static constexpr int kMiddleAt = kFineEnd / kFine, kCoarseAt = kMiddleAt + (kMiddleEnd - kFineEnd) / kMiddle;
  // The segment of a position.
  static __host__ __device__ constexpr int of(int64_t position) {
    if (position < kFineEnd) return static_cast<int>(position / kFine);
    if (position < kMiddleEnd) return static_cast<int>(kMiddleAt + (position - kFineEnd) / kMiddle);
    return static_cast<int>(kCoarseAt + (position - kMiddleEnd) / kCoarse);
  }
  static __host__ __device__ constexpr int begin(int segment) {
    if (segment < kMiddleAt) return segment * kFine;
    if (segment < kCoarseAt) return kFineEnd + (segment - kMiddleAt) * kMiddle;
    return kMiddleEnd + (segment - kCoarseAt) * kCoarse;
  }
  // Segments that positions [0, end) reach into.
  static __host__ __device__ constexpr int count(int64_t end) { return end > 0 ? of(end - 1) + 1 : 0; }
};
using LatentSegments = Segments<64, 1024, 256, 8192, 512>;
using DraftSegments = Segments<256, 2048, 512, 8192, 2048>;

// A warp of a fold holds one, two or four tiles of 16 value dims: so many dims, and floats of a segment's sums, there are.
constexpr int64_t kSmallValueDims = 128, kMaxValueDims = 512, kMaxDraftDims = 256;

// Attention works on so many rows at a time: what it keeps for each, above all the sums of every segment, is large.
constexpr int64_t kWorkBytes = int64_t{512} << 20;
constexpr int64_t kMaxPassRows = 256, kLeastPassRows = 32;

inline int64_t work_row_bytes(int64_t n_heads, int64_t key_dims, int64_t max_context) {
  const int64_t segments = LatentSegments::count(max_context) + 1;
  static_assert(sizeof(float2) == 8);
  const int64_t width = key_dims <= kSmallValueDims ? kSmallValueDims : kMaxValueDims;
  return n_heads * (3 * padded_dims(key_dims) * 2 + segments * (8 + 4 * width));
}

inline int64_t pass_rows(int64_t n_heads, int64_t key_dims, int64_t max_context) {
  const int64_t rows = kWorkBytes / work_row_bytes(n_heads, key_dims, max_context);
  return std::clamp(rows, kLeastPassRows, kMaxPassRows);
}

// A pair turned by its position's angle: each element two products and a sum, rounded one by one.
__device__ inline float2 rotated(float a, float b, float cos, float sin) {
  return make_float2(__fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin)), __fadd_rn(__fmul_rn(b, cos), __fmul_rn(a, sin)));
}

// Hands out a working memory piece by piece.
class WorkPieces {
 public:
  static constexpr int64_t kAlign = 64, kMost = 8;
  explicit WorkPieces(void* work) : at_(static_cast<std::byte*>(work)) {}
  template <class T>
  T* take(int64_t count) {
    auto* taken = reinterpret_cast<T*>(at_);
    at_ += round_up(count * static_cast<int64_t>(sizeof(T)), kAlign);
    return taken;
  }

 private:
  std::byte* at_;
};

}  // namespace kdt::cuda
