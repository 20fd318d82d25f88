#include "runtime/round.h"

#include <algorithm>
#include <cmath>

namespace kdt {

Round::Round(Ops& ops, Kimi& target, DFlash* drafter, const RoundLimits& limits)
    : ops_(ops), target_(target), drafter_(drafter), limits_(limits) {
  const ModelConfig& c = target.config();
  vocab_ = c.vocab_size;
  hidden_ = c.hidden_size;
  max_candidates_ = std::min(limits.max_budget, vocab_);
  layer_page_bytes_ = ops.latent_page_bytes(c.kv_lora_rank, c.qk_rope_dim);
  page_stride_ = static_cast<size_t>(c.n_layers) * layer_page_bytes_;
  layer_scratch_bytes_ = ops.latent_scratch_bytes(limits.max_rows, c.kv_lora_rank, c.qk_rope_dim);
  latent_pages_ = ops.allocate(static_cast<size_t>(limits.n_pages) * page_stride_);
  latent_scratch_ = ops.allocate(static_cast<size_t>(c.n_layers) * layer_scratch_bytes_);
  logits_ = ops.allocate(static_cast<size_t>(limits.max_rows * vocab_) * sizeof(float));
  const auto n = static_cast<size_t>(limits.max_rows);
  for (auto* rows : {&token_, &position_, &stream_, &parent_, &visible_, &logits_row_, &sample_token_, &sample_position_,
                     &sample_stream_, &sample_parent_, &sample_, &path_, &committed_, &commit_row_,
                     &commit_position_, &context_row_, &context_position_, &context_stream_})
    rows->assign(n, 0);
  for (int64_t layer = 0; layer < c.n_layers; ++layer) {
    experts_.emplace_back(layer < c.n_dense_layers ? 0 : n * static_cast<size_t>(c.n_experts_per_token));
    experts_out_.push_back(experts_.back().data());
  }
  if (!drafter_) return;
  const DraftConfig& d = drafter_->config();
  draft_layer_bytes_ = ops.draft_page_bytes(d.n_kv_heads, d.head_dim);
  draft_stride_ = d.layers.size() * draft_layer_bytes_;
  draft_pages_ = ops.allocate(static_cast<size_t>(limits.n_pages) * draft_stride_);
  taps_ = ops.allocate(d.target_layer_ids.size() * n * static_cast<size_t>(hidden_) * ops.activation_bytes());
  draft_logits_ = ops.allocate(static_cast<size_t>(limits.max_streams * max_depths() * vocab_) * sizeof(float));
}

Rows Round::rows(int64_t n) const {
  return {n, token_.data(), position_.data(), stream_.data(), parent_.data(), visible_.data()};
}

LatentCache Round::latent_cache() const {
  return {latent_pages_.data(), page_stride_, layer_page_bytes_, latent_scratch_.data(), layer_scratch_bytes_};
}

DraftCache Round::draft_cache() const { return {draft_pages_.data(), draft_stride_, draft_layer_bytes_}; }

Tree Round::tree_of(const Branch& branch) const {
  const auto at = static_cast<size_t>(branch.at), n = static_cast<size_t>(branch.n_nodes + 1);
  return {branch.n_nodes, std::span(tree_token_).subspan(at, n), std::span(tree_parent_).subspan(at, n),
          std::span(tree_depth_).subspan(at, n), std::span(tree_weight_).subspan(at, n)};
}

void Round::begin(size_t n_streams) {
  n_rows_ = n_sampled_ = 0;
  any_adjust_ = false;
  pages_.resize(n_streams);
  sampling_.resize(n_streams);
  adjust_.resize(n_streams);
  branches_.clear();
}

RoundResult Round::run(const RoundPlan& plan, StageSeconds& time) {
  StageClock clock(time);
  RoundResult result;
  const size_t n_decode = plan.decode.size();
  begin(n_decode + plan.prefill.size());
  for (size_t i = 0; i < pages_.size(); ++i) {
    const Stream& stream = i < n_decode ? *plan.decode[i].stream : *plan.prefill[i - n_decode].stream;
    pages_[i] = {stream.pages.data()};
    sampling_[i] = stream.sampling;
    adjust_[i] = stream.adjust;
    any_adjust_ |= stream.adjust != nullptr;
  }
  draft(plan.decode);
  if (!drafting_.empty()) result.draft_seconds += clock.end(Stage::draft);
  build(plan);
  if (!drafting_.empty()) result.draft_seconds += clock.end(Stage::build);

  const auto stage = [n_decode](Stage of_decode) { return n_decode > 0 ? of_decode : Stage::prefill; };
  for (size_t i = 0; i < n_decode; ++i) {
    branches_[i].row = n_rows_;
    add_tree_rows(*plan.decode[i].stream, static_cast<int32_t>(i), tree_of(branches_[i]));
  }
  int64_t n_logits = n_rows_;
  for (int64_t i = 0; i < n_logits; ++i) logits_row_[static_cast<size_t>(i)] = static_cast<int32_t>(i);
  for (size_t i = 0; i < plan.prefill.size(); ++i) {
    add_prompt_rows(plan.prefill[i], static_cast<int32_t>(n_decode + i));
    if (plan.prefill[i].sample) logits_row_[static_cast<size_t>(n_logits++)] = static_cast<int32_t>(n_rows_ - 1);
  }
  n_sampled_ = n_logits;
  // Rows whose logits are read but not sampled: of prompts that are scored.
  int64_t row = branches_.empty() ? 0 : branches_.back().row + branches_.back().n_nodes + 1;
  for (const PrefillTask& task : plan.prefill) {
    const auto n = static_cast<int64_t>(task.tokens.size());
    if (task.logits || task.prompt_n_top >= 0)
      for (int64_t i = 0; i < n - task.sample; ++i)
        logits_row_[static_cast<size_t>(n_logits++)] = static_cast<int32_t>(row + i);
    row += n;
  }
  forward(n_logits, plan.count_experts);
  if (plan.count_experts) result.distinct_experts = count_experts();
  result.verify_seconds += clock.end(stage(Stage::verify));
  sample_rows(plan);
  result.verify_seconds += clock.end(stage(Stage::sample));
  accept(plan);
  result.verify_seconds += clock.end(stage(Stage::accept));
  commit(plan);
  find_logprobs(plan);
  result.verify_seconds += clock.end(stage(Stage::commit));
  result.decode = decode_results_;
  result.prefill = prefill_results_;
  return result;
}

void Round::add_tree_rows(const Stream& stream, int32_t stream_index, const Tree& tree) {
  const auto root = static_cast<int32_t>(stream.length);
  for (size_t i = 0; i <= static_cast<size_t>(tree.n_nodes); ++i) {
    const auto row = static_cast<size_t>(n_rows_) + i;
    token_[row] = tree.token[i];
    position_[row] = root + tree.depth[i];
    stream_[row] = stream_index;
    parent_[row] = i == 0 ? -1 : static_cast<int32_t>(n_rows_) + tree.parent[i];
    visible_[row] = root + 1;
  }
  n_rows_ += tree.n_nodes + 1;
}

void Round::add_prompt_rows(const PrefillTask& task, int32_t stream_index) {
  for (size_t i = 0; i < task.tokens.size(); ++i) {
    const auto row = static_cast<size_t>(n_rows_) + i;
    token_[row] = task.tokens[i];
    position_[row] = static_cast<int32_t>(task.stream->length + static_cast<int64_t>(i));
    stream_[row] = stream_index;
    parent_[row] = -1;
    visible_[row] = position_[row] + 1;
  }
  n_rows_ += static_cast<int64_t>(task.tokens.size());
}

void Round::forward(int64_t n_logits, bool keep_experts) {
  ForwardArgs args{rows(n_rows_), pages_.data(), latent_cache()};
  args.n_logits = n_logits;
  args.logits_row = logits_row_.data();
  args.logits = logits_.as<float>();
  args.taps = taps_.data();
  args.tap_stride = limits_.max_rows * hidden_;
  if (keep_experts) args.chosen_experts = experts_out_;
  target_.forward(args);
}

double Round::count_experts() const {
  const ModelConfig& c = target_.config();
  std::vector<bool> seen(static_cast<size_t>(c.n_experts));
  double total = 0;
  for (int64_t layer = c.n_dense_layers; layer < c.n_layers; ++layer) {
    seen.assign(seen.size(), false);
    const int32_t* chosen = experts_[static_cast<size_t>(layer)].data();
    for (int64_t i = 0; i < n_rows_ * c.n_experts_per_token; ++i) seen[static_cast<size_t>(chosen[i])] = true;
    total += static_cast<double>(std::count(seen.begin(), seen.end(), true));
  }
  return total / static_cast<double>(std::max<int64_t>(1, c.n_layers - c.n_dense_layers));
}

double Round::expected_experts(int64_t rows) const {
  const auto n = static_cast<double>(target_.config().n_experts), k = static_cast<double>(target_.config().n_experts_per_token);
  return n * (1 - std::pow(1 - k / n, static_cast<double>(rows)));
}

void Round::sample_rows(const RoundPlan& plan) {
  // Trees come first, so that a node's row is also its place here.
  for (size_t i = 0; i < static_cast<size_t>(n_sampled_); ++i) {
    const auto row = static_cast<size_t>(logits_row_[i]);
    sample_token_[i] = token_[row];
    sample_position_[i] = position_[row];
    sample_stream_[i] = stream_[row];
    sample_parent_[i] = parent_[row];
  }
  const Rows sampled{n_sampled_, sample_token_.data(), sample_position_.data(), sample_stream_.data(),
                     sample_parent_.data(), nullptr};
  ops_.sample({sampled, vocab_, logits_.as<float>(), sampling_.data(), any_adjust_ ? adjust_.data() : nullptr,
               sample_.data()});
  const auto n_trees = static_cast<size_t>(branches_.empty() ? 0 : branches_.back().row + branches_.back().n_nodes + 1);
  size_t at = n_trees;
  for (const PrefillTask& task : plan.prefill)
    if (task.sample) task.stream->root = sample_[at++];
}

void Round::accept(const RoundPlan& plan) {
  int64_t path_at = 0;
  for (size_t b = 0; b < plan.decode.size(); ++b) {
    Branch& branch = branches_[b];
    const Tree tree = tree_of(branch);
    branch.path_at = path_at;
    const int32_t* sample = sample_.data() + branch.row;
    int32_t* path = path_.data() + path_at;
    ops_.accept({branch.n_nodes, tree.token.data(), tree.parent.data(), sample, path, &branch.n_path});
    for (int64_t i = 0; i < branch.n_path; ++i) {
      const auto to = static_cast<size_t>(path_at + i);
      commit_row_[to] = static_cast<int32_t>(branch.row) + path[i];
      commit_position_[to] = position_[static_cast<size_t>(commit_row_[to])];
      committed_[to] = sample[path[i]];
    }
    path_at += branch.n_path;
  }
}

void Round::commit(const RoundPlan& plan) {
  const ModelConfig& c = target_.config();
  size_t n_context = 0;
  const auto add_context = [&](int32_t row) {
    context_row_[n_context] = row;
    context_position_[n_context] = position_[static_cast<size_t>(row)];
    context_stream_[n_context++] = stream_[static_cast<size_t>(row)];
  };
  int32_t prompt_row = 0;
  for (size_t b = 0; b < branches_.size(); ++b) {
    const Branch& branch = branches_[b];
    const auto at = static_cast<size_t>(branch.path_at);
    // The root is a committed row: its KV is in its page already.
    ops_.commit({branch.n_path - 1, commit_row_.data() + at + 1, commit_position_.data() + at + 1, &pages_[b], c.n_layers,
                 c.kv_lora_rank, c.qk_rope_dim, latent_pages_.data(), page_stride_, layer_page_bytes_,
                 latent_scratch_.data(), layer_scratch_bytes_});
    for (int64_t i = 0; i < branch.n_path; ++i) add_context(commit_row_[at + static_cast<size_t>(i)]);
    prompt_row = static_cast<int32_t>(branch.row + branch.n_nodes + 1);
  }
  for (const PrefillTask& task : plan.prefill)
    for (size_t i = 0; i < task.tokens.size(); ++i) add_context(prompt_row++);
  if (drafter_) {
    const Rows committed{static_cast<int64_t>(n_context), nullptr, context_position_.data(), context_stream_.data(),
                         nullptr, nullptr};
    drafter_->commit(committed, context_row_.data(), taps_.data(), limits_.max_rows * hidden_, pages_.data(),
                     draft_cache());
  }
  for (size_t b = 0; b < plan.decode.size(); ++b) {
    Stream& stream = *plan.decode[b].stream;
    stream.length += branches_[b].n_path;
    stream.root = committed_[static_cast<size_t>(branches_[b].path_at + branches_[b].n_path - 1)];
  }
  for (const PrefillTask& task : plan.prefill) task.stream->length += static_cast<int64_t>(task.tokens.size());
}

}  // namespace kdt
