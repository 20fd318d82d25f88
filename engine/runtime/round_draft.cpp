// The front of a round: the drafter's candidates, the trees, and the measurements of both passes.
#include <algorithm>
#include <limits>

#include "runtime/round.h"

namespace kdt {
namespace {

// A chain needs the best candidate alone; no node of a tree has a rank past its budget.
int64_t candidates_of(const DecodePlan& plan) { return plan.spine && plan.budget <= plan.depths ? 1 : plan.budget; }

}  // namespace

void Round::draft(std::span<const DecodeTask> tasks) {
  drafting_.clear();
  anchor_.clear();
  start_.clear();
  draft_stream_.clear();
  draft_sampling_.clear();
  draft_depths_ = n_candidates_ = 0;
  for (size_t i = 0; i < tasks.size(); ++i) {
    const DecodePlan& plan = tasks[i].plan;
    if (plan.budget <= 0) continue;
    const Stream& stream = *tasks[i].stream;
    drafting_.push_back(i);
    anchor_.push_back(stream.root);
    start_.push_back(static_cast<int32_t>(stream.length));
    draft_stream_.push_back({stream.pages.data()});
    draft_sampling_.push_back(stream.sampling);
    if (!plan.noise_ranking) draft_sampling_.back().temperature = 0;
    draft_depths_ = std::max(draft_depths_, plan.depths);
    n_candidates_ = std::max(n_candidates_, std::min(candidates_of(plan), max_candidates_));
  }
  if (drafting_.empty()) return;
  const auto n_streams = static_cast<int64_t>(drafting_.size());
  const auto n = static_cast<size_t>(n_streams * draft_depths_);
  drafter_->propose(n_streams, anchor_.data(), start_.data(), draft_depths_, draft_stream_.data(), draft_cache(),
                    draft_logits_.as<float>());
  candidate_position_.resize(n);
  candidate_token_.resize(n * static_cast<size_t>(n_candidates_));
  candidate_log_q_.resize(n * static_cast<size_t>(n_candidates_));
  for (size_t i = 0; i < n; ++i) {
    const auto depths = static_cast<size_t>(draft_depths_);
    candidate_position_[i] = start_[i / depths] + 1 + static_cast<int32_t>(i % depths);
  }
  ops_.top_k({static_cast<int64_t>(n), vocab_, n_candidates_, draft_logits_.as<float>(), draft_sampling_.data(),
              draft_depths_, candidate_position_.data(), candidate_token_.data(), candidate_log_q_.data()});
}

void Round::build(const RoundPlan& plan) {
  size_t n_nodes = 0;
  for (const DecodeTask& task : plan.decode) n_nodes += static_cast<size_t>(task.plan.budget) + 1;
  for (auto* nodes : {&tree_token_, &tree_parent_, &tree_depth_}) nodes->resize(n_nodes);
  tree_weight_.resize(n_nodes);
  trees_.clear();
  n_nodes_.clear();
  int64_t at = 0;
  size_t drafted = 0;
  for (const DecodeTask& task : plan.decode) {
    Branch branch;
    branch.at = at;
    const auto root = static_cast<size_t>(at);
    tree_token_[root] = task.stream->root;
    tree_parent_[root] = -1;
    tree_depth_[root] = 0;
    tree_weight_[root] = 0;
    if (task.plan.budget > 0) {
      const int64_t from = static_cast<int64_t>(drafted++) * draft_depths_ * n_candidates_;
      ops_.build_tree({task.plan.depths, n_candidates_, candidate_token_.data() + from, candidate_log_q_.data() + from,
                       task.plan.budget, task.plan.spine, tree_token_.data() + at, tree_parent_.data() + at,
                       tree_depth_.data() + at, tree_weight_.data() + at, &branch.n_nodes});
    }
    branches_.push_back(branch);
    trees_.push_back(tree_of(branch));
    n_nodes_.push_back(branch.n_nodes);
    at += task.plan.budget + 1;
  }
  if (plan.cut && drafted > 0) plan.cut(trees_, n_nodes_);
  for (size_t i = 0; i < branches_.size(); ++i) branches_[i].n_nodes = std::clamp<int64_t>(n_nodes_[i], 0, branches_[i].n_nodes);
}

double Round::measure_verify(const Stream& stream, int64_t rows) {
  // A bushy tree of tokens that differ, so that rows route to different experts.
  const auto n = static_cast<size_t>(rows);
  std::vector<int32_t> token(n), parent(n), depth(n);
  const std::vector<float> weight(n);
  for (size_t i = 0; i < n; ++i) {
    token[i] = static_cast<int32_t>((stream.root + 7919 * static_cast<int64_t>(i)) % vocab_);
    parent[i] = i == 0 ? -1 : static_cast<int32_t>((i - 1) / 2);
    depth[i] = i == 0 ? 0 : depth[static_cast<size_t>(parent[i])] + 1;
  }
  StageSeconds time;
  StageClock clock(time);
  verify(stream, {rows - 1, token, parent, depth, weight}, false);
  ops_.sample({this->rows(rows), vocab_, logits_.as<float>(), &stream.sampling, nullptr, sample_.data()});
  return clock.end(Stage::verify);
}

double Round::measure_draft(const Stream& stream, int64_t depths) {
  StageSeconds time;
  StageClock clock(time);
  Stream copy = stream;
  DecodeTask task{&copy, {}};
  task.plan.budget = 2 * depths;
  task.plan.depths = depths;
  draft({&task, 1});
  return clock.end(Stage::draft);
}

std::span<const float> Round::verify(const Stream& stream, const Tree& given, bool poison_scratch) {
  if (poison_scratch) {
    const std::vector<float> nan(latent_scratch_.bytes() / sizeof(float), std::numeric_limits<float>::quiet_NaN());
    ops_.copy_in(latent_scratch_, 0, nan.data(), nan.size() * sizeof(float));
  }
  begin(1);
  pages_[0] = {stream.pages.data()};
  add_tree_rows(stream, 0, given);
  for (size_t i = 0; i < static_cast<size_t>(n_rows_); ++i) logits_row_[i] = static_cast<int32_t>(i);
  forward(n_rows_);
  return {logits_.as<float>(), static_cast<size_t>(n_rows_ * vocab_)};
}

}  // namespace kdt
