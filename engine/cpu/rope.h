// Rotary embedding of one vector, in place (Su et al., RoFormer; YaRN's blending and amplitude are in the table).
#pragma once

#include "ops/types.h"

namespace kdt::cpu {

// Pairs (x[2i], x[2i + 1]), as DeepSeek's and Kimi's checkpoints expect.
inline void rotate_interleaved(float* x, const RopeTable& table, int64_t position) {
  const int64_t half = table.dim / 2;
  const float *cos = table.cos + position * half, *sin = table.sin + position * half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

// Pairs (x[i], x[i + dim / 2]): Qwen3's convention, and so the drafter's.
inline void rotate_half_split(float* x, const RopeTable& table, int64_t position) {
  const int64_t half = table.dim / 2;
  const float *cos = table.cos + position * half, *sin = table.sin + position * half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

}  // namespace kdt::cpu
