// Whether the streams of mode auto draft, and how much room their trees get: decided before each round from what drafts lately
// showed. It outlives a request: texts that follow each other are often alike. One thread (the decode thread).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "runtime/costs.h"
#include "runtime/round.h"
#include "spec/outlook.h"

namespace kdt {

// Of the streams that decode in a round.
struct DraftWish {
  std::array<int64_t, 2> n_may{};      // in mode auto, with room for a draft: greedy; temperature > 0
  int64_t n_new = 0;                   // of them, without a draft so far
  int64_t n_streams = 0;
  int64_t n_fixed = 0;                 // that draft in fixed modes, and their nodes
  int64_t fixed_nodes = 0;
  int64_t prompt_rows = 0;             // of the same pass
};

struct DraftChoice {
  std::array<bool, 2> drafts{};        // greedy; temperature > 0
  int64_t tree_nodes = 0;              // of each stream's tree, before the cut
  int64_t depths = 0;
  int64_t room = 0;                    // rows of the pass
  bool any() const { return drafts[0] || drafts[1]; }
};

class DraftHabits {
 public:
  // Nodes a stream that a pass may have room for, a mean.
  static constexpr std::array<int64_t, 15> kNodes = {1, 2, 3, 4, 5, 7, 9, 11, 13, 15, 19, 23, 31, 47, 63};
  // Of its tree then: streams need not share alike.
  static constexpr int64_t tree_nodes(int64_t nodes) { return std::min(kNodes.back(), nodes + std::min<int64_t>((nodes + 3) / 2, 6)); }

  static size_t index(const Sampling& sampling) { return sampling.temperature > 0; }
  // Rows of such a pass; none when its trees would not fit.
  static std::optional<int64_t> room(const Round& round, int64_t n_streams, int64_t nodes, int64_t other_rows);

  DraftChoice choose(const DraftWish& wish, const RoundCosts& costs, const Round& round);
  // What became of the last choice: the outlook its draft gave, and how deep the trees were that it was cut to.
  void learn(const spec::Outlook& outlook, int64_t depth);

 private:
  struct Habit {
    spec::Outlook outlook;
    int64_t since_draft = 0;           // plain rounds since the last draft
    int64_t probe_after = 8;           // plain rounds until the drafter is asked again
    double depth = 4;                  // lately verified: recent largest, fading
  };

  DraftChoice best_of(std::array<bool, 2> drafts, const RoundCosts& costs, const Round& round, double& rate);

  std::array<Habit, 2> habit_;
  int64_t last_probe_ = 8;             // plain rounds between probes at most
  // Of the round in hand
  DraftWish wish_;
  DraftChoice choice_;
  spec::RoundPrices prices_{};
};

}  // namespace kdt
