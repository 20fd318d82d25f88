#include "spec/cut.h"

#include <algorithm>
#include <cmath>

namespace kdt::spec {

Outlook JointCut::operator()(std::span<CutTree> trees, const CutTables& tables) {
  gains_.clear();
  merged_.clear();
  first_.clear();
  taken_from_.clear();
  heads_.clear();
  int64_t base_rows = tables.base_rows, n_automatic = 0;
  for (const CutTree& tree : trees) {
    const size_t first = gains_.size();
    first_.push_back(first);
    if (!tree.drafted) continue;
    if (tree.calibration < 0) {
      base_rows += tree.n_nodes;
      continue;
    }
    ++n_automatic;
    const Calibration::Counts& counts = tables.calibration[tree.calibration];
    for (int64_t node = 1; node <= tree.n_nodes; ++node) {
      const int32_t parent = tree.parent[node];
      const double above = parent == 0 ? 1.0 : gains_[first + static_cast<size_t>(parent) - 1];
      const double q = std::exp(static_cast<double>(tree.weight[node]) - static_cast<double>(tree.weight[parent]));
      gains_.push_back(above * Calibration::accept_probability(counts, q));
    }
  }
  first_.push_back(gains_.size());
  if (n_automatic == 0) return {{}};

  // What is taken of a tree is its beginning, so that it stays a tree.
  const auto worse = [](const Head& a, const Head& b) { return a.gain != b.gain ? a.gain < b.gain : a.tree > b.tree; };
  for (size_t i = 0; i < trees.size(); ++i)
    if (first_[i] < first_[i + 1]) heads_.push_back({gains_[first_[i]], i, first_[i]});
  std::make_heap(heads_.begin(), heads_.end(), worse);
  while (!heads_.empty()) {
    std::pop_heap(heads_.begin(), heads_.end(), worse);
    Head& head = heads_.back();
    merged_.push_back(head.gain);
    taken_from_.push_back(head.tree);
    if (++head.node < first_[head.tree + 1]) {
      head.gain = gains_[head.node];
      std::push_heap(heads_.begin(), heads_.end(), worse);
    } else {
      heads_.pop_back();
    }
  }

  const int64_t room = std::clamp<int64_t>(tables.most_rows - base_rows, 0, static_cast<int64_t>(merged_.size()));
  const Choice choice = choose_nodes(std::span(merged_).first(static_cast<size_t>(room)), tables.n_roots, base_rows,
                                     tables.verify, tables.lambda);
  for (CutTree& tree : trees)
    if (tree.drafted && tree.calibration >= 0) tree.n_nodes = 0;
  for (int64_t n = 0; n < choice.n_nodes; ++n) ++trees[taken_from_[static_cast<size_t>(n)]].n_nodes;

  Outlook outlook;
  double tokens = 0;
  size_t n = 0;
  for (size_t i = 0; i < Outlook::kPoints; ++i) {
    const double nodes = Outlook::kNodes[i] * static_cast<double>(n_automatic);
    for (; n < merged_.size() && static_cast<double>(n + 1) <= nodes; ++n) tokens += merged_[n];
    const double rest = n < merged_.size() ? (nodes - static_cast<double>(n)) * merged_[n] : 0.0;
    outlook.tokens[i] = (tokens + rest) / static_cast<double>(n_automatic);
  }
  return outlook;
}

}  // namespace kdt::spec
