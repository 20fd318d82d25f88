// Speculation that never loses: decides before each round whether to draft and how deep, and after the draft how many
// nodes to verify. Fixed modes (off, chain, tree) keep to what the request asked for. One thread (the decode thread).
#pragma once

#include "runtime/costs.h"
#include "runtime/request.h"
#include "runtime/round.h"

namespace kdt {

// The decisions of one request. Costs are the engine's; what the drafter's probabilities are worth is learnt apart for
// greedy decoding and for each ranking at temperature > 0.
class Controller {
 public:
  Controller(RoundCosts& costs, const RequestSettings& settings, const Round& round);

  // What the scheduler may count with at most.
  int64_t budget() const { return mode_ == Speculate::off ? 0 : budget_; }
  int64_t depths() const { return mode_ == Speculate::off ? 0 : max_depths_; }
  bool automatic() const { return mode_ == Speculate::automatic; }

  // `wanted`: tokens the request still wants, at least 1; `depth_room`: positions behind the root that may be used;
  // `budget`: nodes there is room for in the pass.
  DecodePlan plan(int64_t wanted, int64_t depth_room, int64_t budget);
  // In mode auto: what was verified of the tree, and what the draft turned out to be worth over a plain round.
  void decided(const Tree& tree, double value);
  void observe(const DecodeResult& result);

 private:
  bool wants_draft() const;

  RoundCosts& costs_;
  Speculate mode_;
  int64_t budget_, max_depths_, last_probe_ = 0;
  bool spine_, noise_ranking_;
  int32_t calibration_index_;
  spec::Calibration& calibration_;
  DraftHabit& habit_;
  DecodePlan current_;
};

}  // namespace kdt
