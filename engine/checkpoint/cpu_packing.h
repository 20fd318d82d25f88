// The CPU's weight layout: panels of 16 output rows, so that vector lanes are outputs and every output element is one
// sequential sum over its inputs, whatever the vector width or the number of activation rows.
//
// BF16: uint32 [n_panels][ceil(n_in / 2)][16]; the low half is input 2k, the high half input 2k + 1.
// INT4: uint32 [n_panels][n_in / 8][16]: the checkpoint's words (eight inputs of one output row, lowest nibble first,
//       each its value + 8); scales bf16 [n_panels][n_in / group][16].
// Rows that fill up the last panel are zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bf16.h"

namespace kdt {

constexpr int64_t kPanelRows = 16;

constexpr int64_t n_panels(int64_t n_out) { return (n_out + kPanelRows - 1) / kPanelRows; }
constexpr int64_t bf16_panel_words(int64_t n_in) { return (n_in + 1) / 2 * kPanelRows; }
constexpr int64_t int4_panel_words(int64_t n_in) { return n_in / 8 * kPanelRows; }
constexpr int64_t int4_panel_scales(int64_t n_in, int64_t group) { return n_in / group * kPanelRows; }

// Writes n_out rows as output rows first_row… of every step-th panel; `panels` must be zero where no row is written.
// Sources may be unaligned; row_stride is in elements.
void pack_bf16(const std::byte* source, int64_t n_out, int64_t n_in, int64_t row_stride, int64_t first_row, int64_t step,
               uint32_t* panels);
void pack_int4(const std::byte* packed, const std::byte* scale, int64_t n_out, int64_t n_in, int64_t group, int64_t step,
               uint32_t* panels, bf16* scales);

}  // namespace kdt
