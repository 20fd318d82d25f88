#include "runtime/round.h"

#include <algorithm>
#include <cmath>

#include "runtime/pages.h"

namespace kdt {
namespace {

RoundSizes sizes_of(const RoundLimits& limits, const Kimi& target, const DFlash* drafter) {
  return {limits.max_rows, limits.max_streams, drafter ? drafter->config().block_size : 0, target.config().n_layers};
}

}  // namespace

Round::Round(Ops& ops, Kimi& target, DFlash* drafter, const RoundLimits& limits, Communicator* comm)
    : ops_(ops), target_(target), drafter_(drafter), limits_(limits), comm_(comm), in_(ops, sizes_of(limits, target, drafter)),
      out_(ops, sizes_of(limits, target, drafter)), logprobs_(ops, sizes_of(limits, target, drafter)),
      lists_(ops, static_cast<size_t>(2 * limits.max_streams * pages_for(limits.max_context)) * sizeof(int32_t)) {
  const ModelConfig& c = target.config();
  vocab_ = c.vocab_size;
  hidden_ = c.hidden_size;
  n_layers_ = c.n_layers;
  max_candidates_ = std::min(limits.max_budget, vocab_);
  layer_page_bytes_ = ops.latent_page_bytes(c.kv_lora_rank, c.qk_rope_dim);
  page_stride_ = static_cast<size_t>(c.n_layers) * layer_page_bytes_;
  layer_scratch_bytes_ = ops.latent_scratch_bytes(limits.max_rows, c.kv_lora_rank, c.qk_rope_dim);
  latent_pages_ = ops.allocate(static_cast<size_t>(limits.n_pages) * page_stride_);
  latent_scratch_ = ops.allocate(static_cast<size_t>(c.n_layers) * layer_scratch_bytes_);
  logits_ = ops.allocate(static_cast<size_t>(limits.max_rows * vocab_) * sizeof(float));
  top_token_.reserve(static_cast<size_t>(limits.max_rows * kMaxTopLogprobs));   // spans into them stay
  top_logprob_.reserve(top_token_.capacity());
  const int64_t n_drafts = limits.max_streams * max_depths();
  vocabulary_work_ = ops.allocate(std::max(ops.vocabulary_work_bytes(limits.max_rows, vocab_, 0),
                                           ops.vocabulary_work_bytes(n_drafts, vocab_, max_candidates_)));
  if (!drafter_) return;
  const DraftConfig& d = drafter_->config();
  draft_layer_bytes_ = ops.draft_page_bytes(drafter_->rank_config().n_kv_heads, d.head_dim);
  draft_stride_ = d.layers.size() * draft_layer_bytes_;
  draft_pages_ = ops.allocate(static_cast<size_t>(limits.n_pages) * draft_stride_);
  const auto rows = static_cast<size_t>(limits.max_rows);
  taps_ = ops.allocate(d.target_layer_ids.size() * rows * static_cast<size_t>(hidden_) * ops.activation_bytes());
  draft_logits_ = ops.allocate(static_cast<size_t>(n_drafts * vocab_) * sizeof(float));
  candidate_token_ = ops.allocate(static_cast<size_t>(n_drafts * max_candidates_) * sizeof(int32_t));
  candidate_log_q_ = ops.allocate(static_cast<size_t>(n_drafts * max_candidates_) * sizeof(float));
}

LatentCache Round::latent_cache() const {
  return {latent_pages_.data(), page_stride_, layer_page_bytes_, latent_scratch_.data(), layer_scratch_bytes_};
}

DraftCache Round::draft_cache() const { return {draft_pages_.data(), draft_stride_, draft_layer_bytes_}; }

SubmitKey Round::Shape::key(Work work) const {
  return {drafts, depths, candidates, streams, rows, logits, kept, cut, adjust, count_experts, n_top, static_cast<int64_t>(work)};
}

StageSeconds Round::execute(Work work, const Shape& shape) {
  if (comm_) announce(work, shape);
  return perform(work, shape);
}

StageSeconds Round::perform(Work work, const Shape& shape) {
  if (work == Work::poisoned_verify) {
    const std::vector<std::byte> nan(latent_scratch_.bytes(), std::byte{0xff});   // in any floating-point type
    ops_.copy_in(latent_scratch_, 0, nan.data(), nan.size());
  }
  const SubmitKey key = shape.key(work);
  const bool read = work == Work::verify || work == Work::poisoned_verify;
  send();
  ops_.submit(shape.recorded && !read ? &key : nullptr, [&] {
    switch (work) {
      case Work::round: return run_round(shape);
      case Work::draft: draft(shape); return ops_.mark(Stage::draft);
      default: return run_given(shape, work == Work::given);
    }
  });
  const StageSeconds stages = ops_.wait();
  if (comm_) agree(work);
  return stages;
}

bool Round::is_recorded(const SubmitKey& key) const {
  const auto found = runs_.find(key);
  return found != runs_.end() && found->second > kRunsBefore;
}

RoundResult Round::run(const RoundPlan& plan, StageSeconds& time) {
  Shape shape = lay_plan(plan);
  RoundResult result;
  if (records()) {
    int& runs = runs_[shape.key(Work::round)];
    result.usual = shape.scored == 0 && runs > kRunsBefore;
    runs = plan.record ? kRunsBefore + 1 : std::min(runs, kRunsBefore) + 1;
    shape.recorded = shape.scored == 0 && runs > kRunsBefore;
  }
  const StageSeconds stages = execute(Work::round, shape);

  result.draft_seconds = stages[Stage::draft] + stages[Stage::build];
  for (const Stage stage : {Stage::verify, Stage::sample, Stage::accept, Stage::commit})
    result.verify_seconds += stages[stage];
  for (size_t i = 0; i < kStages; ++i)
    time.seconds[plan.decode.empty() ? static_cast<size_t>(Stage::prefill) : i] += stages.seconds[i];
  result.room = shape.rows;
  if (shape.cut) std::copy_n(out_.outlook.host, spec::Outlook::kPoints, result.outlook.tokens.begin());
  if (plan.count_experts) {
    const int64_t first = target_.config().n_dense_layers;
    for (int64_t layer = first; layer < n_layers_; ++layer) result.distinct_experts += out_.distinct_experts[layer];
    result.distinct_experts /= static_cast<double>(std::max<int64_t>(1, n_layers_ - first));
  }
  n_top_ = shape.n_top;
  top_token_.clear();
  top_logprob_.clear();
  read_decode(plan);
  read_prompts(plan);
  result.decode = decode_results_;
  result.prefill = prefill_results_;
  return result;
}

void Round::run_round(const Shape& s) {
  const Count streams{s.streams, &in_.counts.device->n_decode};
  if (s.drafts > 0) {
    draft(s);
    ops_.mark(Stage::draft);
  }
  ops_.build_trees({streams, in_.plan.device, s.depths, s.candidates, candidate_token_.as<int32_t>(),
                    candidate_log_q_.as<float>(), out_.nodes(), out_.n_nodes.device});
  if (s.cut) ops_.cut({streams, in_.plan.device, out_.nodes(), in_.cut.device, out_.n_nodes.device, out_.outlook.device});
  ops_.lay_rows({streams, in_.plan.device, in_.counts.device, out_.nodes(), out_.n_nodes.device, in_.token.device,
                 in_.position.device, in_.stream.device, in_.parent.device, in_.visible.device, in_.logits_row.device,
                 in_.sample_token.device, in_.sample_position.device, in_.sample_stream.device, in_.sample_parent.device,
                 out_.first_row.device, out_.n_rows.device, out_.n_logits.device, out_.n_sampled.device});
  if (s.drafts > 0) ops_.mark(Stage::build);

  const Rows rows{{s.rows, out_.n_rows.device}, in_.token.device, in_.position.device, in_.stream.device,
                  in_.parent.device, in_.visible.device};
  forward(rows, {s.logits, out_.n_logits.device}, s.count_experts ? out_.distinct_experts.device : nullptr);
  ops_.mark(Stage::verify);

  const Rows sampled{{s.logits - s.scored, out_.n_sampled.device}, in_.sample_token.device, in_.sample_position.device,
                     in_.sample_stream.device, in_.sample_parent.device, nullptr};
  ops_.sample({sampled, vocab_, logits_.as<float>() + s.scored * vocab_, in_.sampling.device,
               s.adjust ? in_.adjust.device : nullptr, vocabulary_work_.data(), out_.sample.device});
  ops_.mark(Stage::sample);

  ops_.accept({streams, in_.plan.device, in_.counts.device, out_.nodes(), out_.n_nodes.device, out_.first_row.device,
               in_.position.device, out_.sample.device, out_.path.device, out_.path_token.device, out_.n_path.device,
               in_.kept_row.device, in_.kept_position.device, in_.kept_stream.device, out_.n_kept.device,
               in_.scored_row.device, in_.scored_token.device, out_.n_logprobs.device});
  ops_.mark(Stage::accept);

  const Count kept{s.kept, out_.n_kept.device};
  ops_.commit({kept, in_.kept_row.device, rows, in_.pages.device, n_layers_, target_.config().kv_lora_rank,
               target_.config().qk_rope_dim, latent_pages_.data(), page_stride_, layer_page_bytes_, latent_scratch_.data(),
               layer_scratch_bytes_});
  if (drafter_) {
    const Rows committed{kept, nullptr, in_.kept_position.device, in_.kept_stream.device, nullptr, nullptr};
    drafter_->commit(committed, in_.kept_row.device, taps_.data(), limits_.max_rows * hidden_, in_.pages.device,
                     draft_cache());
  }
  if (s.n_top >= 0) {
    ops_.logprobs({{s.logits, out_.n_logprobs.device}, vocab_, s.n_top, logits_.as<float>(), in_.scored_row.device,
                   in_.scored_token.device, logprobs_.logprob.device, logprobs_.top_token.device,
                   logprobs_.top_logprob.device});
    ops_.fetch(logprobs_.arrays.memory(), logprobs_.arrays.bytes());
  }
  ops_.mark(Stage::commit);
  ops_.fetch(out_.arrays.memory(), out_.arrays.bytes());
}

void Round::draft(const Shape& s) {
  const int64_t block = drafter_->config().block_size;
  const Count candidates{s.drafts * s.depths, in_.n_candidate_rows.device};
  drafter_->propose({{s.drafts, in_.n_drafts.device}, {s.drafts * block, in_.n_block_rows.device}, candidates, s.depths,
                     in_.block_token.device, in_.block_start.device, in_.candidate_row.device, in_.draft_pages.device},
                    draft_cache(), draft_logits_.as<float>());
  ops_.top_k({candidates, vocab_, s.candidates, draft_logits_.as<float>(), in_.draft_sampling.device, s.depths,
              in_.candidate_position.device, vocabulary_work_.data(), candidate_token_.as<int32_t>(),
              candidate_log_q_.as<float>()});
}

void Round::forward(const Rows& rows, Count n_logits, int32_t* distinct_experts) {
  ForwardArgs args{rows, in_.pages.device, latent_cache()};
  args.n_logits = n_logits;
  args.logits_row = in_.logits_row.device;
  args.logits = logits_.as<float>();
  args.taps = taps_.data();
  args.tap_stride = limits_.max_rows * hidden_;
  args.distinct_experts = distinct_experts;
  target_.forward(args);
}

double Round::expected_experts(int64_t rows) const {
  const auto n = static_cast<double>(target_.config().n_experts);
  const auto k = static_cast<double>(target_.config().n_experts_per_token);
  return n * (1 - std::pow(1 - k / n, static_cast<double>(rows)));
}

}  // namespace kdt
