// Speculation that never loses: decides before each round whether to draft and how deep, and after the draft how many
// nodes to verify. Fixed modes (off, chain, tree) keep to what the request asked for. One thread (the decode thread).
#pragma once

#include <span>
#include <vector>

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
  // The probability of each node of a tree to be accepted: appends [n_nodes].
  void add_gains(const Tree& tree, std::vector<double>& gains) const;
  // In mode auto: what the draft turned out to be worth over a plain round, and how much of it is verified.
  void decided(const Tree& tree, int64_t n_nodes, double value);
  void observe(const DecodeResult& result);

 private:
  bool wants_draft() const;

  RoundCosts& costs_;
  Speculate mode_;
  int64_t budget_, max_depths_;
  bool spine_, noise_ranking_;
  spec::Calibration& calibration_;
  DraftHabit& habit_;
  DecodePlan current_;
};

// One stream of a round.
struct Speculation {
  Controller* controller;
  DecodePlan plan;
};

// The cut of a round (RoundPlan::cut): of the trees of all streams in mode auto, the nodes that pay together. `base_rows`: rows
// verified anyway, the roots among them.
class JointCut {
 public:
  void operator()(std::span<const Speculation> streams, int64_t base_rows, const RoundCosts& costs,
                  std::span<const Tree> trees, std::span<int64_t> n_nodes);

 private:
  struct Head {
    double gain;
    size_t stream;
    size_t node;     // of the stream's gains
  };
  std::vector<double> gains_, merged_;      // of all streams, one after the other; in the order they are taken
  std::vector<size_t> first_, taken_from_;  // first gain of each stream; whose node each merged one is
  std::vector<Head> heads_;
};

}  // namespace kdt
