#include "checkpoint/cpu_packing.h"

#include <cstring>

namespace kdt {
namespace {

template <class T>
T load(const std::byte* source, int64_t index) {
  T value;
  std::memcpy(&value, source + index * static_cast<int64_t>(sizeof(T)), sizeof value);
  return value;
}

}  // namespace

void pack_bf16(const std::byte* source, int64_t n_out, int64_t n_in, int64_t row_stride, int64_t first_row, int64_t step,
               uint32_t* panels) {
  for (int64_t row = 0; row < n_out; ++row) {
    const int64_t out = first_row + row;
    uint32_t* to = panels + out / kPanelRows * step * bf16_panel_words(n_in) + out % kPanelRows;
    const std::byte* from = source + row * row_stride * 2;
    for (int64_t k = 0; k + 1 < n_in; k += 2) to[k / 2 * kPanelRows] = load<uint32_t>(from + k * 2, 0);
    if (n_in % 2) to[n_in / 2 * kPanelRows] = load<bf16>(from, n_in - 1);
  }
}

void pack_int4(const std::byte* packed, const std::byte* scale, int64_t n_out, int64_t n_in, int64_t group, int64_t step,
               uint32_t* panels, bf16* scales) {
  const int64_t n_words = n_in / 8, n_groups = n_in / group;
  for (int64_t row = 0; row < n_out; ++row) {
    const int64_t panel = row / kPanelRows * step;
    uint32_t* to = panels + panel * int4_panel_words(n_in) + row % kPanelRows;
    bf16* to_scale = scales + panel * int4_panel_scales(n_in, group) + row % kPanelRows;
    for (int64_t j = 0; j < n_words; ++j) to[j * kPanelRows] = load<uint32_t>(packed, row * n_words + j);
    for (int64_t g = 0; g < n_groups; ++g) to_scale[g * kPanelRows] = load<bf16>(scale, row * n_groups + g);
  }
}

}  // namespace kdt
