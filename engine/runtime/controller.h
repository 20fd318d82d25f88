// Speculation that never loses: decides before each round whether to draft and how deep, and after the draft how many
// nodes to verify. Fixed modes (off, chain, tree) keep to what the request asked for.
//
// Costs are the engine's: measured at start, refined by every round. What the drafter's probabilities are worth is
// learnt too, apart for greedy decoding and for each ranking at temperature > 0. One thread (the decode thread).
#pragma once

#include <array>
#include <vector>

#include "runtime/request.h"
#include "runtime/round.h"
#include "spec/budget.h"

namespace kdt {

// What drafting was lately worth in mode auto. It outlives a request: texts that follow each other are often alike, and a
// request that starts from what is known need not find it out again.
struct DraftHabit {
  double value = 0;             // running: what choose_nodes expected of a draft, less what a plain round is worth
  double last_value = 0;        // of the last draft alone
  int64_t since_draft = 0;      // plain rounds since the last draft
  int64_t probe_after = 8;      // plain rounds until the drafter is asked again
  double nodes = 16, depth = 4; // lately chosen: recent largest, fading
};

// The engine's costs and calibration, shared by all requests.
class RoundCosts {
 public:
  // Measures behind a short prompt of arbitrary tokens; a few tens of milliseconds on the bundled model.
  void measure(Round& round, Stream& stream);
  bool measured() const { return !draft_.empty(); }
  void observe_verify(int64_t rows, double seconds) { verify_.refine(rows, seconds); }
  void observe_draft(int64_t depths, double seconds);
  const spec::CostTable& verify() const { return verify_; }
  double draft(int64_t depths) const;   // seconds of draft and build
  spec::Calibration& calibration(const Sampling& sampling, bool noise_ranking);
  DraftHabit& habit(const Sampling& sampling) { return habit_[sampling.temperature > 0]; }

 private:
  spec::CostTable verify_;
  std::vector<double> draft_;           // by depths, [0] unused
  std::array<spec::Calibration, 3> calibration_;
  std::array<DraftHabit, 2> habit_;     // greedy; temperature > 0
};

// The decisions of one request.
class Controller {
 public:
  Controller(RoundCosts& costs, const RequestSettings& settings, const Round& round);

  // `wanted`: tokens the request still wants, at least 1; `depth_room`: positions left behind the root.
  DecodePlan plan(int64_t wanted, int64_t depth_room);
  void observe(const DecodeResult& result);

 private:
  DecodePlan plan_fixed(int64_t depth_room) const;
  bool wants_draft() const;
  int64_t cut(const Tree& tree);

  RoundCosts& costs_;
  Speculate mode_;
  int64_t budget_, max_depths_;
  bool spine_, noise_ranking_;
  spec::Calibration& calibration_;
  DraftHabit& habit_;
  double tokens_, seconds_;             // running, committed and spent: λ is their ratio
  DecodePlan current_;
  std::vector<double> gain_;
};

}  // namespace kdt
