#include "model/synthetic_weights.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.h"
#include "checkpoint/int4_tiles.h"

namespace kdt {
namespace {

constexpr size_t kPoolBytes = 64 << 20, kScalePoolBytes = 8 << 20, kPoolStep = 4096;
// Uniform below it on either side: a product over thousands of normalised inputs is of unit size.
constexpr float kAmplitude = 0.02f;
// Nibbles are -8 to 7: with scales about this large, of the same size.
constexpr float kScale = 0.0025f;

// SplitMix64.
uint64_t mixed(uint64_t& state) {
  uint64_t z = (state += 0x9E3779B97F4A7C15u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

uint16_t bf16_bits(float value) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16); }

// f of a uniform number in [0, 1), for every element.
template <class F>
Exchange bf16_pool(Ops& ops, size_t bytes, uint64_t seed, const F& f) {
  Exchange memory = ops.exchange(bytes);
  for (size_t i = 0; i < bytes; i += 2) {
    const uint16_t bits = bf16_bits(f(static_cast<float>(mixed(seed) >> 40) * 0x1p-24f));
    std::memcpy(memory.host() + i, &bits, 2);
  }
  return memory;
}

Exchange byte_pool(Ops& ops, size_t bytes, uint64_t seed) {
  Exchange memory = ops.exchange(bytes);
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t word = mixed(seed);
    std::memcpy(memory.host() + i, &word, 8);
  }
  return memory;
}

}  // namespace

SyntheticWeights::SyntheticWeights(Ops& ops, std::string where) : ops_(ops), where_(std::move(where)) {
  values_.memory = bf16_pool(ops, kPoolBytes, 1, [](float u) { return (2 * u - 1) * kAmplitude; });
  nibbles_.memory = byte_pool(ops, kPoolBytes, 2);
  scales_.memory = bf16_pool(ops, kScalePoolBytes, 3, [](float u) { return (0.5f + u) * kScale; });
}

const std::byte* SyntheticWeights::Pool::take(size_t bytes) const {
  if (next + bytes > memory.bytes()) next = 0;
  const std::byte* from = memory.host() + next;
  next += (bytes + kPoolStep - 1) / kPoolStep * kPoolStep;
  return from;
}

// What is larger than the pool is made of several pieces of it.
Matrix SyntheticWeights::bf16_matrix(int64_t n_out, int64_t n_in) const {
  const int64_t most = std::max<int64_t>(1, static_cast<int64_t>(kPoolBytes) / (2 * n_in));
  std::vector<MatrixSource> pieces;
  for (int64_t row = 0; row < n_out; row += most) {
    const int64_t rows = std::min(most, n_out - row);
    pieces.push_back({values_.take(static_cast<size_t>(2 * rows * n_in)), rows, n_in});
  }
  return ops_.upload_matrix(pieces);
}

TileSource SyntheticWeights::tiles(int64_t n_out, int64_t n_in) const {
  if (!fits_tiles(n_out, n_in))
    fail(Status::unsupported, where_ + ": experts", std::to_string(n_out) + " outputs, " + std::to_string(n_in) + " inputs",
         "whole tiles of 64 and groups of 32");
  const auto weights = static_cast<size_t>(n_out * n_in);
  return {nibbles_.take(weights / 2), scales_.take(weights / kTileGroup * 2), n_out, n_in};
}

const void* SyntheticWeights::raw_bf16(const std::string&, int64_t rows, int64_t columns) const {
  std::vector<std::byte> table(static_cast<size_t>(2 * rows * columns));
  for (size_t at = 0; at < table.size(); at += kPoolBytes)
    std::memcpy(table.data() + at, values_.memory.host(), std::min(table.size() - at, kPoolBytes));
  return ops_.upload_raw(table.data(), table.size());
}

Buffer SyntheticWeights::vector(const std::string&, int64_t n, DType dtype) const {
  const std::vector<float> values(static_cast<size_t>(n), dtype == DType::f32 ? 0.0f : 1.0f);
  Buffer buffer = ops_.allocate(values.size() * sizeof(float));
  ops_.copy_in(buffer, 0, values.data(), values.size() * sizeof(float));
  return buffer;
}

Matrix SyntheticWeights::matrix(const std::string&, std::span<const Named> stacked, int64_t n_in) const {
  int64_t n_out = 0;
  for (const Named& part : stacked) n_out += part.n_out;
  return bf16_matrix(n_out, n_in);
}

Matrix SyntheticWeights::matrix(const std::string&, int64_t n_out, int64_t n_in) const { return bf16_matrix(n_out, n_in); }

std::vector<Matrix> SyntheticWeights::column_slices(const std::string&, int64_t n_out, int64_t n_in, int64_t parts) const {
  std::vector<Matrix> slices;
  for (int64_t i = 0; i < parts; ++i) slices.push_back(bf16_matrix(n_out, n_in / parts));
  return slices;
}

Matrix SyntheticWeights::gate_up(const std::string& prefix, int64_t width, int64_t n_in) const {
  const auto bytes = static_cast<size_t>(2 * width * n_in);
  if (bytes > kPoolBytes)
    fail(Status::unsupported, where_ + ": " + prefix + "gate_proj", std::to_string(bytes) + " bytes",
         "at most " + std::to_string(kPoolBytes) + " in a rehearsal: more ranks");
  const MatrixSource gate{values_.take(bytes), width, n_in}, up{values_.take(bytes), width, n_in};
  return ops_.upload_gate_up(gate, up);
}

void SyntheticWeights::experts(const std::string&, int64_t n_experts, int64_t width, int64_t hidden, int64_t group,
                               std::vector<Matrix>& gate_up, std::vector<Matrix>& down) const {
  if (group != kTileGroup)
    fail(Status::unsupported, where_ + ": group_size", std::to_string(group), std::to_string(kTileGroup));
  for (int64_t e = 0; e < n_experts; ++e) {
    gate_up.push_back(ops_.upload_tiles_gate_up(tiles(2 * width, hidden)));
    down.push_back(ops_.upload_tiles(tiles(hidden, width)));
  }
}

void SyntheticWeights::kv_b(const std::string&, int64_t n_heads, int64_t nope, int64_t v_head, int64_t kv_lora,
                            std::vector<Matrix>& w_uk, std::vector<Matrix>& w_uv) const {
  for (int64_t h = 0; h < n_heads; ++h) {
    w_uk.push_back(bf16_matrix(kv_lora, nope));
    w_uv.push_back(bf16_matrix(v_head, kv_lora));
  }
}

}  // namespace kdt
