// What one request's drafts are to be. Fixed modes (off, chain, tree) keep to what it asked for; mode auto to what DraftHabits
// chose for the streams of the round. One thread (the decode thread).
#pragma once

#include <algorithm>

#include "runtime/costs.h"
#include "runtime/request.h"
#include "runtime/round.h"

namespace kdt {

// Costs are the engine's; what the drafter's probabilities are worth is learnt apart for greedy decoding and for each ranking at
// temperature > 0.
class Controller {
 public:
  Controller(RoundCosts& costs, const RequestSettings& settings, const Round& round);

  // What the scheduler may count with at most.
  int64_t budget() const { return mode_ == Speculate::off ? 0 : budget_; }
  int64_t depths() const { return mode_ == Speculate::off ? 0 : max_depths_; }
  bool asked() const { return asked_; }   // whether mode auto made a draft
  bool automatic() const { return mode_ == Speculate::automatic; }

  // `depth_room`: positions behind the root that may be used; `budget`: nodes there is room for in the pass.
  // Whether a draft may be worth it in mode auto.
  bool may_draft(int64_t depth_room, int64_t budget) const {
    return automatic() && depth_room > 0 && std::min(budget, budget_) > 0;
  }
  // Of a mode other than auto; none of mode auto.
  DecodePlan plan(int64_t depth_room, int64_t budget);
  // Of mode auto, where one may be worth it.
  DecodePlan draft(int64_t depth_room, int64_t budget);
  void observe(const DecodeResult& result);

 private:
  Speculate mode_;
  int64_t budget_, max_depths_;
  bool spine_, noise_ranking_;
  int32_t calibration_index_;
  spec::Calibration& calibration_;
  bool drafted_ = false, asked_ = false;
};

}  // namespace kdt
