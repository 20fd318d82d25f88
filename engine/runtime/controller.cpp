#include "runtime/controller.h"

#include <algorithm>
#include <cmath>

namespace kdt {
namespace {

constexpr int64_t kTreeBudget = 16;        // of mode tree, when none is given
constexpr int64_t kAutoBudget = spec::CostTable::kOneStream - 1;
constexpr double kValueMemory = 0.8;       // whether to draft follows the last five drafts
constexpr double kProbeMemory = 0.3;       // but a probe shows what has changed since
constexpr int64_t kFirstProbe = 8, kLastProbe = 256;   // plain rounds between two probes of the drafter
constexpr double kProbeShare = 0.01;       // of the time, for probes that never gain

}  // namespace

Controller::Controller(RoundCosts& costs, const RequestSettings& settings, const Round& round)
    : costs_(costs), mode_(settings.speculate),
      max_depths_(round.max_depths()), spine_(settings.spine),
      noise_ranking_(settings.sampling.temperature > 0 && settings.ranking != Ranking::plain),
      calibration_index_(RoundCosts::calibration_of(settings.sampling, noise_ranking_)),
      calibration_(costs.calibration(calibration_index_)), habit_(costs.habit(settings.sampling)) {
  if (!round.has_drafter() || (mode_ == Speculate::automatic && !costs.measured())) mode_ = Speculate::off;
  if (automatic()) {
    const double draft_rounds = costs.draft(max_depths_, 1) / costs.verify().at(1);
    last_probe_ = std::clamp(static_cast<int64_t>(draft_rounds / kProbeShare), kFirstProbe, kLastProbe);
    // Another text: the drafter is asked at once where that costs less than a round.
    if (draft_rounds < 1) habit_.since_draft = std::max(habit_.since_draft, habit_.probe_after);
  }
  const int64_t most = round.limits().max_budget;
  const auto given = [&settings](int64_t by_default) { return settings.budget > 0 ? settings.budget : by_default; };
  switch (mode_) {
    case Speculate::automatic: budget_ = std::min({most, given(kAutoBudget), kAutoBudget}); break;
    case Speculate::chain: budget_ = std::min({most, given(max_depths_), max_depths_}); break;
    default: budget_ = std::min(most, given(kTreeBudget));
  }
}

bool Controller::wants_draft() const { return habit_.value >= 0 || habit_.since_draft >= habit_.probe_after; }

DecodePlan Controller::plan(int64_t wanted, int64_t depth_room, int64_t budget) {
  current_ = {};
  budget = std::min(budget, budget_);
  if (mode_ == Speculate::off || depth_room < 1 || budget < 1) return current_;
  int64_t depths = std::min(max_depths_, depth_room);
  if (automatic()) {
    // The bonus token alone is enough for the last one.
    if (wanted == 1 || !wants_draft()) return current_;
    // A little more than what lately paid: candidates and depths that are never verified cost time too.
    const auto ample = [](double usual, int64_t spare) { return static_cast<int64_t>(std::ceil(usual)) + spare; };
    budget = std::min(budget, ample(habit_.nodes, 4));
    depths = std::min({depths, wanted - 1, ample(habit_.depth, 1)});
  }
  current_.depths = std::min(depths, budget);
  current_.budget = mode_ == Speculate::chain ? current_.depths : budget;
  current_.spine = spine_ || mode_ == Speculate::chain;
  current_.noise_ranking = noise_ranking_;
  current_.calibration = automatic() ? calibration_index_ : -1;
  return current_;
}

void Controller::decided(const Tree& tree, double value) {
  const double memory = habit_.value < 0 ? kProbeMemory : kValueMemory;
  habit_.last_value = value;
  habit_.value = memory * habit_.value + (1 - memory) * value;
  int32_t depth = 0;
  for (const int32_t of_node : tree.depth) depth = std::max(depth, of_node);
  habit_.nodes = std::max(static_cast<double>(tree.n_nodes), 0.9 * habit_.nodes);
  habit_.depth = std::max(static_cast<double>(depth), 0.9 * habit_.depth);
}

void Controller::observe(const DecodeResult& result) {
  const bool drafted = current_.budget > 0;
  if (drafted) {
    // Every child of a node that was reached had its chance.
    for (size_t step = 0; step < result.path.size(); ++step) {
      const int32_t reached = result.path[step];
      const int32_t taken = step + 1 < result.path.size() ? result.path[step + 1] : -1;
      for (size_t node = 1; node <= static_cast<size_t>(result.tree.n_nodes); ++node) {
        if (result.tree.parent[node] != reached) continue;
        const double q = std::exp(static_cast<double>(result.tree.weight[node]) -
                                  static_cast<double>(result.tree.weight[static_cast<size_t>(reached)]));
        calibration_.observe(q, static_cast<int32_t>(node) == taken);
      }
    }
  }
  if (!automatic()) return;
  if (!drafted) {
    ++habit_.since_draft;
    return;
  }
  // A draft that showed no gain makes the next probe rarer, one that did brings it sooner: probes are frequent where most of
  // them gain.
  habit_.probe_after = habit_.last_value > 0 ? std::max(kFirstProbe, habit_.probe_after / 2)
                                             : std::min(last_probe_, 2 * habit_.probe_after);
  habit_.since_draft = 0;
}

}  // namespace kdt
