// bfloat16 as it lies in a checkpoint: the upper half of an IEEE binary32.
#pragma once

#include <bit>
#include <cstdint>

namespace kdt {

using bf16 = uint16_t;

inline float bf16_to_float(bf16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value) << 16); }

}  // namespace kdt
