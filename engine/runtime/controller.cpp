#include "runtime/controller.h"

#include <cmath>

namespace kdt {
namespace {

constexpr int64_t kTreeBudget = 16;        // of mode tree, when none is given
constexpr int64_t kAutoBudget = spec::CostTable::kOneStream - 1;

}  // namespace

Controller::Controller(RoundCosts& costs, const RequestSettings& settings, const Round& round)
    : mode_(settings.speculate),
      max_depths_(round.max_depths()), spine_(settings.spine),
      noise_ranking_(settings.sampling.temperature > 0 && settings.ranking != Ranking::plain),
      calibration_index_(RoundCosts::calibration_of(settings.sampling, noise_ranking_)),
      calibration_(costs.calibration(calibration_index_)) {
  if (!round.has_drafter() || (mode_ == Speculate::automatic && !costs.measured())) mode_ = Speculate::off;
  const int64_t most = round.limits().max_budget;
  const auto given = [&settings](int64_t by_default) { return settings.budget > 0 ? settings.budget : by_default; };
  switch (mode_) {
    case Speculate::automatic: budget_ = std::min({most, given(kAutoBudget), kAutoBudget}); break;
    case Speculate::chain: budget_ = std::min({most, given(max_depths_), max_depths_}); break;
    default: budget_ = std::min(most, given(kTreeBudget));
  }
}

DecodePlan Controller::plan(int64_t depth_room, int64_t budget) {
  DecodePlan plan;
  budget = std::min(budget, budget_);
  drafted_ = mode_ != Speculate::off && !automatic() && depth_room > 0 && budget > 0;
  if (!drafted_) return plan;
  plan.depths = std::min({max_depths_, depth_room, budget});
  plan.budget = mode_ == Speculate::chain ? plan.depths : budget;
  plan.spine = spine_ || mode_ == Speculate::chain;
  plan.noise_ranking = noise_ranking_;
  return plan;
}

DecodePlan Controller::draft(int64_t depth_room, int64_t budget) {
  DecodePlan plan;
  plan.budget = std::min(budget, budget_);
  plan.depths = std::min({max_depths_, depth_room, plan.budget});
  plan.spine = spine_;
  plan.noise_ranking = noise_ranking_;
  plan.calibration = calibration_index_;
  drafted_ = asked_ = true;
  return plan;
}

void Controller::observe(const DecodeResult& result) {
  if (!drafted_) return;
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

}  // namespace kdt
