#include "spec/budget.h"

#include <algorithm>
#include <cmath>

namespace kdt::spec {
namespace {

constexpr double kRefineRate = 0.05;     // weight of one measured round
constexpr double kOutlier = 3.0;         // a round slower than this many times its entry was disturbed by something else
constexpr double kPriorTrials = 8.0;     // how much evidence outweighs the drafter's own probability
constexpr double kFade = 0.998;          // of a bin's counts with every observation: a memory of 500

}  // namespace

void CostTable::set(int64_t rows, double seconds) {
  const auto at = std::find(kRows.begin(), kRows.end(), rows);
  if (at != kRows.end()) seconds_[static_cast<size_t>(at - kRows.begin())] = seconds;
}

double CostTable::at(int64_t rows) const {
  size_t i = 1;
  while (i + 1 < kRows.size() && kRows[i] < rows) ++i;
  const double low = static_cast<double>(kRows[i - 1]), high = static_cast<double>(kRows[i]);
  const double part = (static_cast<double>(rows) - low) / (high - low);
  return seconds_[i - 1] + part * (seconds_[i] - seconds_[i - 1]);
}

void CostTable::refine(int64_t rows, double seconds) {
  if (rows > kRows.back()) return;
  const double expected = at(rows);
  if (!(seconds > 0) || seconds > kOutlier * expected) return;
  const double ratio = 1 + kRefineRate * (seconds / expected - 1);
  for (size_t i = 0; i < kRows.size(); ++i) {
    const bool below = i + 1 < kRows.size() && kRows[i] <= rows && rows < kRows[i + 1];
    const bool above = i > 0 && kRows[i - 1] < rows && rows <= kRows[i];
    if (below || above || kRows[i] == rows) seconds_[i] *= ratio;
  }
}

Calibration::Calibration() {
  hits_.fill(0);
  mass_.fill(0);
}

size_t Calibration::bin(double q) {
  if (!(q > 0)) return kBins - 1;
  const double half_octaves = std::floor(-2 * std::log2(q));
  return static_cast<size_t>(std::clamp(half_octaves, 0.0, static_cast<double>(kBins - 1)));
}

double Calibration::accept_probability(double q) const {
  if (!(q > 0)) return 0;
  const size_t b = bin(q);
  // Within a bin the rate scales with q: the ratio of what was taken to what the drafter promised.
  const double ratio = (hits_[b] + kPriorTrials * q) / (mass_[b] + kPriorTrials * q);
  return std::clamp(q * ratio, 0.0, 1.0);
}

void Calibration::observe(double q, bool accepted) {
  const size_t b = bin(q);
  hits_[b] = hits_[b] * kFade + (accepted ? 1 : 0);
  mass_[b] = mass_[b] * kFade + q;
}

Choice choose_nodes(std::span<const double> gain, int64_t least, const CostTable& verify, double draft_seconds,
                    double lambda) {
  const auto n_max = static_cast<int64_t>(gain.size());
  double tokens = 1;
  Choice best{0, 1, 0};
  bool any = false;
  for (int64_t n = 0; n <= n_max; ++n) {
    if (n > 0) tokens += gain[static_cast<size_t>(n - 1)];
    if (n < least) continue;
    const double value = tokens - lambda * (draft_seconds + verify.at(n + 1));
    if (!any || value > best.value) best = {n, tokens, value};
    any = true;
  }
  return best;
}

}  // namespace kdt::spec
