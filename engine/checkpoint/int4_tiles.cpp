#include "checkpoint/int4_tiles.h"

#include <cstring>

#include "base/bf16.h"

namespace kdt {
namespace {

constexpr uint32_t kLow = 0x0f0f0f0f, kHigh = 0xf0f0f0f0;
constexpr int64_t kQuads = 4, kOctet = 8;   // 16 outputs a quad, in two octets

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void store(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

// One output's 16 inputs of a tile. Byte t of `even`: input 2t, then (upper nibble) input 2t + 8; of `odd`: 2t + 1 and
// 2t + 9.
struct Halves {
  uint32_t even, odd;
};

Halves split(uint64_t inputs) {
  const auto first = static_cast<uint32_t>(inputs), second = static_cast<uint32_t>(inputs >> 32);
  return {(first & kLow) | (second & kLow) << 4, (first >> 4 & kLow) | (second & kHigh)};
}

uint64_t join(Halves halves) {
  const uint32_t first = (halves.even & kLow) | (halves.odd & kLow) << 4;
  const uint32_t second = (halves.even >> 4 & kLow) | (halves.odd & kHigh);
  return first | static_cast<uint64_t>(second) << 32;
}

constexpr uint32_t byte_of(uint32_t word, int index) { return word >> (8 * index) & 0xff; }

// Where scale `place` of a block of 64 comes from.
constexpr int64_t scale_output(int64_t place) { return place / 8 + 8 * (place % 8); }

}  // namespace

void int4_to_tiles(std::span<const std::byte* const> rows, int64_t n_in, std::byte* tiles) {
  const int64_t n_tiles = static_cast<int64_t>(rows.size()) / kTileOutputs, n_k = n_in / kTileInputs;
  for (int64_t tile = 0; tile < n_tiles; ++tile) {
    const auto* row = &rows[static_cast<size_t>(tile * kTileOutputs)];
    for (int64_t k = 0; k < n_k; ++k) {
      std::byte* to = tiles + (k * n_tiles + tile) * kTileWords * 4;
      for (int64_t octet = 0; octet < kOctet; ++octet) {
        uint32_t words[4][kQuads];   // by lane % 4, then quad
        for (int64_t quad = 0; quad < kQuads; ++quad) {
          const auto* from = row + quad * 2 * kOctet + octet;
          const Halves a = split(load<uint64_t>(from[0] + k * 8)), b = split(load<uint64_t>(from[kOctet] + k * 8));
          for (int t = 0; t < 4; ++t)
            words[t][quad] = byte_of(a.even, t) | byte_of(b.even, t) << 8 | byte_of(a.odd, t) << 16 |
                             byte_of(b.odd, t) << 24;
        }
        std::memcpy(to + octet * sizeof words, words, sizeof words);
      }
    }
  }
}

void tiles_to_int4(const std::byte* tiles, int64_t n_in, std::span<std::byte* const> rows) {
  const int64_t n_tiles = static_cast<int64_t>(rows.size()) / kTileOutputs, n_k = n_in / kTileInputs;
  for (int64_t tile = 0; tile < n_tiles; ++tile) {
    const auto* row = &rows[static_cast<size_t>(tile * kTileOutputs)];
    for (int64_t k = 0; k < n_k; ++k) {
      const std::byte* from = tiles + (k * n_tiles + tile) * kTileWords * 4;
      for (int64_t octet = 0; octet < kOctet; ++octet) {
        uint32_t words[4][kQuads];
        std::memcpy(words, from + octet * sizeof words, sizeof words);
        for (int64_t quad = 0; quad < kQuads; ++quad) {
          Halves a{0, 0}, b{0, 0};
          for (int t = 0; t < 4; ++t) {
            const uint32_t word = words[t][quad];
            a.even |= byte_of(word, 0) << (8 * t);
            b.even |= byte_of(word, 1) << (8 * t);
            a.odd |= byte_of(word, 2) << (8 * t);
            b.odd |= byte_of(word, 3) << (8 * t);
          }
          const auto* to = row + quad * 2 * kOctet + octet;
          store(to[0] + k * 8, join(a));
          store(to[kOctet] + k * 8, join(b));
        }
      }
    }
  }
}

void scales_to_tiles(std::span<const std::byte* const> rows, int64_t n_groups, std::byte* out) {
  const auto n_out = static_cast<int64_t>(rows.size());
  for (int64_t block = 0; block < n_out; block += kTileOutputs)
    for (int64_t place = 0; place < kTileOutputs; ++place) {
      const std::byte* from = rows[static_cast<size_t>(block + scale_output(place))];
      for (int64_t g = 0; g < n_groups; ++g) store(out + (g * n_out + block + place) * 2, load<bf16>(from + g * 2));
    }
}

void tiles_to_scales(const std::byte* scales, int64_t n_groups, std::span<std::byte* const> rows) {
  const auto n_out = static_cast<int64_t>(rows.size());
  for (int64_t block = 0; block < n_out; block += kTileOutputs)
    for (int64_t place = 0; place < kTileOutputs; ++place) {
      std::byte* to = rows[static_cast<size_t>(block + scale_output(place))];
      for (int64_t g = 0; g < n_groups; ++g) store(to + g * 2, load<bf16>(scales + (g * n_out + block + place) * 2));
    }
}

}  // namespace kdt
