#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "spec/accept.h"
#include "spec/budget.h"
#include "spec/tree_build.h"

using namespace kdt::spec;

namespace {

struct Case {
  int64_t depths, k;
  std::vector<int32_t> token;
  std::vector<float> log_q;
};

// Few distinct values, so that ties are common.
Case random_case(std::mt19937& random, int64_t depths, int64_t k) {
  Case c{depths, k, {}, {}};
  for (int64_t d = 0; d < depths; ++d) {
    std::vector<float> row;
    for (int64_t r = 0; r < k; ++r) row.push_back(-0.25f * static_cast<float>(random() % 8));
    std::sort(row.rbegin(), row.rend());
    for (int64_t r = 0; r < k; ++r) {
      c.token.push_back(static_cast<int32_t>(100 * d + r));
      c.log_q.push_back(random() % 40 == 0 && r == k - 1 ? -std::numeric_limits<float>::infinity() : row[static_cast<size_t>(r)]);
    }
  }
  return c;
}

struct Built {
  int64_t n;
  std::vector<int32_t> token, parent, depth;
  std::vector<float> weight;
};

Built build(const Case& c, int64_t budget, bool spine) {
  const auto size = static_cast<size_t>(budget + 1);
  Built b{0, std::vector<int32_t>(size), std::vector<int32_t>(size), std::vector<int32_t>(size), std::vector<float>(size)};
  b.n = build_tree({c.token.data(), c.log_q.data(), c.depths, c.k}, budget, spine,
                   {b.token.data(), b.parent.data(), b.depth.data(), b.weight.data()});
  return b;
}

std::vector<int32_t> path_of(const Built& b, int64_t node) {
  std::vector<int32_t> path;
  for (auto i = static_cast<size_t>(node); i != 0; i = static_cast<size_t>(b.parent[i])) path.push_back(b.token[i]);
  std::reverse(path.begin(), path.end());
  return path;
}

// Every prefix with its weight, in the order of the rule.
std::vector<std::vector<int32_t>> brute_force(const Case& c) {
  struct Prefix {
    float weight;
    std::vector<int32_t> ranks, tokens;
  };
  std::vector<Prefix> all, layer{{0.0f, {}, {}}};
  for (int64_t d = 0; d < c.depths; ++d) {
    std::vector<Prefix> next;
    for (const Prefix& p : layer)
      for (int64_t r = 0; r < c.k; ++r) {
        Prefix q = p;
        q.weight = p.weight + c.log_q[static_cast<size_t>(d * c.k + r)];
        q.ranks.push_back(static_cast<int32_t>(r));
        q.tokens.push_back(c.token[static_cast<size_t>(d * c.k + r)]);
        next.push_back(q);
      }
    all.insert(all.end(), next.begin(), next.end());
    layer = std::move(next);
  }
  std::sort(all.begin(), all.end(), [](const Prefix& a, const Prefix& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.ranks < b.ranks;
  });
  std::vector<std::vector<int32_t>> paths;
  for (const Prefix& p : all) paths.push_back(p.tokens);
  return paths;
}

}  // namespace

TEST_CASE("the best-first tree is the brute-force one, in the same order, ties included") {
  std::mt19937 random(1);
  for (int i = 0; i < 400; ++i) {
    const int64_t depths = 1 + static_cast<int64_t>(random() % 4), k = 1 + static_cast<int64_t>(random() % 4);
    const Case c = random_case(random, depths, k);
    const auto expected = brute_force(c);
    const Built b = build(c, 40, false);
    REQUIRE(b.n == std::min<int64_t>(40, static_cast<int64_t>(expected.size())));
    for (int64_t node = 1; node <= b.n; ++node) REQUIRE(path_of(b, node) == expected[static_cast<size_t>(node - 1)]);
  }
}

TEST_CASE("trees are prefix-closed and nested over budgets, with and without a spine") {
  std::mt19937 random(2);
  for (int i = 0; i < 100; ++i) {
    const Case c = random_case(random, 1 + static_cast<int64_t>(random() % 15), 1 + static_cast<int64_t>(random() % 64));
    for (const bool spine : {false, true}) {
      const Built full = build(c, kMaxBudget, spine);
      for (int64_t node = 1; node <= full.n; ++node) REQUIRE(full.parent[static_cast<size_t>(node)] < node);
      for (const int64_t budget : {0, 1, 2, 3, 7, 16, 63, 255}) {
        const Built b = build(c, budget, spine);
        REQUIRE(b.n == std::min(budget, full.n));
        for (size_t node = 1; node <= static_cast<size_t>(b.n); ++node) {
          REQUIRE(b.token[node] == full.token[node]);
          REQUIRE(b.parent[node] == full.parent[node]);
          REQUIRE(b.weight[node] == full.weight[node]);
        }
        if (spine)
          for (int64_t d = 1; d <= std::min(c.depths, budget); ++d)
            REQUIRE(b.token[static_cast<size_t>(d)] == c.token[static_cast<size_t>((d - 1) * c.k)]);
      }
    }
  }
}

TEST_CASE("a spine changes which nodes come first, never which may come") {
  std::mt19937 random(3);
  for (int i = 0; i < 50; ++i) {
    const Case c = random_case(random, 3, 3);
    const Built plain = build(c, 39, false), spine = build(c, 39, true);
    std::vector<std::vector<int32_t>> a, b;
    for (int64_t node = 1; node <= 39; ++node) {
      a.push_back(path_of(plain, node));
      b.push_back(path_of(spine, node));
    }
    std::sort(a.begin(), a.end());
    std::sort(b.begin(), b.end());
    CHECK(a == b);
  }
}

TEST_CASE("NaN counts as -inf") {
  Case c{2, 2, {1, 2, 3, 4}, {-0.1f, std::nanf(""), std::nanf(""), std::nanf("")}};
  const Built b = build(c, 6, false);
  CHECK(b.n == 6);
  CHECK(b.token[1] == 1);
  CHECK(std::isinf(b.weight[2]));
}

TEST_CASE("accept walks to the first sample that is no child") {
  // 0 -> 1 (t 5), 0 -> 2 (t 6), 2 -> 3 (t 7), 3 -> 4 (t 8)
  const int32_t token[] = {9, 5, 6, 7, 8}, parent[] = {-1, 0, 0, 2, 3};
  int32_t path[5];
  const int32_t all[] = {6, 0, 7, 8, 1};
  CHECK(accept(4, token, parent, all, path) == 4);
  CHECK(path[3] == 4);
  const int32_t none[] = {4, 0, 7, 8, 1};
  CHECK(accept(4, token, parent, none, path) == 1);
  const int32_t first[] = {5, 7, 7, 8, 1};
  CHECK(accept(4, token, parent, first, path) == 2);
  CHECK(accept(0, token, parent, all, path) == 1);
}

TEST_CASE("the budget is the best of an exhaustive scan, even where a greedy stop would miss it") {
  std::mt19937 random(4);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int i = 0; i < 200; ++i) {
    CostTable costs;
    double seconds = 1e-3;
    for (const int64_t rows : CostTable::kRows) {
      costs.set(rows, seconds);
      seconds += uniform(random) * 1e-3;
    }
    std::vector<double> gain;
    for (int n = 0; n < 40; ++n) gain.push_back(uniform(random) * (gain.empty() ? 1 : gain.back()));
    const double lambda = 500 + 1500 * uniform(random), draft = 1e-3 * uniform(random);
    const Choice choice = choose_nodes(gain, 1, 1, costs.seconds().data(), draft, lambda);
    double best = -1e30, tokens = 1;
    for (int64_t n = 0; n <= 40; ++n) {
      if (n > 0) tokens += gain[static_cast<size_t>(n - 1)];
      best = std::max(best, tokens - lambda * (draft + costs.at(n + 1)));
    }
    CHECK(choice.value == doctest::Approx(best));
  }
}

TEST_CASE("costs interpolate between measured sizes and follow what rounds report, outliers aside") {
  CostTable costs;
  for (const int64_t rows : CostTable::kRows) costs.set(rows, 1e-3 * static_cast<double>(rows));
  CHECK(costs.at(7) == doctest::Approx(7e-3));
  CHECK(costs.at(80) == doctest::Approx(80e-3));
  for (int i = 0; i < 500; ++i) costs.refine(8, 16e-3);
  CHECK(costs.at(8) == doctest::Approx(16e-3).epsilon(0.01));
  const double before = costs.at(16);
  costs.refine(16, 100 * before);
  CHECK(costs.at(16) == before);
}

TEST_CASE("calibration starts by trusting the drafter and learns what its probabilities are worth") {
  Calibration calibration;
  CHECK(calibration.accept_probability(0.5) == doctest::Approx(0.5));
  for (int i = 0; i < 4000; ++i) calibration.observe(0.8, i % 4 == 0);
  CHECK(calibration.accept_probability(0.8) == doctest::Approx(0.25).epsilon(0.1));
  CHECK(calibration.accept_probability(0.1) == doctest::Approx(0.1));
  CHECK(calibration.accept_probability(0.0) >= 0.0);
}
