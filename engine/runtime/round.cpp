#include "runtime/round.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "spec/tree_build.h"

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
  for (auto* rows : {&token_, &position_, &stream_, &parent_, &visible_, &logits_row_, &sample_, &depth_, &path_,
                     &committed_, &commit_position_, &context_row_})
    rows->assign(n, 0);
  weight_.assign(n, 0.0f);
  std::iota(logits_row_.begin(), logits_row_.end(), 0);
  if (!drafter_) return;
  const DraftConfig& d = drafter_->config();
  draft_layer_bytes_ = ops.draft_page_bytes(d.n_kv_heads, d.head_dim);
  draft_stride_ = d.layers.size() * draft_layer_bytes_;
  draft_pages_ = ops.allocate(static_cast<size_t>(limits.n_pages) * draft_stride_);
  taps_ = ops.allocate(d.target_layer_ids.size() * n * static_cast<size_t>(hidden_) * ops.activation_bytes());
  const auto depths = static_cast<size_t>(max_depths());
  draft_logits_ = ops.allocate(depths * static_cast<size_t>(vocab_) * sizeof(float));
  candidate_token_.assign(depths * static_cast<size_t>(max_candidates_), 0);
  candidate_log_q_.assign(depths * static_cast<size_t>(max_candidates_), 0.0f);
  candidate_position_.assign(depths, 0);
}

Rows Round::rows(int64_t n) const {
  return {n, token_.data(), position_.data(), stream_.data(), parent_.data(), visible_.data()};
}

LatentCache Round::latent_cache() const {
  return {latent_pages_.data(), page_stride_, layer_page_bytes_, latent_scratch_.data(), layer_scratch_bytes_};
}

DraftCache Round::draft_cache() const { return {draft_pages_.data(), draft_stride_, draft_layer_bytes_}; }

Tree Round::tree(int64_t n_nodes) const {
  const auto n = static_cast<size_t>(n_nodes + 1);
  return {n_nodes, {token_.data(), n}, {parent_.data(), n}, {depth_.data(), n}, {weight_.data(), n}};
}

void Round::prefill(Stream& stream, std::span<const int32_t> tokens, bool sample, float* logits, StageSeconds& time) {
  StageClock clock(time);
  const auto n = static_cast<int64_t>(tokens.size());
  for (int64_t i = 0; i < n; ++i) {
    const auto row = static_cast<size_t>(i);
    token_[row] = tokens[row];
    position_[row] = static_cast<int32_t>(stream.length + i);
    parent_[row] = -1;
    visible_[row] = position_[row] + 1;
  }
  const StreamPages pages{stream.pages.data()};
  const auto last = static_cast<int32_t>(n - 1);
  ForwardArgs args{rows(n), &pages, latent_cache()};
  if (logits) {
    args.n_logits = n;
    args.logits_row = logits_row_.data();
  } else if (sample) {
    args.n_logits = 1;
    args.logits_row = &last;
  }
  args.logits = logits_.as<float>();
  args.taps = taps_.data();
  args.tap_stride = limits_.max_rows * hidden_;
  target_.forward(args);
  if (logits) ops_.copy_out(logits_, 0, logits, static_cast<size_t>(n * vocab_) * sizeof(float));
  commit_context(stream, {logits_row_.data(), tokens.size()});
  if (sample) {
    Rows one = rows(1);
    one.position += last;
    const float* at = logits_.as<float>() + (logits ? last * vocab_ : 0);
    ops_.sample({one, vocab_, at, &stream.sampling, sample_.data()});
    stream.root = sample_[0];
  }
  stream.length += n;
  clock.end(Stage::prefill);
}

DecodeResult Round::decode(Stream& stream, const DecodePlan& plan, StageSeconds& time) {
  StageClock clock(time);
  DecodeResult result{};
  const StreamPages pages{stream.pages.data()};
  int64_t n_nodes = 0;
  token_[0] = stream.root;
  if (plan.budget > 0) {
    draft(stream, plan);
    result.draft_seconds += clock.end(Stage::draft);
    ops_.build_tree({plan.depths, n_candidates_, candidate_token_.data(), candidate_log_q_.data(), plan.budget, plan.spine,
                     token_.data(), parent_.data(), depth_.data(), weight_.data(), &n_nodes});
    if (plan.cut) n_nodes = std::min(n_nodes, plan.cut(tree(n_nodes)));
    result.draft_seconds += clock.end(Stage::build);
  }
  verify_rows(stream, n_nodes);
  result.verify_seconds += clock.end(Stage::verify);
  ops_.sample({rows(n_nodes + 1), vocab_, logits_.as<float>(), &stream.sampling, sample_.data()});
  result.verify_seconds += clock.end(Stage::sample);

  int64_t n_path = 0;
  ops_.accept({n_nodes, token_.data(), parent_.data(), sample_.data(), path_.data(), &n_path});
  const std::span<const int32_t> path{path_.data(), static_cast<size_t>(n_path)};
  for (size_t i = 0; i < path.size(); ++i) {
    const auto node = static_cast<size_t>(path[i]);
    committed_[i] = sample_[node];
    commit_position_[i] = position_[node];
  }
  result.verify_seconds += clock.end(Stage::accept);

  const ModelConfig& c = target_.config();
  ops_.commit({n_path - 1, path_.data() + 1, commit_position_.data() + 1, &pages, c.n_layers, c.kv_lora_rank, c.qk_rope_dim,
               latent_pages_.data(), page_stride_, layer_page_bytes_, latent_scratch_.data(), layer_scratch_bytes_});
  result.tree = tree(n_nodes);
  commit_context(stream, path);
  stream.length += n_path;
  stream.root = committed_[path.size() - 1];
  result.path = path;
  result.tokens = {committed_.data(), path.size()};
  result.verify_seconds += clock.end(Stage::commit);
  return result;
}

void Round::draft(const Stream& stream, const DecodePlan& plan) {
  const StreamPages pages{stream.pages.data()};
  const auto start = static_cast<int32_t>(stream.length);
  drafter_->propose(stream.root, start, plan.depths, &pages, draft_cache(), draft_logits_.as<float>());
  n_candidates_ = plan.chain ? 1 : std::min(plan.budget, max_candidates_);
  for (int64_t d = 0; d < plan.depths; ++d)
    candidate_position_[static_cast<size_t>(d)] = static_cast<int32_t>(start + 1 + d);
  ops_.top_k({plan.depths, vocab_, n_candidates_, draft_logits_.as<float>(),
              plan.noise_ranking ? &stream.sampling : nullptr, plan.depths, candidate_position_.data(),
              candidate_token_.data(), candidate_log_q_.data()});
}

void Round::verify_rows(const Stream& stream, int64_t n_nodes) {
  const auto root = static_cast<int32_t>(stream.length);
  parent_[0] = -1;
  position_[0] = root;
  visible_[0] = root + 1;
  for (size_t i = 1; i <= static_cast<size_t>(n_nodes); ++i) {
    position_[i] = root + depth_[i];
    visible_[i] = root + 1;
  }
  const StreamPages pages{stream.pages.data()};
  ForwardArgs args{rows(n_nodes + 1), &pages, latent_cache()};
  args.n_logits = n_nodes + 1;
  args.logits_row = logits_row_.data();
  args.logits = logits_.as<float>();
  args.taps = taps_.data();
  args.tap_stride = limits_.max_rows * hidden_;
  target_.forward(args);
}

// `rows_in_pass`: rows of the last pass, in order of position, that are committed now.
void Round::commit_context(const Stream& stream, std::span<const int32_t> rows_in_pass) {
  if (!drafter_) return;
  const StreamPages pages{stream.pages.data()};
  for (size_t i = 0; i < rows_in_pass.size(); ++i)
    context_row_[i] = position_[static_cast<size_t>(rows_in_pass[i])];
  const Rows committed{static_cast<int64_t>(rows_in_pass.size()), nullptr, context_row_.data(), stream_.data(), nullptr,
                       nullptr};
  drafter_->commit(committed, rows_in_pass.data(), taps_.data(), limits_.max_rows * hidden_, &pages, draft_cache());
}

double Round::measure_verify(const Stream& stream, int64_t rows) {
  // A bushy tree of tokens that differ, so that rows route to different experts.
  for (int64_t i = 0; i < rows; ++i) {
    const auto row = static_cast<size_t>(i);
    token_[row] = static_cast<int32_t>((stream.root + 7919 * i) % vocab_);
    parent_[row] = static_cast<int32_t>(i == 0 ? -1 : (i - 1) / 2);
    depth_[row] = i == 0 ? 0 : depth_[static_cast<size_t>(parent_[row])] + 1;
  }
  StageSeconds time;
  StageClock clock(time);
  verify_rows(stream, rows - 1);
  ops_.sample({this->rows(rows), vocab_, logits_.as<float>(), &stream.sampling, sample_.data()});
  return clock.end(Stage::verify);
}

double Round::measure_draft(const Stream& stream, int64_t depths) {
  StageSeconds time;
  StageClock clock(time);
  DecodePlan plan;
  plan.budget = 2 * depths;
  plan.depths = depths;
  draft(stream, plan);
  return clock.end(Stage::draft);
}

std::span<const float> Round::verify(const Stream& stream, const Tree& given, bool poison_scratch) {
  if (poison_scratch) {
    const std::vector<float> nan(latent_scratch_.bytes() / sizeof(float), std::numeric_limits<float>::quiet_NaN());
    ops_.copy_in(latent_scratch_, 0, nan.data(), nan.size() * sizeof(float));
  }
  std::copy(given.token.begin(), given.token.end(), token_.begin());
  std::copy(given.parent.begin(), given.parent.end(), parent_.begin());
  std::copy(given.depth.begin(), given.depth.end(), depth_.begin());
  verify_rows(stream, given.n_nodes);
  return {logits_.as<float>(), static_cast<size_t>((given.n_nodes + 1) * vocab_)};
}

}  // namespace kdt
