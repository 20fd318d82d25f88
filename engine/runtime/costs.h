// What rounds cost and yield on this machine: measured at start, refined by every round. One thread (the decode thread).
#pragma once

#include <array>
#include <chrono>
#include <span>
#include <vector>

#include "runtime/round.h"
#include "spec/budget.h"
#include "spec/cut.h"
#include "spec/outlook.h"

namespace kdt {

// A quantity by the number of streams, 1 to 64: points at powers of two, straight lines between.
class ByStreams {
 public:
  static constexpr size_t kPoints = 7;
  void set(int64_t streams, double value) { points_[index(streams)] = value; }   // a power of two
  double at(int64_t streams) const;
  // Moves the points beside by `rate` of the way that the value at `streams` is from `value`.
  void follow(int64_t streams, double value, double rate);

 private:
  static size_t index(int64_t streams);   // of the last point that is not past it
  std::array<double, kPoints> points_{};
};

class RoundCosts {
 public:
  using Clock = std::chrono::steady_clock;
  // Measures behind a short prompt of arbitrary tokens. Passes of the larger sizes for which there is no time within `limit` seconds are guessed.
  void measure(Round& round, Stream& stream, double limit);
  bool measured() const { return !draft_.empty(); }
  const spec::CostTable& verify() const { return verify_; }
  bool guessed(size_t size) const { return guessed_[size]; }   // of CostTable::kRows, at the start
  double draft(int64_t depths, int64_t n_streams) const;   // seconds of draft and build
  // Whether a draft that is less deep takes less time.
  bool depth_counts() const { return draft_.back() > kSameDraft * draft_[1]; }
  double host(int64_t n_streams) const { return host_.at(n_streams); }   // seconds between rounds
  double unrecorded() const { return unrecorded_; }   // seconds that a round takes longer where rounds are recorded and it is not
  // What a round of n_streams that drafts costs over one that does not; n_fixed streams draft in any case.
  spec::RoundPrices prices(int64_t n_streams, int64_t depths, int64_t n_drafts, int64_t n_fixed) const;

  // A round without prompt tokens; `room`: of its pass.
  void observe_verify(int64_t rows, int64_t room, double seconds);
  void observe_draft(int64_t depths, int64_t n_streams, double seconds);
  // Between the last round and this one, which took `round_seconds`.
  void observe_host(int64_t n_streams, double seconds, double round_seconds);
  // A round in which mode auto had a say.
  void observe_rate(double tokens, double seconds);
  // Committed tokens a second, of all streams together: λ.
  double rate() const { return tokens_ / seconds_; }

  // Which calibration a request's trees go by, of spec::kCalibrations.
  static int32_t calibration_of(const Sampling& sampling, bool noise_ranking);
  spec::Calibration& calibration(int32_t index) { return calibration_[static_cast<size_t>(index)]; }
  // Of a pass with room for `room` rows; base_rows of them, and n_roots of these, are verified in any case.
  spec::CutTables cut_tables(int64_t base_rows, int64_t n_roots, int64_t room) const;

 private:
  static constexpr double kSameDraft = 1.05;
  // Both until `end`; `seconds` of passes by CostTable::kRows.
  void measure_passes(Round& round, const Stream& stream, Clock::time_point end, std::span<double> seconds);
  void record_rounds(Round& round, const Stream& stream, Clock::time_point end, std::span<double> seconds);
  struct Times {
    double pass, wall;                  // seconds: to commit, without the draft; with the draft and the host
  };
  Times run(Round& round, const Stream& stream, int64_t n_streams, int64_t tree_nodes, int64_t room, bool record);

  spec::CostTable verify_;
  std::array<bool, spec::CostTable::kEntries> guessed_{};
  double unrecorded_ = 0;
  double padding_ = 0;                  // what a row that a pass has room for costs, in live rows
  std::vector<double> draft_;           // of one stream by depths, [0] unused
  ByStreams crowd_;                     // of a draft of several streams, in drafts of one
  bool crowd_known_ = false;
  ByStreams host_;
  double tokens_ = 1, seconds_ = 1;     // running
  std::array<spec::Calibration, spec::kCalibrations> calibration_;
};

}  // namespace kdt
