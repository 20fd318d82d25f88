// How many nodes of a draft tree pay: expected tokens minus λ times the round's time.
//
// Nodes come in the order of build_tree, so the tree of any budget is a prefix and one scan over all n finds the best. The
// scan does not stop at the first n that gains nothing: the cost of a mixture of experts is concave in n.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <span>

#include "base/host_device.h"

namespace kdt::spec {

// What a round costs, in seconds, by verified rows; measured at start, refined while running.
class CostTable {
 public:
  static constexpr size_t kEntries = 19;
  static constexpr std::array<int64_t, kEntries> kRows = {1,  2,  3,  4,  5,  6,  8,   10,  12, 16,
                                                          24, 32, 48, 64, 96, 128, 192, 256, 512};
  static constexpr int64_t kOneStream = 64;      // rows of the largest tree that mode auto verifies for a lone stream

  void set(int64_t rows, double seconds);        // one of kRows
  // A measured round: moves the neighbouring entries towards it; the last two when it is larger than all of them.
  void refine(int64_t rows, double seconds);
  double at(int64_t rows) const { return at(seconds_.data(), static_cast<double>(rows)); }
  // Interpolated; past the last entry extrapolated by its slope.
  static double at(const double* seconds, double rows) { return at(kRows.data(), seconds, rows); }
  // The same where kRows is not at hand; `sizes` is a copy of it.
  KDT_HOST_DEVICE static double at(const int64_t* sizes, const double* seconds, double rows) {
    size_t i = 1;
    while (i + 1 < kEntries && static_cast<double>(sizes[i]) < rows) ++i;
    const double low = static_cast<double>(sizes[i - 1]), high = static_cast<double>(sizes[i]);
    const double part = (rows - low) / (high - low);
    return seconds[i - 1] + part * (seconds[i] - seconds[i - 1]);
  }
  std::span<const double, kEntries> seconds() const { return seconds_; }

 private:
  std::array<double, kEntries> seconds_{};
};

// How often the target takes a node whose parent it took, by the drafter's conditional probability: counts in bins of
// log2 q with a prior that trusts the drafter, fading so that it follows the text.
class Calibration {
 public:
  static constexpr size_t kBins = 24;            // half an octave each: q from 1 down to 2^-12
  struct Counts {
    double hits[kBins], mass[kBins];             // accepted, and the probability the drafter promised
  };

  KDT_HOST_DEVICE static double accept_probability(const Counts& counts, double q) {
    if (!(q > 0)) return 0;
    const size_t b = bin(q);
    // Within a bin the rate scales with q: the ratio of what was taken to what the drafter promised.
    const double ratio = (counts.hits[b] + kPriorTrials * q) / (counts.mass[b] + kPriorTrials * q);
    const double p = q * ratio;
    return p > 0 ? (p < 1 ? p : 1.0) : 0.0;
  }
  double accept_probability(double q) const { return accept_probability(counts_, q); }
  void observe(double q, bool accepted);
  const Counts& counts() const { return counts_; }

 private:
  static constexpr double kPriorTrials = 8;      // how much evidence outweighs the drafter's own probability

  KDT_HOST_DEVICE static size_t bin(double q) {
    if (!(q > 0)) return kBins - 1;
    const double half_octaves = std::floor(-2 * std::log2(q));
    if (!(half_octaves > 0)) return 0;
    return half_octaves < static_cast<double>(kBins - 1) ? static_cast<size_t>(half_octaves) : kBins - 1;
  }

  Counts counts_{};
};

struct Choice {
  int64_t n_nodes;       // without the root
  double tokens;         // expected tokens committed, the bonus counted
  double value;          // tokens - λ · seconds of the pass; the draft is made already
};

// The best n in [0, n_max] for nodes with `gain[i]` = probability that node i + 1 is accepted, of one stream or of several in
// one order. `base_rows` are verified without any: the roots, and prompt tokens of the same pass; `roots` bonus tokens are sure.
// `verify`: seconds by CostTable::kRows.
Choice choose_nodes(std::span<const double> gain, int64_t roots, int64_t base_rows, const double* verify, double lambda);

}  // namespace kdt::spec
