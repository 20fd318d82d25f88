// What the experts' kernels know of the shapes of their weights, and the function between their two products.
#pragma once

#include <algorithm>

#include "cuda/experts_int4.cuh"

namespace kdt::cuda {

constexpr int64_t kSplitInputs = 4096;   // gate and up of so many inputs have four times the slices
constexpr int kSplits = 4, kLogSplits = 2;
constexpr int kLogWarps = 2;             // of kExpertWarps
constexpr int64_t kMostAsked = 8 << 20;  // of the shared expert's down

struct Int4Shape {
  int32_t n_out, tiles, groups, stages;
  int32_t spread;                        // inputs of a group of 32 that exist
  explicit Int4Shape(const Matrix& m)
      : n_out(static_cast<int32_t>(m.n_out)),
        tiles(static_cast<int32_t>(divide_up(m.n_out, kTileOutputs))),
        groups(static_cast<int32_t>(m.n_in / std::min(m.group_size, kTileGroup))),
        stages((groups + 1) / 2),
        spread(static_cast<int32_t>(std::min(m.group_size, kTileGroup))) {}
};

struct DenseShape {
  const std::byte* fragments;
  int32_t tiles, steps, stages;
  DenseShape(const Matrix& m, int64_t tiles)
      : fragments(static_cast<const std::byte*>(m.data)),
        tiles(static_cast<int32_t>(tiles)),
        steps(static_cast<int32_t>(steps_of(m.n_in))),
        stages((steps + kStageSteps - 1) / kStageSteps) {}
};

__device__ inline float swiglu(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

}  // namespace kdt::cuda
