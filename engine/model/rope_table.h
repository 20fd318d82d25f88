// Cos and sin tables with YaRN's blended frequencies (Peng et al., arXiv 2309.00071, as DeepSeek-V3 uses it).
#pragma once

#include <cstdint>
#include <optional>

#include "checkpoint/config.h"
#include "ops/ops.h"

namespace kdt {

// 0.1 · m · ln(factor) + 1, or 1 when nothing is scaled.
double yarn_mscale(double factor, double m);

// Owns the table of positions [0, max_context) for vectors of `dim`; cos and sin carry YaRN's amplitude.
class RopeTables {
 public:
  RopeTables(Ops& ops, int64_t dim, double theta, const std::optional<Yarn>& yarn, int64_t max_context);
  RopeTable view() const;

 private:
  int64_t dim_, n_;
  Buffer table_;   // cos [n, dim / 2], then sin
};

}  // namespace kdt
