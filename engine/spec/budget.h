// How many nodes of a draft tree pay: expected tokens minus λ times the round's time.
//
// Nodes come in the order of build_tree, so the tree of any budget is a prefix and one scan over all n finds the best. The
// scan does not stop at the first n that gains nothing: the cost of a mixture of experts is concave in n.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace kdt::spec {

// What a round costs, in seconds, by verified rows; measured at start, refined while running.
class CostTable {
 public:
  static constexpr std::array<int64_t, 14> kRows = {1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64};

  void set(int64_t rows, double seconds);        // one of kRows
  // A measured round: moves the neighbouring entries towards it; the last two when it is larger than all of them.
  void refine(int64_t rows, double seconds);
  double at(int64_t rows) const;                 // interpolated; past the last entry extrapolated by its slope
  std::span<const double> seconds() const { return seconds_; }

 private:
  std::array<double, kRows.size()> seconds_{};
};

// How often the target takes a node whose parent it took, by the drafter's conditional probability: counts in bins of
// log2 q with a prior that trusts the drafter, fading so that it follows the text.
class Calibration {
 public:
  Calibration();
  double accept_probability(double q) const;
  void observe(double q, bool accepted);

 private:
  static constexpr size_t kBins = 24;            // half an octave each: q from 1 down to 2^-12
  static size_t bin(double q);
  std::array<double, kBins> hits_, mass_;       // accepted, and the probability the drafter promised
};

struct Choice {
  int64_t n_nodes;       // without the root
  double tokens;         // expected tokens committed, the bonus counted
  double value;          // tokens - λ · seconds
};

// The best n in [0, n_max] for nodes with `gain[i]` = probability that node i + 1 is accepted, of one stream or of several in
// one order. `base_rows` are verified without any: the roots, and prompt tokens of the same pass; `roots` bonus tokens are sure.
Choice choose_nodes(std::span<const double> gain, int64_t roots, int64_t base_rows, const CostTable& verify,
                    double draft_seconds, double lambda);

}  // namespace kdt::spec
