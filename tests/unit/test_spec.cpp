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
#include "spec/cut.h"
#include "spec/outlook.h"
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
    const double lambda = 500 + 1500 * uniform(random);
    const Choice choice = choose_nodes(gain, 1, 1, costs.seconds().data(), lambda);
    double best = -1e30, tokens = 1;
    for (int64_t n = 0; n <= 40; ++n) {
      if (n > 0) tokens += gain[static_cast<size_t>(n - 1)];
      best = std::max(best, tokens - lambda * costs.at(n + 1));
    }
    CHECK(choice.value == doctest::Approx(best));
  }
}

namespace {

// A tree as build_tree gives it: prefix-closed, best first.
struct RandomTree {
  std::vector<int32_t> parent{-1};
  std::vector<float> weight{0.0f};
  RandomTree(std::mt19937& random, int n) {
    std::uniform_real_distribution<float> uniform(0.05f, 1.0f);
    for (int i = 1; i <= n; ++i) {
      parent.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(i)));
      weight.push_back(weight.back() - uniform(random));
    }
  }
  CutTree cut_tree() const { return {static_cast<int64_t>(parent.size()) - 1, parent.data(), weight.data(), 0, true}; }
  double gain(int64_t node) const { return std::exp(static_cast<double>(weight[static_cast<size_t>(node)])); }   // nothing is learnt yet
};

}  // namespace

TEST_CASE("the joint cut is the best of all ways to share the room, and its outlook counts what they would bring") {
  std::mt19937 random(11);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int i = 0; i < 200; ++i) {
    const RandomTree a(random, static_cast<int>(random() % 7)), b(random, static_cast<int>(random() % 7));
    CutTables tables{};
    double seconds = 0;
    for (double& verify : tables.verify) verify = seconds += uniform(random);
    tables.lambda = uniform(random);
    tables.base_rows = tables.n_roots = 2;
    tables.most_rows = 2 + static_cast<int32_t>(random() % 15);
    std::array<CutTree, 2> trees{a.cut_tree(), b.cut_tree()};
    const Outlook outlook = JointCut()(trees, tables);
    const auto expected = [&](int64_t in_a, int64_t in_b) {
      double tokens = 2;
      for (int64_t n = 1; n <= in_a; ++n) tokens += a.gain(n);
      for (int64_t n = 1; n <= in_b; ++n) tokens += b.gain(n);
      return tokens;
    };
    const auto value = [&](int64_t in_a, int64_t in_b) {
      return expected(in_a, in_b) - tables.lambda * CostTable::at(tables.verify, static_cast<double>(2 + in_a + in_b));
    };
    CHECK(2 + trees[0].n_nodes + trees[1].n_nodes <= tables.most_rows);
    double best = -1e30, most = 0;
    const int64_t size_a = a.cut_tree().n_nodes, size_b = b.cut_tree().n_nodes;
    for (int64_t in_a = 0; in_a <= size_a; ++in_a)
      for (int64_t in_b = 0; in_b <= size_b && 2 + in_a + in_b <= tables.most_rows; ++in_b) best = std::max(best, value(in_a, in_b));
    for (int64_t in_a = 0; in_a <= std::min<int64_t>(2, size_a); ++in_a)
      if (2 - in_a <= size_b) most = std::max(most, expected(in_a, 2 - in_a) - 2);
    CHECK(value(trees[0].n_nodes, trees[1].n_nodes) == doctest::Approx(best));
    if (size_a + size_b >= 2) CHECK(outlook.at(1) * 2 == doctest::Approx(most));
    CHECK(outlook.at(63) * 2 == doctest::Approx(expected(size_a, size_b) - 2));
  }
}

TEST_CASE("the room is the one of most tokens a second, none where plain rounds yield more") {
  std::mt19937 random(12);
  std::uniform_real_distribution<double> uniform(0, 1);
  int plain = 0;
  for (int i = 0; i < 300; ++i) {
    CostTable costs;
    double seconds = 1e-3;
    for (const int64_t rows : CostTable::kRows) {
      costs.set(rows, seconds);
      seconds += uniform(random) * 1e-3;
    }
    Outlook outlook;
    double tokens = 0;
    for (double& at : outlook.tokens) at = tokens += 0.4 * uniform(random);
    const int64_t streams = 1 + static_cast<int64_t>(random() % 40), drafts = 1 + static_cast<int64_t>(random() % static_cast<uint32_t>(streams));
    const int64_t base = streams + static_cast<int64_t>(random() % 30);
    const RoundPrices prices{costs.seconds().data(), uniform(random), 4e-3 * uniform(random), 1e-3 * uniform(random)};
    std::vector<int64_t> rooms;
    for (int64_t rows = streams; rows < 600; rows += 1 + static_cast<int64_t>(random() % 90)) rooms.push_back(rows);
    const Room room = choose_room(outlook, drafts, streams, base, prices, rooms);
    const double without = static_cast<double>(streams) / (prices.host_seconds + costs.at(base));
    double best = without;
    int64_t rows = 0;
    for (const int64_t one : rooms) {
      if (one <= base) continue;
      const double nodes = std::min(static_cast<double>(one - base), 63.0 * static_cast<double>(drafts));
      const double full = static_cast<double>(base) + nodes, live = CostTable::at(costs.seconds().data(), full);
      const double pass = live + prices.padding * (costs.at(one) - live);
      const double rate = (static_cast<double>(streams) + static_cast<double>(drafts) * outlook.at(nodes / static_cast<double>(drafts))) /
                          (prices.host_seconds + prices.draft_seconds + pass);
      if (rate > best && rate > 1.03 * without) best = rate, rows = one;
    }
    CHECK(room.rows == rows);
    CHECK(room.rate == doctest::Approx(best));
    plain += rows == 0;
  }
  CHECK(plain > 30);
  CHECK(plain < 270);
}

TEST_CASE("an outlook follows what drafts showed, and rises on beyond their trees") {
  Outlook outlook;
  CHECK(outlook.at(0) == 0);
  CHECK(outlook.at(2.5) == doctest::Approx((outlook.at(2) + outlook.at(3)) / 2));
  CHECK(outlook.at(1000) == outlook.at(63));
  Outlook seen;
  for (size_t i = 0; i < Outlook::kPoints; ++i) seen.tokens[i] = std::min(4.0, Outlook::kNodes[i]);
  for (int i = 0; i < 100; ++i) outlook.follow(seen, 0.2, 4);
  CHECK(outlook.at(3) == doctest::Approx(3));
  CHECK(outlook.at(63) == doctest::Approx(4));
  CHECK(std::is_sorted(outlook.tokens.begin(), outlook.tokens.end()));
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
