#include "rehearsal/rehearsal_ops.h"

#include <algorithm>

namespace kdt {
namespace {

constexpr double kBf16 = 2;

double bytes_of(const Matrix& m) {
  const auto weights = static_cast<double>(m.n_out * m.n_in);
  return m.group_size > 0 ? weights * (0.5 + kBf16 / static_cast<double>(m.group_size)) : weights * kBf16;
}

double bytes_of(const MatrixGroup& group) { return bytes_of(group.host[0]) * static_cast<double>(group.n); }

double bytes_of_norm(int64_t width) { return static_cast<double>(width) * sizeof(float); }

std::string shape_of(const Matrix& m) { return std::to_string(m.n_out) + "x" + std::to_string(m.n_in); }

}  // namespace

void RehearsalOps::watch(Watch how, const std::string& name) { watch_ = how, watched_ = name; }

template <class F>
void RehearsalOps::note(const std::string& name, double bytes, const F& op) {
  const auto known = std::find_if(noted_.begin(), noted_.end(), [&](const OpCalls& calls) { return calls.name == name; });
  OpCalls& calls = known != noted_.end() ? *known : noted_.emplace_back(OpCalls{name, 0, 0});
  ++calls.calls;
  calls.bytes += bytes;
  const bool watched = watch_ != Watch::nothing && name == watched_;
  if (watched && watch_ == Watch::leave_out) return;
  if (!watched) return op();
  real_->mark(kUnwatched);
  if (watch_ == Watch::time) op();
  real_->mark(kWatched);
  if (watch_ == Watch::gaps) op();
}

void RehearsalOps::submit(const SubmitKey* key, const std::function<void()>& work) {
  const auto note_work = [&] {
    layer_ = 0;
    noted_.clear();
    work();
  };
  if (!key || !records_) {
    real_->submit(nullptr, note_work);
    calls_ = &noted_;
    return;
  }
  const int64_t variant = variants_.try_emplace({watch_, watched_}, static_cast<int64_t>(variants_.size())).first->second;
  SubmitKey own = *key;
  own.back() += 16 * (2 * variant + (table_ ? 1 : 0));   // below 16: the round's own
  std::vector<OpCalls>& recorded = recorded_[own];
  real_->submit(&own, [&] {
    note_work();
    recorded = noted_;
  });
  calls_ = &recorded;
}

void RehearsalOps::embed(const EmbedArgs& args) {
  note("embed", kBf16 * static_cast<double>(args.rows.n.most * args.hidden), [&] { real_->embed(args); });
}

void RehearsalOps::rms_norm(const RmsNormArgs& args) {
  note("rms_norm " + std::to_string(args.width), bytes_of_norm(args.width), [&] { real_->rms_norm(args); });
}

void RehearsalOps::linear(const LinearArgs& args) {
  note("linear " + shape_of(*args.weight), bytes_of(*args.weight), [&] { real_->linear(args); });
}

void RehearsalOps::copy(const CopyArgs& args) {
  note("copy", 0, [&] { real_->copy(args); });
}

void RehearsalOps::mlp(const MlpArgs& args) {
  note("mlp " + shape_of(*args.down), bytes_of(*args.gate_up) + bytes_of(*args.down), [&] { real_->mlp(args); });
}

void RehearsalOps::latent_write(const LatentWriteArgs& args) {
  note("latent_write", bytes_of_norm(args.kv_lora + (args.q ? args.q_width : 0)), [&] { real_->latent_write(args); });
}

void RehearsalOps::mla_attention(const MlaAttentionArgs& args) {
  note("mla_attention", bytes_of(args.w_uk) + bytes_of(args.w_uv), [&] { real_->mla_attention(args); });
}

void RehearsalOps::route(const RouteArgs& args) {
  note("route", bytes_of(*args.gate) + bytes_of_norm(args.n_experts), [&] { real_->route(args); });
}

const int32_t* RehearsalOps::chosen(const int32_t* by_router) const {
  return table_ ? table_ + layer_ * stride_ : by_router;
}

void RehearsalOps::experts(const ExpertsArgs& args) {
  ExpertsArgs with = args;
  with.expert = chosen(args.expert);
  expert_bytes_ = bytes_of(args.gate_up.host[0]) + bytes_of(args.down.host[0]);
  note("experts", bytes_of(*args.shared_gate_up) + bytes_of(*args.shared_down), [&] { real_->experts(with); });
  ++layer_;
}

void RehearsalOps::count_experts(const CountExpertsArgs& args) {
  CountExpertsArgs with = args;
  with.expert = chosen(args.expert);
  note("count_experts", 0, [&] { real_->count_experts(with); });
}

void RehearsalOps::logits(const LinearArgs& args) {
  note("logits " + shape_of(*args.weight), bytes_of(*args.weight), [&] { real_->logits(args); });
}

void RehearsalOps::sum_ranks(const SumRanksArgs& args) {
  note("sum_ranks", 0, [&] { real_->sum_ranks(args); });
}

void RehearsalOps::gather_ranks(const GatherRanksArgs& args) {
  note("gather_ranks", 0, [&] { real_->gather_ranks(args); });
}

void RehearsalOps::top_k(const TopKArgs& args) {
  note("top_k", 0, [&] { real_->top_k(args); });
}

void RehearsalOps::sample(const SampleArgs& args) {
  note("sample", 0, [&] { real_->sample(args); });
}

void RehearsalOps::logprobs(const LogprobArgs& args) {
  note("logprobs", 0, [&] { real_->logprobs(args); });
}

void RehearsalOps::draft_context(const DraftContextArgs& args) {
  note("draft_context", bytes_of_norm(args.head_dim), [&] { real_->draft_context(args); });
}

void RehearsalOps::draft_attention(const DraftAttentionArgs& args) {
  note("draft_attention", 2 * bytes_of_norm(args.head_dim), [&] { real_->draft_attention(args); });
}

void RehearsalOps::build_trees(const BuildTreesArgs& args) {
  note("build_trees", 0, [&] { real_->build_trees(args); });
}

void RehearsalOps::cut(const CutArgs& args) {
  note("cut", 0, [&] { real_->cut(args); });
}

void RehearsalOps::lay_rows(const LayRowsArgs& args) {
  note("lay_rows", 0, [&] { real_->lay_rows(args); });
}

void RehearsalOps::accept(const AcceptArgs& args) {
  note("accept", 0, [&] { real_->accept(args); });
}

void RehearsalOps::commit(const CommitArgs& args) {
  note("commit", 0, [&] { real_->commit(args); });
}

}  // namespace kdt
