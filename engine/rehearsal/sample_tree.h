#pragma once

#include <cstdint>
#include <vector>

#include "runtime/round.h"

namespace kdt {

// A tree as a verify pass meets it: the drafter's likeliest chain first, then branches off it, none deeper than that.
struct SampleTree {
  std::vector<int32_t> token, parent, depth;
  std::vector<float> weight;
  SampleTree(int64_t nodes, int64_t chain, int64_t first_token, int64_t vocab, int64_t salt)
      : weight(static_cast<size_t>(nodes)) {
    for (int64_t i = 0; i < nodes; ++i) {
      auto above = static_cast<int32_t>(i <= chain ? i - 1 : (i - chain - 1) / 2);
      if (i > 0 && depth[static_cast<size_t>(above)] >= chain) above = 0;
      token.push_back(static_cast<int32_t>(first_token + (7919 * (i + 131 * salt) + 17) % vocab));
      parent.push_back(above);
      depth.push_back(i == 0 ? 0 : depth[static_cast<size_t>(above)] + 1);
    }
  }
  Tree view() const { return {static_cast<int64_t>(token.size()) - 1, token, parent, depth, weight}; }
};

}  // namespace kdt
