#include "runtime/draft_habits.h"

#include <cmath>

namespace kdt {
namespace {

constexpr double kMemory = 8;              // drafts of one stream that weigh as much as all before
constexpr double kProbeWeight = 0.5;       // at least: a probe shows what has changed since
constexpr int64_t kFirstProbe = 8, kLastProbe = 256;   // plain rounds between two probes of the drafter
constexpr double kProbeShare = 0.005;      // of the time, for probes that never gain
constexpr int64_t kProbeNodes = 3;         // room that a probe gets
constexpr double kDepthMemory = 0.9;

}  // namespace

std::optional<int64_t> DraftHabits::room(const Round& round, int64_t n_streams, int64_t nodes, int64_t other_rows) {
  const RoundLimits& limits = round.limits();
  if (n_streams * (tree_nodes(nodes) + 1) + other_rows > limits.max_rows) return std::nullopt;
  return round.room(n_streams, nodes, other_rows);
}

DraftChoice DraftHabits::best_of(std::array<bool, 2> drafts, const RoundCosts& costs, const Round& round, double& rate) {
  const int64_t other_rows = wish_.prompt_rows + wish_.fixed_nodes;
  spec::Outlook outlook{{}};
  int64_t n = 0;
  DraftChoice choice{drafts};
  for (size_t h = 0; h < habit_.size(); ++h) n += drafts[h] ? wish_.n_may[h] : 0;
  for (size_t h = 0; h < habit_.size(); ++h) {
    if (!drafts[h]) continue;
    const double share = static_cast<double>(wish_.n_may[h]) / static_cast<double>(n);
    for (size_t i = 0; i < spec::Outlook::kPoints; ++i) outlook.tokens[i] += share * habit_[h].outlook.tokens[i];
    choice.depths = std::max(choice.depths, static_cast<int64_t>(std::ceil(habit_[h].depth)) + 1);
  }
  if (!costs.depth_counts()) choice.depths = round.max_depths();
  choice.depths = std::min(choice.depths, round.max_depths());
  // Rooms that are recorded, where rounds are, and the others, which take longer.
  const auto recorded = [&](int64_t tree, int64_t rows) { return !round.records() || round.recorded(wish_.n_streams, tree, rows); };
  struct Rooms {
    std::array<int64_t, kNodes.size()> rows{}, nodes{};
    size_t n = 0;
  } rooms[2];
  int64_t last = 0;
  for (const int64_t each : kNodes) {
    const auto rows = room(round, wish_.n_streams, each, other_rows);
    if (!rows || *rows == last) continue;
    last = *rows;
    Rooms& those = rooms[!recorded(tree_nodes(each), last)];
    those.rows[those.n] = last;
    those.nodes[those.n++] = each;
  }
  prices_ = costs.prices(wish_.n_streams, choice.depths, n, wish_.n_fixed);
  spec::RoundPrices prices = prices_;
  if (!recorded(0, round.room(wish_.n_streams, 0, other_rows))) {   // plain rounds take longer
    prices.host_seconds += costs.unrecorded();
    prices.draft_seconds -= costs.unrecorded();
  }
  for (const Rooms& those : rooms) {
    const spec::Room best = spec::choose_room(outlook, n, wish_.n_streams, wish_.n_streams + other_rows, prices,
                                              std::span(those.rows).first(those.n));
    prices.draft_seconds += costs.unrecorded();
    if (best.rows == 0 || best.rate <= rate) continue;
    rate = best.rate;
    choice.room = best.rows;
    for (size_t i = 0; i < those.n; ++i)
      if (those.rows[i] == best.rows) choice.tree_nodes = tree_nodes(those.nodes[i]);
  }
  return choice;
}

DraftChoice DraftHabits::choose(const DraftWish& wish, const RoundCosts& costs, const Round& round) {
  wish_ = wish;
  choice_ = {};
  const int64_t n_may = wish.n_may[0] + wish.n_may[1];
  if (n_may == 0 || !costs.measured()) return choice_;
  double best = 0;
  for (const std::array<bool, 2> drafts : {std::array{true, true}, {true, false}, {false, true}}) {
    bool there = true;
    for (size_t h = 0; h < habit_.size(); ++h) there &= !drafts[h] || wish.n_may[h] > 0;
    if (!there) continue;
    double rate = 0;
    const DraftChoice choice = best_of(drafts, costs, round, rate);
    if (choice.room > 0 && rate > best) {
      best = rate;
      choice_ = choice;
    }
  }

  const double plain = costs.host(wish.n_streams) + costs.verify().at(wish.n_streams + wish.prompt_rows + wish.fixed_nodes);
  const double draft = costs.draft(round.max_depths(), n_may + wish.n_fixed) / plain;   // in plain rounds
  last_probe_ = std::clamp(static_cast<int64_t>(draft / kProbeShare), kFirstProbe, kLastProbe);
  // Other texts: the drafter is asked once their prompts are done, where that costs less than a round.
  const bool new_texts = 2 * wish.n_new >= n_may && draft < 1 && wish.prompt_rows == 0;
  for (size_t h = 0; h < habit_.size(); ++h) {
    Habit& habit = habit_[h];
    if (wish.n_may[h] == 0 || choice_.drafts[h]) continue;
    const auto rows = room(round, wish.n_streams, kProbeNodes, wish.prompt_rows + wish.fixed_nodes);
    const bool due = habit.since_draft >= std::min(habit.probe_after, last_probe_) || (new_texts && habit.since_draft > 0);
    if (!due || !rows) {
      ++habit.since_draft;
      continue;
    }
    choice_.drafts[h] = true;
    choice_.room = std::max(choice_.room, *rows);
    choice_.tree_nodes = std::max(choice_.tree_nodes, tree_nodes(kProbeNodes));
    choice_.depths = round.max_depths();
  }
  return choice_;
}

void DraftHabits::learn(const spec::Outlook& outlook, int64_t depth) {
  if (!choice_.any()) return;
  int64_t n = 0;
  for (size_t h = 0; h < habit_.size(); ++h) n += choice_.drafts[h] ? wish_.n_may[h] : 0;
  const double weight = static_cast<double>(n) / (static_cast<double>(n) + kMemory);
  const int64_t base_rows = wish_.n_streams + wish_.prompt_rows + wish_.fixed_nodes;
  const std::array rooms{choice_.room};
  const bool gained = spec::choose_room(outlook, n, wish_.n_streams, base_rows, prices_, rooms).rows > 0;
  for (size_t h = 0; h < habit_.size(); ++h) {
    if (!choice_.drafts[h]) continue;
    Habit& habit = habit_[h];
    const bool probe = habit.since_draft >= kFirstProbe;
    habit.outlook.follow(outlook, probe ? std::max(weight, kProbeWeight) : weight, static_cast<double>(choice_.tree_nodes));
    habit.depth = std::max(static_cast<double>(depth), kDepthMemory * habit.depth);
    // A draft that showed no gain makes the next probe rarer, one that did brings it sooner: probes are frequent where most of
    // them gain.
    habit.probe_after = gained ? std::max(kFirstProbe, habit.probe_after / 2) : std::min(last_probe_, 2 * habit.probe_after);
    habit.since_draft = 0;
  }
}

}  // namespace kdt
