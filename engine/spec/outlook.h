// What drafting is expected to bring, and how many rows a pass should have room for: decided before the draft is made.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "spec/budget.h"

namespace kdt::spec {

// Draft tokens of a stream that are expected to be accepted, by how many nodes of it are verified: means over streams.
struct Outlook {
  static constexpr size_t kPoints = 12;
  static constexpr std::array<double, kPoints> kNodes = {0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 32, 63};

  // Before there was a draft: a drafter that is taken at its word for a token or two.
  std::array<double, kPoints> tokens = {0.19, 0.36, 0.62, 0.98, 1.2, 1.36, 1.57, 1.68, 1.77, 1.79, 1.8, 1.8};

  // Between points along a straight line; from the last on as much as there.
  double at(double nodes) const;
  // Moves towards what a draft showed by `weight` of the way, 0 to 1. The draft's trees had at most `most_nodes`: beyond them it
  // shows nothing, and the curve only goes on rising.
  void follow(const Outlook& seen, double weight, double most_nodes);
};

// Seconds of a round that drafts.
struct RoundPrices {
  const double* verify;        // by CostTable::kRows
  double padding;              // what a row that a recorded pass has room for costs, in live rows
  double draft_seconds;        // over a round of the same streams without
  double host_seconds;         // between rounds

  // A pass with room for `room` rows of which `rows` are live.
  double pass(double rows, int64_t room) const;
};

struct Room {
  int64_t rows = 0;            // of the pass, roots and all; 0: no draft is better
  double rate = 0;             // committed tokens a second that are expected then
};

// The best of `rooms` for n_drafts streams of n_roots, or none where it is not at least 3 % better than plain rounds: most tokens a
// second, which over many rounds alike is most tokens. `base_rows` are verified in any case. Of equals the first.
Room choose_room(const Outlook& outlook, int64_t n_drafts, int64_t n_roots, int64_t base_rows, const RoundPrices& prices,
                 std::span<const int64_t> rooms);

}  // namespace kdt::spec
