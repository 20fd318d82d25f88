// The rotary fields that the target's and the drafter's config.json share.
#pragma once

#include <optional>

#include "checkpoint/config.h"
#include "checkpoint/json_fields.h"

namespace kdt {

struct Rope {
  double theta;
  std::optional<Yarn> yarn;
};

// `rope_theta` and `rope_scaling`, or both inside `rope_parameters` (the spelling of transformers 5). YaRN fields that
// are absent get the values of DeepSeek's reference: beta_fast 32, beta_slow 1, mscale 1, mscale_all_dim 0.
Rope parse_rope(const Fields& config);

}  // namespace kdt
