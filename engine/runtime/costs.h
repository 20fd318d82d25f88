// What rounds cost and yield on this machine: measured at start, refined by every round. One thread (the decode thread).
#pragma once

#include <array>
#include <vector>

#include "runtime/round.h"
#include "spec/budget.h"
#include "spec/cut.h"

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

class RoundCosts {
 public:
  // Measures behind a short prompt of arbitrary tokens. Passes of the larger sizes for which there is no time within `limit` seconds are guessed.
  void measure(Round& round, Stream& stream, double limit);
  bool measured() const { return !draft_.empty(); }
  const spec::CostTable& verify() const { return verify_; }
  double draft(int64_t depths, int64_t n_streams) const;   // seconds of draft and build

  // A round without prompt tokens.
  void observe_verify(int64_t rows, double seconds) { verify_.refine(rows, seconds); }
  void observe_draft(int64_t depths, int64_t n_streams, double seconds);
  // A round in which mode auto had a say.
  void observe_rate(double tokens, double seconds);
  // Committed tokens a second, of all streams together: λ.
  double rate() const { return tokens_ / seconds_; }

  // Which calibration a request's trees go by, of spec::kCalibrations.
  static int32_t calibration_of(const Sampling& sampling, bool noise_ranking);
  spec::Calibration& calibration(int32_t index) { return calibration_[static_cast<size_t>(index)]; }
  // Of a round in which n_drafts streams draft up to `depths` positions, n_automatic of them in mode auto. Streams of fixed modes
  // draft whatever the others do; their share of the draft is theirs.
  spec::CutTables cut_tables(int64_t base_rows, int64_t n_roots, int64_t depths, int64_t n_drafts, int64_t n_automatic) const;
  DraftHabit& habit(const Sampling& sampling) { return habit_[sampling.temperature > 0]; }

 private:
  void record_rounds(Round& round, Stream& stream);

  spec::CostTable verify_;
  std::vector<double> draft_;           // of one stream by depths, [0] unused
  double draft_growth_ = 0.6;           // of a draft for each further stream, in drafts of one
  bool growth_seen_ = false;
  double tokens_ = 1, seconds_ = 1;     // running
  std::array<spec::Calibration, spec::kCalibrations> calibration_;
  std::array<DraftHabit, 2> habit_;     // greedy; temperature > 0
};

}  // namespace kdt
