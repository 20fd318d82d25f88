#include "spec/budget.h"

#include <algorithm>
#include <cmath>

namespace kdt::spec {
namespace {

constexpr double kRefineRate = 0.05;     // weight of one measured round
constexpr double kOutlier = 3.0;         // a round slower than this many times its entry was disturbed by something else
constexpr double kFade = 0.998;          // of a bin's counts with every observation: a memory of 500

}  // namespace

void CostTable::set(int64_t rows, double seconds) {
  const auto at = std::find(kRows.begin(), kRows.end(), rows);
  if (at != kRows.end()) seconds_[static_cast<size_t>(at - kRows.begin())] = seconds;
}

void CostTable::refine(int64_t rows, double seconds) {
  const double expected = at(rows);
  if (!(seconds > 0) || seconds > kOutlier * expected) return;
  const double ratio = 1 + kRefineRate * (seconds / expected - 1);
  for (size_t i = 0; i < kRows.size(); ++i) {
    const bool below = i + 1 < kRows.size() && kRows[i] <= rows && rows < kRows[i + 1];
    const bool above = i > 0 && kRows[i - 1] < rows && rows <= kRows[i];
    const bool beyond = rows > kRows.back() && i + 2 >= kRows.size();   // the slope that extends the table
    if (below || above || beyond || kRows[i] == rows) seconds_[i] *= ratio;
  }
}

void Calibration::observe(double q, bool accepted) {
  const size_t b = bin(q);
  counts_.hits[b] = counts_.hits[b] * kFade + (accepted ? 1 : 0);
  counts_.mass[b] = counts_.mass[b] * kFade + q;
}

Choice choose_nodes(std::span<const double> gain, int64_t roots, int64_t base_rows, const double* verify, double lambda) {
  const auto value_of = [&](double tokens, size_t n) {
    return tokens - lambda * CostTable::at(verify, static_cast<double>(base_rows) + static_cast<double>(n));
  };
  double tokens = static_cast<double>(roots);
  Choice best{0, tokens, value_of(tokens, 0)};
  for (size_t n = 1; n <= gain.size(); ++n) {
    tokens += gain[n - 1];
    const double value = value_of(tokens, n);
    if (value > best.value) best = {static_cast<int64_t>(n), tokens, value};
  }
  return best;
}

}  // namespace kdt::spec
