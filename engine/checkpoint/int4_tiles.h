// The GPU's layout of INT4 weights in groups of 32 inputs: bit for bit what vLLM and SGLang's Marlin repack makes.
//
// A matrix [n_out, n_in] is cut into tiles of 16 inputs x 64 outputs: uint32 [n_in / 16][n_out / 64][128]. Word
// lane * 4 + quad of a tile belongs to output `64 tile + 16 quad + lane / 4` (and that + 8) and to the inputs
// k = `16 tile + 2 (lane % 4)`, k + 1, k + 8, k + 9, so that a lane's 16 bytes are its B fragments of mma.m16n8k16. The
// nibbles, from the lowest: {out k, out k+8, out+8 k, out+8 k+8, out k+1, out k+9, out+8 k+1, out+8 k+9}; they stay
// offset binary (value + 8). Scales are bf16 [n_in / 32][n_out], and within every 64 outputs place o holds output
// `o / 8 + 8 (o % 8)`.
//
// A checkpoint's form is compressed-tensors pack-quantized: int32 [n_out, n_in / 8], element i of a word in bits
// 4i..4i+3; scales bf16 [n_out, n_in / 32]. Rows are given one by one, so that a rank's part of a matrix, or two
// matrices one above the other, need no copy first. Nothing needs alignment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kdt {

constexpr int64_t kTileInputs = 16;
constexpr int64_t kTileOutputs = 64;
constexpr int64_t kTileWords = 128;
constexpr int64_t kTileGroup = 32;    // inputs that share a scale
constexpr const char* kTileLayout = "marlin-int4-16x64-group32";

// Whether a matrix is whole tiles and whole groups.
constexpr bool fits_tiles(int64_t n_out, int64_t n_in) {
  return n_out > 0 && n_in > 0 && n_out % kTileOutputs == 0 && n_in % kTileGroup == 0;
}

// `rows`: n_out pointers to n_in / 8 words each; `tiles`: n_out * n_in / 8 words. Sizes must fit tiles.
void int4_to_tiles(std::span<const std::byte* const> rows, int64_t n_in, std::byte* tiles);
void tiles_to_int4(const std::byte* tiles, int64_t n_in, std::span<std::byte* const> rows);

// `rows`: n_out pointers to n_groups scales each; `out`: n_groups * n_out scales.
void scales_to_tiles(std::span<const std::byte* const> rows, int64_t n_groups, std::byte* out);
void tiles_to_scales(const std::byte* scales, int64_t n_groups, std::span<std::byte* const> rows);

}  // namespace kdt
