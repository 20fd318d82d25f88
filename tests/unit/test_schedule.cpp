// The scheduler and the pages alone: rules that hold for any mix of requests.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "runtime/pages.h"
#include "runtime/scheduler.h"

using namespace kdt;

namespace {

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint32_t>(n)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool percent(int64_t p) { return below(100) < p; }

 private:
  std::mt19937 engine_;
};

RunningView random_stream(Random& random, uint64_t serial) {
  RunningView s{};
  s.rank = {static_cast<int32_t>(random.between(-1, 1)), serial};
  s.length = random.between(0, 500);
  s.tokens_to_prefill = random.percent(30) ? random.between(1, 700) : 0;
  s.n_pages = pages_for(s.length + s.tokens_to_prefill + random.below(2));
  s.budget = random.percent(30) ? 0 : random.between(1, 300);
  s.depths = s.budget == 0 ? 0 : random.between(0, 7);
  s.paused = random.percent(10);
  return s;
}

}  // namespace

TEST_CASE("schedules keep to pages, rows, ranks and chunks") {
  Random random(1);
  for (int round = 0; round < 20000; ++round) {
    std::vector<RunningView> running;
    std::vector<WaitingView> waiting;
    const SchedulerLimits limits{64, random.between(1, 512), random.between(64, 1600)};
    for (int64_t i = random.between(0, 64); i > 0; --i) running.push_back(random_stream(random, static_cast<uint64_t>(i)));
    for (int64_t i = random.between(0, 10); i > 0; --i) waiting.push_back({{0, static_cast<uint64_t>(200 + waiting.size())}, random.between(1, 20)});
    const int64_t available = random.percent(50) ? random.between(0, 5) : random.between(0, 500);
    const Schedule out = schedule(running, waiting, available, limits);

    std::set<size_t> seen;
    int64_t rows = 0, chunk = 0, taken = 0, freed = 0;
    for (const size_t i : out.preempt) {
      CHECK(seen.insert(i).second);
      freed += running[i].n_pages;
    }
    for (const auto& decode : out.decode) {
      const RunningView& s = running[decode.stream];
      CHECK(seen.insert(decode.stream).second);
      CHECK(s.tokens_to_prefill == 0);
      CHECK(!s.paused);
      CHECK(decode.budget <= s.budget);
      CHECK(decode.depths <= s.depths);
      if (decode.budget > 0) CHECK(decode.depths > 0);
      CHECK((s.n_pages + decode.more_pages) * kPageTokens >= s.length + 1 + decode.depths);
      rows += 1 + decode.budget;
      taken += decode.more_pages;
    }
    for (const auto& prefill : out.prefill) {
      const RunningView& s = running[prefill.stream];
      CHECK(seen.insert(prefill.stream).second);
      CHECK(!s.paused);
      CHECK(prefill.tokens >= 1);
      CHECK(prefill.tokens <= s.tokens_to_prefill);
      rows += prefill.tokens;
      chunk += prefill.tokens;
    }
    CHECK(rows <= limits.max_rows);
    CHECK(chunk <= limits.prefill_chunk);
    CHECK(taken <= available + freed);
    // Everyone who decodes and kept its pages takes part; whoever lost them is of a lower rank or was not read from.
    for (size_t i = 0; i < running.size(); ++i) {
      const bool decodes = running[i].tokens_to_prefill == 0 && !running[i].paused;
      if (decodes) CHECK(seen.count(i) == 1);
      if (std::find(out.preempt.begin(), out.preempt.end(), i) == out.preempt.end()) continue;
      for (const auto& decode : out.decode) CHECK((running[i].paused || running[decode.stream].rank < running[i].rank));
    }
    // The stream of the highest rank is never the one that pays while there is another.
    if (!running.empty()) {
      const auto first = std::min_element(running.begin(), running.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
      const auto i = static_cast<size_t>(first - running.begin());
      const bool lost = std::find(out.preempt.begin(), out.preempt.end(), i) != out.preempt.end();
      if (lost && !first->paused) CHECK(out.preempt.size() == running.size());
    }
    CHECK(out.n_admit <= waiting.size());
    CHECK(static_cast<int64_t>(running.size() + out.n_admit) <= std::max<int64_t>(64, static_cast<int64_t>(running.size())));
    if (!out.preempt.empty()) CHECK(out.n_admit == 0);
    int64_t admitted = 0;
    for (size_t i = 0; i < out.n_admit; ++i) admitted += waiting[i].new_pages;
    CHECK(admitted + taken <= available + freed);
    // Something always moves: a free machine admits, a busy one decodes, prefills or makes room.
    if (running.empty() && !waiting.empty() && waiting[0].new_pages <= available) CHECK(out.n_admit > 0);
    const bool all_paused = std::all_of(running.begin(), running.end(), [](const auto& s) { return s.paused; });
    if (!all_paused) CHECK((!out.decode.empty() || !out.prefill.empty() || !out.preempt.empty()));
  }
}

TEST_CASE("prompts share one chunk in the order of their rank") {
  std::vector<RunningView> running;
  for (uint64_t i = 0; i < 3; ++i) running.push_back({{0, 10 - i}, 100, 0, 2, 0, 0, false});
  const Schedule out = schedule(running, {}, 0, {64, 150, 1600});
  REQUIRE(out.prefill.size() == 2);
  CHECK(out.prefill[0].stream == 2);
  CHECK(out.prefill[0].tokens == 100);
  CHECK(out.prefill[1].stream == 1);
  CHECK(out.prefill[1].tokens == 50);
}

TEST_CASE("pages: random streams over few prefixes never lose or share a page wrongly") {
  Random random(2);
  for (const bool keep : {true, false}) {
    Pages pages(24, keep);
    struct Holder {
      std::vector<int32_t> tokens, pages;
      int64_t recorded = 0;
    };
    std::vector<Holder> holders;
    int64_t matched = 0;
    for (int step = 0; step < 20000; ++step) {
      const int64_t what = random.below(10);
      if (what < 4) {
        Holder h;
        // Blocks of few kinds, so that prefixes meet.
        for (int64_t block = random.between(1, 5); block > 0; --block) h.tokens.resize(h.tokens.size() + 64, static_cast<int32_t>(random.below(3)));
        const auto n_blocks = static_cast<int64_t>(h.tokens.size()) / kPageTokens;
        const Pages::Match match = pages.match(h.tokens, random.between(0, n_blocks));
        CHECK(match.idle <= match.blocks);
        if (n_blocks - match.blocks + match.idle > pages.available()) continue;
        pages.take_prefix(h.tokens, match.blocks, h.pages);
        REQUIRE(pages.take(n_blocks - match.blocks, h.pages));
        h.recorded = match.blocks;
        matched += match.blocks;
        holders.push_back(std::move(h));
      } else if (what < 8 && !holders.empty()) {
        Holder& h = holders[static_cast<size_t>(random.below(static_cast<int64_t>(holders.size())))];
        if (h.recorded < static_cast<int64_t>(h.pages.size())) pages.record(h.tokens, h.recorded++, h.pages);
      } else if (what == 8 && !holders.empty()) {
        const auto i = random.below(static_cast<int64_t>(holders.size()));
        pages.give_back(holders[static_cast<size_t>(i)].pages);
        holders.erase(holders.begin() + i);
      } else if (random.percent(2)) {
        CHECK(pages.forget_idle() >= 0);
        CHECK(pages.n_idle() == 0);
      }
      std::vector<const std::vector<int32_t>*> tables;
      for (const Holder& h : holders) tables.push_back(&h.pages);
      const auto fault = pages.find_fault(tables);
      REQUIRE_MESSAGE(!fault, *fault);
      // A page that was recorded belongs to whoever has the same tokens up to its end.
      for (const Holder& a : holders)
        for (const Holder& b : holders)
          for (size_t i = 0; i < static_cast<size_t>(std::min(a.recorded, b.recorded)); ++i) {
            const bool same = std::equal(a.tokens.begin(), a.tokens.begin() + static_cast<int64_t>(64 * (i + 1)), b.tokens.begin());
            if (keep || &a == &b) REQUIRE((a.pages[i] == b.pages[i]) == same);
          }
    }
    CHECK((matched > 1000) == keep);
  }
}
