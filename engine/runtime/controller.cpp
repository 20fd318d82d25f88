#include "runtime/controller.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace kdt {
namespace {

constexpr int64_t kTreeBudget = 16;        // of mode tree, when none is given
constexpr int64_t kAutoBudget = 63;        // the cost table ends at 64 rows
constexpr double kRateMemory = 0.95;       // λ follows the last twenty rounds or so
constexpr double kValueMemory = 0.8;       // whether to draft follows the last five drafts
constexpr int64_t kFirstProbe = 8, kLastProbe = 256;   // plain rounds between two probes of the drafter
constexpr auto kMeasureTime = std::chrono::milliseconds(60);   // a start should not be felt

}  // namespace

void RoundCosts::measure(Round& round, Stream& stream) {
  StageSeconds time;
  const std::vector<int32_t> prompt(32, 1);
  round.prefill(stream, prompt, true, nullptr, time);
  const auto start = std::chrono::steady_clock::now();
  const auto out_of_time = [start] { return std::chrono::steady_clock::now() - start > kMeasureTime; };
  // The first pass warms the caches; the fastest of the others is least disturbed by anything else on the machine.
  const auto fastest = [](auto&& pass) {
    pass();
    return std::min(pass(), pass());
  };
  draft_.assign(static_cast<size_t>(round.max_depths()) + 1, 0.0);
  const double shallow = fastest([&] { return round.measure_draft(stream, 1); });
  const double deep = fastest([&] { return round.measure_draft(stream, round.max_depths()); });
  for (size_t d = 1; d < draft_.size(); ++d) {
    const double part = draft_.size() > 2 ? static_cast<double>(d - 1) / static_cast<double>(draft_.size() - 2) : 0.0;
    draft_[d] = shallow + part * std::max(0.0, deep - shallow);
  }
  const auto& sizes = spec::CostTable::kRows;
  for (size_t i = 0; i < sizes.size(); ++i) {
    // Sizes there was no time for follow the slope of those before: refined once a tree is as large.
    const double seconds = i >= 2 && out_of_time()
                               ? verify_.at(sizes[i - 1]) + (verify_.at(sizes[i - 1]) - verify_.at(sizes[i - 2])) *
                                     static_cast<double>(sizes[i] - sizes[i - 1]) /
                                     static_cast<double>(sizes[i - 1] - sizes[i - 2])
                               : fastest([&] { return round.measure_verify(stream, sizes[i]); });
    verify_.set(sizes[i], seconds);
  }
}

void RoundCosts::observe_draft(int64_t depths, double seconds) {
  if (!measured()) return;   // a context too short to measure in; fixed modes draft all the same
  const double ratio = seconds / draft(depths);
  if (!(ratio > 0) || ratio > 3) return;   // disturbed by something else
  for (double& cost : draft_) cost *= 1 + 0.05 * (ratio - 1);
}

double RoundCosts::draft(int64_t depths) const { return draft_[static_cast<size_t>(depths)]; }

spec::Calibration& RoundCosts::calibration(const Sampling& sampling, bool noise_ranking) {
  return calibration_[sampling.temperature <= 0 ? 0 : noise_ranking ? 2 : 1];
}

Controller::Controller(RoundCosts& costs, const RequestSettings& settings, const Round& round)
    : costs_(costs), mode_(settings.speculate),
      max_depths_(round.max_depths()), spine_(settings.spine),
      noise_ranking_(settings.sampling.temperature > 0 && settings.ranking != Ranking::plain),
      calibration_(costs.calibration(settings.sampling, noise_ranking_)), habit_(costs.habit(settings.sampling)) {
  if (!round.has_drafter() || (mode_ == Speculate::automatic && !costs.measured())) mode_ = Speculate::off;
  const int64_t most = round.limits().max_budget;
  switch (mode_) {
    case Speculate::automatic: budget_ = std::min(most, settings.budget > 0 ? settings.budget : kAutoBudget); break;
    case Speculate::chain: budget_ = settings.budget > 0 ? std::min(settings.budget, max_depths_) : max_depths_; break;
    default: budget_ = std::min(most, settings.budget > 0 ? settings.budget : kTreeBudget);
  }
  if (mode_ == Speculate::automatic) budget_ = std::min(budget_, kAutoBudget);
  tokens_ = 1;
  seconds_ = costs.verify().at(1);
  gain_.reserve(static_cast<size_t>(budget_) + 1);
}

DecodePlan Controller::plan_fixed(int64_t depth_room) const {
  DecodePlan plan;
  if (mode_ == Speculate::off || depth_room < 1) return plan;
  plan.budget = budget_;
  plan.depths = std::min({max_depths_, budget_, depth_room});
  plan.chain = mode_ == Speculate::chain;
  plan.spine = spine_;
  plan.noise_ranking = noise_ranking_;
  return plan;
}

bool Controller::wants_draft() const { return habit_.value >= 0 || habit_.since_draft >= habit_.probe_after; }

DecodePlan Controller::plan(int64_t wanted, int64_t depth_room) {
  current_ = plan_fixed(depth_room);
  if (mode_ != Speculate::automatic || current_.budget == 0) return current_;
  // The bonus token alone is enough for the last one.
  if (wanted == 1) return current_ = {};
  current_.depths = std::min(current_.depths, wanted - 1);
  if (!wants_draft()) {
    current_ = {};
    return current_;
  }
  // A little more than what lately paid: candidates and depths that are never verified cost time too.
  const auto ample = [](double usual, int64_t spare) { return static_cast<int64_t>(std::ceil(usual)) + spare; };
  current_.budget = std::min(budget_, ample(1.5 * habit_.nodes, 4));
  current_.depths = std::min({current_.depths, current_.budget, ample(habit_.depth, 1)});
  current_.cut = [this](const Tree& tree) { return cut(tree); };
  return current_;
}

int64_t Controller::cut(const Tree& tree) {
  gain_.assign(static_cast<size_t>(tree.n_nodes), 0.0);
  for (size_t node = 1; node <= gain_.size(); ++node) {
    const auto parent = static_cast<size_t>(tree.parent[node]);
    const double above = parent == 0 ? 1.0 : gain_[parent - 1];
    const double q = std::exp(static_cast<double>(tree.weight[node]) - static_cast<double>(tree.weight[parent]));
    gain_[node - 1] = above * calibration_.accept_probability(q);
  }
  const double lambda = tokens_ / seconds_, draft_seconds = costs_.draft(current_.depths);
  const spec::Choice choice = spec::choose_nodes(gain_, 0, costs_.verify(), draft_seconds, lambda);
  const double plain = 1 - lambda * costs_.verify().at(1);
  const double value = choice.value - plain;
  habit_.last_value = value;
  habit_.value = kValueMemory * habit_.value + (1 - kValueMemory) * value;
  int32_t depth = 0;
  for (size_t node = 1; node <= static_cast<size_t>(choice.n_nodes); ++node) depth = std::max(depth, tree.depth[node]);
  habit_.nodes = std::max(static_cast<double>(choice.n_nodes), 0.9 * habit_.nodes);
  habit_.depth = std::max(static_cast<double>(depth), 0.9 * habit_.depth);
  return choice.n_nodes;
}

void Controller::observe(const DecodeResult& result) {
  const bool drafted = current_.budget > 0;
  costs_.observe_verify(result.tree.n_nodes + 1, result.verify_seconds);
  if (drafted) {
    costs_.observe_draft(current_.depths, result.draft_seconds);
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
  if (mode_ != Speculate::automatic) return;
  tokens_ = kRateMemory * tokens_ + static_cast<double>(result.tokens.size());
  seconds_ = kRateMemory * seconds_ + result.draft_seconds + result.verify_seconds;
  if (!drafted) {
    ++habit_.since_draft;
    return;
  }
  // A draft that showed no gain makes the next probe rarer, one that did brings it soon.
  habit_.probe_after = habit_.last_value > 0 ? kFirstProbe : std::min(kLastProbe, 2 * habit_.probe_after);
  habit_.since_draft = 0;
}

}  // namespace kdt
