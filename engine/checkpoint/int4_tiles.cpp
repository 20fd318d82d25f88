#include "checkpoint/int4_tiles.h"

#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/bf16.h"

namespace kdt {
namespace {

namespace hn = hwy::HWY_NAMESPACE;   // of the build's baseline: a copy to memory takes longer than this does

constexpr int64_t kQuads = 4, kOctet = 8;   // 16 outputs a quad, in two octets
// Whole cache lines of a row before the next row: rows lie at distances that share few sets of a cache.
constexpr int64_t kBlock = 8;               // tiles along the inputs

constexpr hn::Full128<uint8_t> kBytes;
constexpr hn::Full128<uint16_t> kPairs;
constexpr hn::Full128<uint32_t> kWords;
constexpr hn::Full128<uint64_t> kLongs;
using Words = hn::Vec<decltype(kWords)>;
using Four = std::array<Words, 4>;

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

Words load_words(const std::byte* from) {
  return hn::BitCast(kWords, hn::LoadU(kBytes, reinterpret_cast<const uint8_t*>(from)));
}

void store_words(Words words, std::byte* to) {
  hn::StoreU(hn::BitCast(kBytes, words), kBytes, reinterpret_cast<uint8_t*>(to));
}

Words low(Words v) { return hn::And(v, hn::Set(kWords, 0x0f0f0f0f)); }
Words high(Words v) { return hn::And(v, hn::Set(kWords, 0xf0f0f0f0)); }
Words up(Words v) { return hn::ShiftLeft<4>(low(v)); }
Words down(Words v) { return low(hn::ShiftRight<4>(v)); }

// Byte 4i + j comes from 4j + i.
Words swap_bytes(Words v) {
  alignas(16) static constexpr uint8_t kPlaces[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  return hn::BitCast(kWords, hn::TableLookupBytes(hn::BitCast(kBytes, v), hn::Load(kBytes, kPlaces)));
}

// Word j of vector i comes from word i of vector j.
Four swap_words(const Four& v) {
  const auto long_of = [](Words words) { return hn::BitCast(kLongs, words); };
  const auto a = long_of(hn::InterleaveLower(v[0], v[1])), b = long_of(hn::InterleaveLower(v[2], v[3]));
  const auto c = long_of(hn::InterleaveUpper(kWords, v[0], v[1])), d = long_of(hn::InterleaveUpper(kWords, v[2], v[3]));
  return {hn::BitCast(kWords, hn::InterleaveLower(a, b)), hn::BitCast(kWords, hn::InterleaveUpper(kLongs, a, b)),
          hn::BitCast(kWords, hn::InterleaveLower(c, d)), hn::BitCast(kWords, hn::InterleaveUpper(kLongs, c, d))};
}

// Of four rows (a quad's, one octet of each): words 2i and 2i + 1 are the 16 inputs of tile i. Two tiles at a time.
Four load_rows(const std::byte* const* rows, int64_t byte) {
  Four v;
  for (int64_t quad = 0; quad < kQuads; ++quad)
    v[static_cast<size_t>(quad)] = load_words(rows[quad * 2 * kOctet] + byte);
  return swap_words(v);
}

void store_rows(const Four& inputs, std::byte* const* rows, int64_t byte) {
  const Four v = swap_words(inputs);
  for (int64_t quad = 0; quad < kQuads; ++quad)
    store_words(v[static_cast<size_t>(quad)], rows[quad * 2 * kOctet] + byte);
}

// One tile's inputs of one output a quad. Byte 4t + quad of `even`: input 2t, then (upper nibble) input 2t + 8; of `odd`:
// 2t + 1 and 2t + 9.
struct Halves {
  Words even, odd;
};

Halves split(Words first, Words second) {
  return {swap_bytes(hn::Or(low(first), up(second))), swap_bytes(hn::Or(down(first), high(second)))};
}

// first, second.
std::pair<Words, Words> join(Words swapped_even, Words swapped_odd) {
  const Words even = swap_bytes(swapped_even), odd = swap_bytes(swapped_odd);
  return {hn::Or(low(even), up(odd)), hn::Or(down(even), high(odd))};
}

// The 16 words [lane % 4][quad] of an octet of a tile: outputs `a` and those 8 beyond them, `b`.
void store_octet(const Halves& a, const Halves& b, std::byte* to) {
  const auto bytes_of = [](Words words) { return hn::BitCast(kBytes, words); };
  const auto put = [&](int64_t t, auto pairs) { store_words(hn::BitCast(kWords, pairs), to + t * 16); };
  const auto half = [&](int64_t t, auto even, auto odd) {
    const auto e = hn::BitCast(kPairs, even), o = hn::BitCast(kPairs, odd);
    put(t, hn::InterleaveLower(e, o));
    put(t + 1, hn::InterleaveUpper(kPairs, e, o));
  };
  half(0, hn::InterleaveLower(bytes_of(a.even), bytes_of(b.even)), hn::InterleaveLower(bytes_of(a.odd), bytes_of(b.odd)));
  half(2, hn::InterleaveUpper(kBytes, bytes_of(a.even), bytes_of(b.even)),
       hn::InterleaveUpper(kBytes, bytes_of(a.odd), bytes_of(b.odd)));
}

// {a.even, b.even, a.odd, b.odd}.
Four load_octet(const std::byte* from) {
  Four v;
  for (int64_t t = 0; t < 4; ++t) v[static_cast<size_t>(t)] = swap_bytes(load_words(from + t * 16));
  return swap_words(v);
}

// Where scale `place` of a block of 64 comes from.
constexpr int64_t scale_output(int64_t place) { return place / 8 + 8 * (place % 8); }

}  // namespace

void int4_to_tiles(std::span<const std::byte* const> rows, int64_t n_in, std::byte* tiles) {
  const int64_t n_tiles = static_cast<int64_t>(rows.size()) / kTileOutputs, n_k = n_in / kTileInputs;
  for (int64_t tile = 0; tile < n_tiles; ++tile)
    for (int64_t block = 0; block < n_k; block += kBlock)
      for (int64_t octet = 0; octet < kOctet; ++octet) {
        const auto* from = &rows[static_cast<size_t>(tile * kTileOutputs + octet)];
        for (int64_t k = block; k < std::min(block + kBlock, n_k); k += 2) {
          const Four a = load_rows(from, k * 8), b = load_rows(from + kOctet, k * 8);
          std::byte* to = tiles + (k * n_tiles + tile) * kTileWords * 4 + octet * 64;
          store_octet(split(a[0], a[1]), split(b[0], b[1]), to);
          store_octet(split(a[2], a[3]), split(b[2], b[3]), to + n_tiles * kTileWords * 4);
        }
      }
}

void tiles_to_int4(const std::byte* tiles, int64_t n_in, std::span<std::byte* const> rows) {
  const int64_t n_tiles = static_cast<int64_t>(rows.size()) / kTileOutputs, n_k = n_in / kTileInputs;
  for (int64_t tile = 0; tile < n_tiles; ++tile)
    for (int64_t block = 0; block < n_k; block += kBlock)
      for (int64_t octet = 0; octet < kOctet; ++octet) {
        const auto* to = &rows[static_cast<size_t>(tile * kTileOutputs + octet)];
        for (int64_t k = block; k < std::min(block + kBlock, n_k); k += 2) {
          const std::byte* from = tiles + (k * n_tiles + tile) * kTileWords * 4 + octet * 64;
          const Four one = load_octet(from), two = load_octet(from + n_tiles * kTileWords * 4);
          const auto [a0, a1] = join(one[0], one[2]);
          const auto [a2, a3] = join(two[0], two[2]);
          const auto [b0, b1] = join(one[1], one[3]);
          const auto [b2, b3] = join(two[1], two[3]);
          store_rows({a0, a1, a2, a3}, to, k * 8);
          store_rows({b0, b1, b2, b3}, to + kOctet, k * 8);
        }
      }
}

// Rows of 64 outputs are written one after the other, so that only reading jumps.
void scales_to_tiles(std::span<const std::byte* const> rows, int64_t n_groups, std::byte* out) {
  const auto n_out = static_cast<int64_t>(rows.size());
  for (int64_t block = 0; block < n_out; block += kTileOutputs)
    for (int64_t g = 0; g < n_groups; ++g) {
      std::byte* to = out + (g * n_out + block) * 2;
      for (int64_t place = 0; place < kTileOutputs; ++place)
        store(to + place * 2, load<bf16>(rows[static_cast<size_t>(block + scale_output(place))] + g * 2));
    }
}

void tiles_to_scales(const std::byte* scales, int64_t n_groups, std::span<std::byte* const> rows) {
  const auto n_out = static_cast<int64_t>(rows.size());
  for (int64_t block = 0; block < n_out; block += kTileOutputs)
    for (int64_t g = 0; g < n_groups; ++g) {
      const std::byte* from = scales + (g * n_out + block) * 2;
      for (int64_t place = 0; place < kTileOutputs; ++place)
        store(rows[static_cast<size_t>(block + scale_output(place))] + g * 2, load<bf16>(from + place * 2));
    }
}

}  // namespace kdt
