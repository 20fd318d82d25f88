// Experts' weights to the device: from the checkpoint's form to tiles (checkpoint/int4_tiles.h).
//
// What does not fit tiles is filled up with zeros: outputs to a multiple of 64 (nibble 8, scale 0), and inputs so that
// every group of 32 has one scale. A group of fewer inputs takes the first places of a group of 32; a larger one
// repeats its scale.
#include <vector>

#include "base/error.h"
#include "checkpoint/int4_tiles.h"
#include "cuda/device.cuh"
#include "cuda/upload_ring.h"

namespace kdt::cuda {
namespace {

constexpr int64_t kWordInputs = 8;
constexpr std::byte kZeroNibbles{0x88};

struct Tiled {
  std::vector<std::byte> words, scales;
};

// Rows of the sources one above the other.
Tiled tiled(std::span<const Int4Source> sources, int64_t group_size) {
  const int64_t n_in = sources.front().n_in, source_groups = n_in / group_size;
  const int64_t n_groups = group_size <= kTileGroup ? source_groups : n_in / kTileGroup;
  int64_t n_out = 0;
  for (const Int4Source& source : sources) n_out += source.n_out;
  const int64_t rows = divide_up(n_out, kTileOutputs) * kTileOutputs;
  const auto row_bytes = static_cast<size_t>(n_groups * kTileGroup / 2);
  const auto scale_bytes = static_cast<size_t>(n_groups * 2);
  const bool as_it_is = group_size == kTileGroup;
  std::vector<std::byte> regrouped(as_it_is ? row_bytes : static_cast<size_t>(rows) * row_bytes, kZeroNibbles);
  std::vector<std::byte> rescaled(as_it_is ? scale_bytes : static_cast<size_t>(rows) * scale_bytes);

  std::vector<const std::byte*> row, scale;
  for (const Int4Source& source : sources)
    for (int64_t o = 0; o < source.n_out; ++o) {
      const std::byte* from = source.packed + o * n_in / 2;
      const std::byte* from_scale = source.scale + o * source_groups * 2;
      if (!as_it_is) {
        std::byte* to = regrouped.data() + row.size() * row_bytes;
        std::byte* to_scale = rescaled.data() + row.size() * scale_bytes;
        const int64_t step = std::min(group_size, kTileGroup);
        for (int64_t g = 0; g < n_groups; ++g) {
          std::copy_n(from + g * step / 2, step / 2, to + g * kTileGroup / 2);
          std::copy_n(from_scale + g * step / group_size * 2, 2, to_scale + g * 2);
        }
        from = to;
        from_scale = to_scale;
      }
      row.push_back(from);
      scale.push_back(from_scale);
    }
  for (size_t o = row.size(); o < static_cast<size_t>(rows); ++o) {   // of nobody: the zeros these were filled with
    row.push_back(regrouped.data() + (as_it_is ? 0 : o * row_bytes));
    scale.push_back(rescaled.data() + (as_it_is ? 0 : o * scale_bytes));
  }
  Tiled out{std::vector<std::byte>(static_cast<size_t>(rows) * row_bytes),
            std::vector<std::byte>(static_cast<size_t>(rows) * scale_bytes)};
  int4_to_tiles(row, n_groups * kTileGroup, out.words.data());
  scales_to_tiles(scale, n_groups, out.scales.data());
  return out;
}

void check_group(const Int4Source& source, int64_t group_size) {
  const bool whole = group_size > 0 && group_size % kWordInputs == 0 && source.n_in % group_size == 0;
  if (!whole || (group_size > kTileGroup && group_size % kTileGroup != 0))
    fail(Status::unsupported, "group_size",
         std::to_string(group_size) + " of " + std::to_string(source.n_in) + " inputs",
         "a divisor of the inputs that is a multiple of 8 up to 32, or a multiple of 32");
}

}  // namespace

Matrix CudaOps::upload_int4(const Int4Source& source, int64_t group_size) {
  return upload_tiled({&source, 1}, group_size);
}

Matrix CudaOps::upload_int4_gate_up(const Int4Source& gate, const Int4Source& up, int64_t group_size) {
  const Int4Source both[] = {gate, up};
  return upload_tiled(both, group_size);
}

// Tiles are what the device computes from: they go as they are.
Matrix CudaOps::upload_tiles(const TileSource& source) {
  const std::span<const std::byte> words(source.words, static_cast<size_t>(source.n_out * source.n_in / 2));
  const std::span<const std::byte> scales(source.scales, static_cast<size_t>(source.n_out * source.n_in / kTileGroup * 2));
  return put_tiles(words, scales, source.n_out, source.n_in, kTileGroup);
}

Matrix CudaOps::put_tiles(std::span<const std::byte> words, std::span<const std::byte> scales, int64_t n_out, int64_t n_in,
                          int64_t group_size) {
  enter();
  const auto put = [&](std::span<const std::byte> from) {
    void* to = weight_memory(from.size());
    uploads().copy(from.data(), from.size(), to);
    return to;
  };
  return {put(words), put(scales), n_out, n_in, group_size};
}

Matrix CudaOps::upload_tiled(std::span<const Int4Source> sources, int64_t group_size) {
  check_group(sources.front(), group_size);
  const Tiled tiles = tiled(sources, group_size);
  int64_t n_out = 0;
  for (const Int4Source& source : sources) n_out += source.n_out;
  return put_tiles(tiles.words, tiles.scales, n_out, sources.front().n_in, group_size);
}

}  // namespace kdt::cuda
