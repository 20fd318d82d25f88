// What the kernels of the experts are made of: how a warp fetches weights and tokens to its ring in shared memory, and
// the product of a stage of them.
//
// A warp works on a tile of outputs (64 of an INT4 matrix, 16 of a BF16 one) and takes its inputs in stages of 64:
// four K steps of mma.sync m16n8k16, two groups of INT4 scales. Either way a stage is four pieces of 512 bytes, of
// which lane l copies and later reads bytes 16 l .. 16 l + 15. Tokens are the eight columns of an mma; kGroups of them
// share the weights in registers.
//
// INT4 (checkpoint/int4_tiles.h): word `quad` of a lane's 16 bytes is its A fragment for outputs 16 quad + lane / 4
// and that + 8. weight = bf16((nibble - 8) * scale), by one instruction a pair (Scales).
#pragma once

#include <climits>

#include "checkpoint/int4_tiles.h"
#include "cuda/linear.cuh"

namespace kdt::cuda {

constexpr int kExpertWarps = 4;
constexpr int kExpertThreads = kExpertWarps * kWarp;
constexpr int kStageSteps = 4;                                  // K steps of a stage
constexpr int kStageInputs = kStageSteps * 16;
constexpr int kPieceBytes = 512;                                // of a stage's K step, or of 16 inputs of an INT4 tile
constexpr int kScaleBytes = 128;                                // of a tile's 64 outputs, one group
constexpr int kWeightStage = kStageSteps * kPieceBytes + 2 * kScaleBytes;
constexpr int kTokenStage = 8 * kStageInputs * 2;               // of eight tokens
static_assert(kTileInputs == 16 && kTileOutputs == 64 && kTileWords * 4 == kPieceBytes && kTileGroup == 32);

// As cp_async16, but zeros where there is nothing to copy.
__device__ inline void copy_or_zero(void* shared, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :: "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}

__device__ inline uint4 shared16(const std::byte* at) { return *reinterpret_cast<const uint4*>(at); }

// A fused multiply-add of two BF16, rounded once.
__device__ inline uint32_t fma2(uint32_t a, uint32_t b, __nv_bfloat162 c) {
  const __nv_bfloat162 sum = __hfma2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                     *reinterpret_cast<const __nv_bfloat162*>(&b), c);
  return *reinterpret_cast<const uint32_t*>(&sum);
}
__device__ inline __nv_bfloat162 times(uint32_t pair, uint32_t factor) {
  return __hmul2_rn(*reinterpret_cast<const __nv_bfloat162*>(&pair), *reinterpret_cast<const __nv_bfloat162*>(&factor));
}
__device__ inline uint32_t bits_of(__nv_bfloat162 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }

// Where a stage's tokens lie in shared memory, 16 bytes (8 inputs) at a time. In the ring: rows of 128 bytes, whose
// chunks are swapped about by row so that eight rows lie in different banks.
struct RingTokens {
  const std::byte* at;
  __device__ const std::byte* chunk(int group, int token, int c) const {
    return at + group * kTokenStage + token * (2 * kStageInputs) + (c ^ token) * 16;
  }
};
// Whole rows, `stride` bytes apart, an odd number of chunks.
struct RowTokens {
  const std::byte* at;     // the first token's, at the stage
  int stride;
  __device__ const std::byte* chunk(int group, int token, int c) const {
    return at + (group * 8 + token) * stride + c * 16;
  }
};

// The scales of a lane's outputs lane / 4 (low) and that + 8 (high), as its weights come from them.
//
// A nibble alone in the low bits of a BF16 is the subnormal nibble * 2^-133, and in the next four bits 16 times that. So
// 2^-32 of a weight is one fused multiply-add, nibble * scale - 8 * scale, exact but for the one rounding. Sums get the
// power of two back (kUnscale), which changes nothing else of them. Scales are below 2^27.
struct Scales {
  __nv_bfloat162 first, second, offset;   // of nibbles in the low bits, in the next; of the 8 that all are too large by

  __device__ explicit Scales(uint32_t pair)
      : first(times(pair, 0x72007200)), second(times(pair, 0x70007000)), offset(times(pair, 0xB100B100)) {}
  // The A fragment of a word: k of both rows, then k + 8.
  __device__ void weights(uint32_t word, uint32_t (&a)[4]) const {
    constexpr uint32_t kFirst = 0x000f000f, kSecond = 0x00f000f0;
    const uint32_t high = word >> 8;
    a[0] = fma2(word & kFirst, bits_of(__low2bfloat162(first)), __low2bfloat162(offset));
    a[1] = fma2(high & kFirst, bits_of(__high2bfloat162(first)), __high2bfloat162(offset));
    a[2] = fma2(word & kSecond, bits_of(__low2bfloat162(second)), __low2bfloat162(offset));
    a[3] = fma2(high & kSecond, bits_of(__high2bfloat162(second)), __high2bfloat162(offset));
  }
};

struct Int4Weight {
  static constexpr int kOutputs = 64, kQuads = 4;
  static constexpr float kUnscale = 0x1p32f;
  const std::byte* words;    // [2 * groups][tiles][512]
  const std::byte* scales;   // [groups][tiles][128]
  int tiles, groups;

  // Copies a lane's part of one stage after another.
  struct Fetch {
    const std::byte *words, *scales;
    int tiles;
    int left;                // groups

    __device__ void operator()(std::byte* to, int lane) {
      const bool second = left > 1;
#pragma unroll
      for (int step = 0; step < kStageSteps; ++step)
        copy_or_zero(to + step * kPieceBytes + lane * 16, words + static_cast<int64_t>(tiles) * (step * kPieceBytes),
                     step < 2 || second);
      if (lane < 16) copy_or_zero(to + kStageSteps * kPieceBytes + lane * 16, scales, lane < 8 || second);
      words += static_cast<int64_t>(tiles) * (kStageSteps * kPieceBytes);
      scales += static_cast<int64_t>(tiles) * (2 * kScaleBytes);
      left -= 2;
    }
  };
  __device__ Fetch fetch(int tile, int stage, int lane) const {
    return {words + (static_cast<int64_t>(stage * kStageSteps) * tiles + tile) * kPieceBytes + lane * 16,
            scales + (static_cast<int64_t>(2 * stage + lane / 8) * tiles + tile) * kScaleBytes + lane % 8 * 16, tiles,
            groups - 2 * stage};
  }

  template <int kGroups, class Tokens>
  static __device__ void multiply(const std::byte* from, const Tokens& x, int lane, float (&sum)[kGroups][kQuads][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {   // 32 inputs: one group of scales
      const uint4 scale = shared16(from + kStageSteps * kPieceBytes + half * kScaleBytes + lane / 4 * 16);
      const Scales of_quad[kQuads] = {Scales(scale.x), Scales(scale.y), Scales(scale.z), Scales(scale.w)};
      uint32_t b[kGroups][4];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(x.chunk(g, lane % 8, half * 4 + lane / 8)));
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(b[g][0]), "=r"(b[g][1]), "=r"(b[g][2]), "=r"(b[g][3]) : "r"(at));
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint4 word = shared16(from + (half * 2 + step) * kPieceBytes + lane * 16);
        const auto quad = [&](int q, uint32_t w) {
          uint32_t a[4];
          of_quad[q].weights(w, a);
#pragma unroll
          for (int g = 0; g < kGroups; ++g) mma(sum[g][q], a, {b[g][step * 2], b[g][step * 2 + 1]});
        };
        quad(0, word.x), quad(1, word.y), quad(2, word.z), quad(3, word.w);
      }
    }
  }
};

// The layout of linear.cuh.
struct DenseWeight {
  static constexpr int kOutputs = 16, kQuads = 1;
  static constexpr float kUnscale = 1;
  const std::byte* fragments;   // [tiles][steps][512]
  int steps;

  struct Fetch {
    const std::byte* fragments;
    int left;                   // steps

    __device__ void operator()(std::byte* to, int lane) {
#pragma unroll
      for (int step = 0; step < kStageSteps; ++step)
        copy_or_zero(to + step * kPieceBytes + lane * 16, fragments + step * kPieceBytes, step < left);
      fragments += kStageSteps * kPieceBytes;
      left -= kStageSteps;
    }
  };
  __device__ Fetch fetch(int tile, int stage, int lane) const {
    return {fragments + (static_cast<int64_t>(tile) * steps + stage * kStageSteps) * kPieceBytes + lane * 16,
            steps - stage * kStageSteps};
  }

  template <int kGroups, class Tokens>
  static __device__ void multiply(const std::byte* from, const Tokens& x, int lane, float (&sum)[kGroups][kQuads][4]) {
#pragma unroll
    for (int step = 0; step < kStageSteps; ++step) {
      const uint4 a = shared16(from + step * kPieceBytes + lane * 16);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {   // inputs 4t .. 4t + 3 of the step, t = lane % 4
        const std::byte* at = x.chunk(g, lane / 4, step * 2 + lane % 4 / 2) + lane % 2 * 8;
        const uint2 b = *reinterpret_cast<const uint2*>(at);
        mma(sum[g][0], {a.x, a.y, a.z, a.w}, {b.x, b.y});
      }
    }
  }
};

// Copies a lane's part of the tokens to one stage of the ring after another: chunk lane % 8 of tokens lane / 8 + 4 i.
// Of 32 inputs that share scales `spread` exist, in `x` one after the other; the rest are zeros (upload_int4).
template <int kGroups>
struct TokenFetch {
  const bf16* row[2 * kGroups];   // null: no such token
  int left;                       // inputs from this lane's next on
  int spread;

  // Token t is row slots[t] / divide of x.
  __device__ TokenFetch(const bf16* x, int n_in, int spread, const int32_t* slots, int count, uint32_t divide,
                        int stage, int lane)
      : spread(spread) {
    const int c = lane % 8, within = c % 4 * 8, k = (2 * stage + c / 4) * spread + within;
    left = within < spread ? n_in - k : INT_MIN / 2;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      const int token = lane / 8 + 4 * i;
      row[i] = nullptr;
      if (token < count) row[i] = x + static_cast<int64_t>(static_cast<uint32_t>(slots[token]) / divide) * n_in + k;
    }
  }
  __device__ void operator()(std::byte* to, int lane) {
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      const int token = lane / 8 + 4 * i;
      if (row[i]) {
        copy_or_zero(to + token * (2 * kStageInputs) + (lane % 8 ^ token % 8) * 16, row[i], left > 0);
        row[i] += 2 * spread;
      }
    }
    left -= 2 * spread;
  }
};

// The next `left` tiles of a warp, kExpertWarps apart.
struct TileRange {
  int tile, left;
};

// Copies the stages of a warp's tiles, one after the other.
template <class Weight>
struct TileFetch {
  Weight weight;
  TileRange range;
  int stage, stages;
  typename Weight::Fetch fetch;

  __device__ TileFetch(const Weight& weight, const TileRange& range, int stages, int lane)
      : weight(weight), range(range), stage(0), stages(stages), fetch(weight.fetch(range.tile, 0, lane)) {}
  __device__ void operator()(std::byte* to, int lane) {
    if (range.left > 0) {
      fetch(to, lane);
      if (++stage == stages) {
        stage = 0;
        range.tile += kExpertWarps;
        --range.left;
        fetch = weight.fetch(range.tile, 0, lane);
      }
    }
    cp_async_commit();
  }
};

}  // namespace kdt::cuda
