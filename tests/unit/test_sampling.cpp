// The law of sampled tokens through trees: many seeds behind one prompt, against the target's own probabilities.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <map>
#include <numeric>

#include "model_support.h"

using namespace kdt;
using namespace kdt::test;

namespace {

using Law = std::map<int32_t, double>;   // probability by token

// temperature, top-k, top-p, min-p, as docs/numerics.md states them.
Law law_of(std::span<const float> logits, const Sampling& s) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto at = [&](int32_t token) { return static_cast<double>(logits[static_cast<size_t>(token)]); };
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return at(a) > at(b); });
  if (s.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(s.top_k)));
  std::vector<double> p;
  for (const int32_t token : order) p.push_back(std::exp((at(token) - at(order[0])) / s.temperature));
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  Law law;
  double before = 0, kept = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    const double share = p[i] / sum;
    if (before < s.top_p && p[i] >= s.min_p) {
      law[order[i]] = share;
      kept += share;
    }
    before += share;
  }
  for (auto& [token, share] : law) share /= kept;
  return law;
}

struct Outcomes {
  std::vector<double> expected, observed;
};

// A sure outcome needs no test; cells that expect fewer than 5 draws are one cell.
void check_chi_square(const Outcomes& cells) {
  double statistic = 0, rare_expected = 0, rare_observed = 0;
  int n_cells = 0;
  const auto add = [&](double expected, double observed) {
    statistic += (observed - expected) * (observed - expected) / expected;
    ++n_cells;
  };
  for (size_t i = 0; i < cells.expected.size(); ++i) {
    if (cells.expected[i] >= 5) {
      add(cells.expected[i], cells.observed[i]);
    } else {
      rare_expected += cells.expected[i];
      rare_observed += cells.observed[i];
    }
  }
  if (rare_expected >= 5) add(rare_expected, rare_observed);
  else CHECK(rare_observed < rare_expected + 10);
  REQUIRE(n_cells >= 3);
  // Wilson and Hilferty's cube root approximation of the quantile at p = 1e-4.
  const double freedom = n_cells - 1, z = 3.719, spread = 2 / (9 * freedom);
  const double critical = freedom * std::pow(1 - spread + z * std::sqrt(spread), 3);
  CAPTURE(n_cells);
  CHECK(statistic < critical);
}

struct Setting {
  Sampling sampling;
  int64_t part;    // one draw in `part`
};

}  // namespace

TEST_CASE("through trees of any size the first token and the pair of the first two follow the target's law") {
  const int64_t n_draws = full_run() ? 200'000 : 4'000;
  const std::vector<int32_t> prompt{1, 500, 77, 900, 12, 45, 1024, 3, 260, 261};
  Bundled model(1, 1);
  Stream s = model.stream(0);
  model.prefill(s, prompt, 512, false, true);
  const Stream start = s;
  const auto vocab = static_cast<size_t>(model.vocab());

  for (const Setting& setting : {Setting{{1.0, 1, 0, 32, 0, 0}, 1}, Setting{{1.3, 0.9, 0.02, 24, 0, 0}, 5}}) {
    // The law of the first token, and of the second behind each first one: a tree of all live tokens.
    s = start;
    std::vector<int32_t> token{s.root}, parent{-1}, depth{0};
    std::vector<float> weight(64, 0);
    const Tree root_alone{0, token, parent, depth, {weight.data(), 1}};
    const Law first = law_of(model.round->verify(s, root_alone, true), setting.sampling);
    REQUIRE(first.size() <= 32);
    for (const auto& entry : first) {
      token.push_back(entry.first);
      parent.push_back(0);
      depth.push_back(1);
    }
    const Tree live{static_cast<int64_t>(first.size()), token, parent, depth, weight};
    const auto logits = model.round->verify(s, live, true);
    Outcomes firsts, pairs;
    std::map<int32_t, size_t> first_cell;
    std::map<std::pair<int32_t, int32_t>, size_t> pair_cell;
    const auto n = static_cast<double>(n_draws / setting.part);
    for (const auto& [one, p] : first) {
      first_cell[one] = firsts.expected.size();
      firsts.expected.push_back(n * p);
      const size_t row = first_cell[one] + 1;
      for (const auto& [two, q] : law_of(logits.subspan(row * vocab, vocab), setting.sampling)) {
        pair_cell[{one, two}] = pairs.expected.size();
        pairs.expected.push_back(n * p * q);
      }
    }
    firsts.observed.assign(firsts.expected.size(), 0);
    pairs.observed.assign(pairs.expected.size(), 0);

    int64_t outside = 0, accepted = 0;
    for (int64_t draw = 0; draw < n_draws / setting.part; ++draw) {
      s = start;
      s.sampling = setting.sampling;
      s.sampling.seed = static_cast<uint64_t>(draw) * 0x9E3779B97F4A7C15u;
      DecodePlan plan;
      plan.budget = std::array<int64_t, 4>{1, 2, 4, 8}[static_cast<size_t>(draw % 4)];
      plan.depths = 2;
      plan.noise_ranking = draw % 3 != 0;
      plan.spine = draw % 5 == 0;
      std::vector<int32_t> tokens;
      while (tokens.size() < 2) {
        const DecodeResult result = test::decode(*model.round, s, plan, model.time);
        tokens.insert(tokens.end(), result.tokens.begin(), result.tokens.end());
        accepted += result.tokens.size() > 1;
      }
      const auto one = first_cell.find(tokens[0]);
      const auto two = pair_cell.find({tokens[0], tokens[1]});
      if (one == first_cell.end() || two == pair_cell.end()) {
        ++outside;
        continue;
      }
      firsts.observed[one->second] += 1;
      pairs.observed[two->second] += 1;
    }
    CHECK(outside == 0);
    CHECK(accepted > n_draws / setting.part / 10);   // the drafts did matter
    check_chi_square(firsts);
    check_chi_square(pairs);
  }
}
