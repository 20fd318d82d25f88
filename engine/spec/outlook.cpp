#include "spec/outlook.h"

#include <algorithm>

namespace kdt::spec {
namespace {

// What a draft must promise over a plain round: of many guesses the best is a little too good, and streams that speculate end
// one after the other.
constexpr double kLeastGain = 1.03;

}  // namespace

double Outlook::at(double nodes) const {
  double left = 0, of_left = 0;
  for (size_t i = 0; i < kPoints; ++i) {
    if (nodes <= kNodes[i]) return of_left + (tokens[i] - of_left) * (nodes - left) / (kNodes[i] - left);
    left = kNodes[i];
    of_left = tokens[i];
  }
  return of_left;
}

void Outlook::follow(const Outlook& seen, double weight, double most_nodes) {
  for (size_t i = 0; i < kPoints; ++i) {
    tokens[i] += weight * (seen.tokens[i] - tokens[i]);
    if (i > 0 && kNodes[i] > most_nodes) tokens[i] = std::max(tokens[i], tokens[i - 1]);
  }
}

double RoundPrices::pass(double rows, int64_t room) const {
  const double live = CostTable::at(verify, rows);
  return live + padding * std::max(0.0, CostTable::at(verify, static_cast<double>(room)) - live);
}

Room choose_room(const Outlook& outlook, int64_t n_drafts, int64_t n_roots, int64_t base_rows, const RoundPrices& prices,
                 std::span<const int64_t> rooms) {
  const auto roots = static_cast<double>(n_roots), drafts = static_cast<double>(n_drafts);
  const double plain = roots / (prices.host_seconds + CostTable::at(prices.verify, static_cast<double>(base_rows)));
  Room best{0, plain};
  for (const int64_t room : rooms) {
    const double nodes = std::min(static_cast<double>(room - base_rows), drafts * Outlook::kNodes.back());
    if (nodes <= 0) continue;
    const double seconds = prices.host_seconds + prices.draft_seconds +
                           prices.pass(static_cast<double>(base_rows) + nodes, room);
    const double rate = (roots + drafts * outlook.at(nodes / drafts)) / seconds;
    if (rate > std::max(best.rate, kLeastGain * plain)) best = {room, rate};
  }
  return best;
}

}  // namespace kdt::spec
