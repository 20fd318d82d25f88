#include "runtime/controller.h"

#include <algorithm>
#include <cmath>

namespace kdt {
namespace {

constexpr int64_t kTreeBudget = 16;        // of mode tree, when none is given
constexpr int64_t kAutoBudget = 63;        // the cost table ends at 64 rows
constexpr double kValueMemory = 0.8;       // whether to draft follows the last five drafts
constexpr int64_t kFirstProbe = 8, kLastProbe = 256;   // plain rounds between two probes of the drafter

}  // namespace

Controller::Controller(RoundCosts& costs, const RequestSettings& settings, const Round& round)
    : costs_(costs), mode_(settings.speculate),
      max_depths_(round.max_depths()), spine_(settings.spine),
      noise_ranking_(settings.sampling.temperature > 0 && settings.ranking != Ranking::plain),
      calibration_(costs.calibration(settings.sampling, noise_ranking_)), habit_(costs.habit(settings.sampling)) {
  if (!round.has_drafter() || (mode_ == Speculate::automatic && !costs.measured())) mode_ = Speculate::off;
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
    budget = std::min(budget, ample(1.5 * habit_.nodes, 4));
    depths = std::min({depths, wanted - 1, ample(habit_.depth, 1)});
  }
  current_.depths = std::min(depths, budget);
  current_.budget = mode_ == Speculate::chain ? current_.depths : budget;
  current_.spine = spine_ || mode_ == Speculate::chain;
  current_.noise_ranking = noise_ranking_;
  return current_;
}

void Controller::add_gains(const Tree& tree, std::vector<double>& gains) const {
  const size_t first = gains.size();
  for (size_t node = 1; node <= static_cast<size_t>(tree.n_nodes); ++node) {
    const auto parent = static_cast<size_t>(tree.parent[node]);
    const double above = parent == 0 ? 1.0 : gains[first + parent - 1];
    const double q = std::exp(static_cast<double>(tree.weight[node]) - static_cast<double>(tree.weight[parent]));
    gains.push_back(above * calibration_.accept_probability(q));
  }
}

void Controller::decided(const Tree& tree, int64_t n_nodes, double value) {
  habit_.last_value = value;
  habit_.value = kValueMemory * habit_.value + (1 - kValueMemory) * value;
  int32_t depth = 0;
  for (size_t node = 1; node <= static_cast<size_t>(n_nodes); ++node) depth = std::max(depth, tree.depth[node]);
  habit_.nodes = std::max(static_cast<double>(n_nodes), 0.9 * habit_.nodes);
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
                                             : std::min(kLastProbe, 2 * habit_.probe_after);
  habit_.since_draft = 0;
}

void JointCut::operator()(std::span<const Speculation> streams, int64_t base_rows, const RoundCosts& costs,
                          std::span<const Tree> trees, std::span<int64_t> n_nodes) {
  gains_.clear();
  merged_.clear();
  first_.clear();
  taken_from_.clear();
  heads_.clear();
  int64_t n_automatic = 0, n_drafting = 0, depths = 0;
  for (size_t i = 0; i < streams.size(); ++i) {
    first_.push_back(gains_.size());
    if (streams[i].plan.budget == 0) continue;
    ++n_drafting;
    depths = std::max(depths, streams[i].plan.depths);
    if (!streams[i].controller->automatic()) {
      base_rows += n_nodes[i];
      continue;
    }
    ++n_automatic;
    streams[i].controller->add_gains(trees[i], gains_);
  }
  first_.push_back(gains_.size());
  if (n_automatic == 0) return;

  // Best first over all streams, each one's nodes in their own order, so that what is taken of a tree is a prefix of it.
  const auto worse = [](const Head& a, const Head& b) { return a.gain != b.gain ? a.gain < b.gain : a.stream > b.stream; };
  for (size_t i = 0; i < streams.size(); ++i)
    if (first_[i] < first_[i + 1]) heads_.push_back({gains_[first_[i]], i, first_[i]});
  std::make_heap(heads_.begin(), heads_.end(), worse);
  while (!heads_.empty()) {
    std::pop_heap(heads_.begin(), heads_.end(), worse);
    Head& head = heads_.back();
    merged_.push_back(head.gain);
    taken_from_.push_back(head.stream);
    if (++head.node < first_[head.stream + 1]) {
      head.gain = gains_[head.node];
      std::push_heap(heads_.begin(), heads_.end(), worse);
    } else {
      heads_.pop_back();
    }
  }

  const auto roots = static_cast<int64_t>(streams.size());
  const double lambda = costs.rate();
  // Streams of fixed modes draft whatever this one decides; their share of the draft is theirs.
  const double draft_seconds =
      costs.draft(depths, n_drafting) * static_cast<double>(n_automatic) / static_cast<double>(n_drafting);
  const spec::Choice choice = spec::choose_nodes(merged_, roots, base_rows, costs.verify(), draft_seconds, lambda);
  const double plain = static_cast<double>(roots) - lambda * costs.verify().at(base_rows);
  const double value = (choice.value - plain) / static_cast<double>(n_automatic);
  for (size_t i = 0; i < streams.size(); ++i)
    if (first_[i] < first_[i + 1]) n_nodes[i] = 0;
  for (int64_t n = 0; n < choice.n_nodes; ++n) ++n_nodes[taken_from_[static_cast<size_t>(n)]];
  for (size_t i = 0; i < streams.size(); ++i)
    if (streams[i].plan.budget > 0 && streams[i].controller->automatic())
      streams[i].controller->decided(trees[i], n_nodes[i], value);
}

}  // namespace kdt
