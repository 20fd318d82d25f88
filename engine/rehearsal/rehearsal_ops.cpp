#include "rehearsal/rehearsal_ops.h"

#include <algorithm>

namespace kdt {
namespace {

constexpr double kBf16 = 2;

OpCost operator+(OpCost a, OpCost b) { return {a.bytes + b.bytes, a.weights + b.weights, a.pause + b.pause}; }
OpCost operator*(double n, OpCost of) { return {n * of.bytes, n * of.weights, n * of.pause}; }

OpCost cost_of(const Matrix& m) {
  const auto weights = static_cast<double>(m.n_out * m.n_in);
  return {weights * (m.group_size > 0 ? 0.5 + kBf16 / static_cast<double>(m.group_size) : kBf16), weights};
}

OpCost cost_of(const MatrixGroup& group) { return static_cast<double>(group.n) * cost_of(group.host[0]); }

OpCost cost_of_norm(int64_t width) { return {static_cast<double>(width) * sizeof(float), 0}; }

std::string shape_of(const Matrix& m) { return std::to_string(m.n_out) + "x" + std::to_string(m.n_in); }

}  // namespace

void RehearsalOps::watch(Watch how, const std::string& name) { watch_ = how, watched_ = name; }

template <class F>
void RehearsalOps::note(const std::string& name, OpCost cost, const F& op) {
  const auto known = std::find_if(noted_.begin(), noted_.end(), [&](const OpCalls& calls) { return calls.name == name; });
  OpCalls& calls = known != noted_.end() ? *known : noted_.emplace_back(OpCalls{name});
  ++calls.calls;
  calls.cost = calls.cost + cost;
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
  note("embed", {kBf16 * static_cast<double>(args.rows.n.most * args.hidden), 0}, [&] { real_->embed(args); });
}

void RehearsalOps::rms_norm(const RmsNormArgs& args) {
  note("rms_norm " + std::to_string(args.width), cost_of_norm(args.width), [&] { real_->rms_norm(args); });
}

void RehearsalOps::linear(const LinearArgs& args) {
  note("linear " + shape_of(*args.weight), cost_of(*args.weight), [&] { real_->linear(args); });
}

void RehearsalOps::copy(const CopyArgs& args) {
  note("copy", {}, [&] { real_->copy(args); });
}

void RehearsalOps::mlp(const MlpArgs& args) {
  note("mlp " + shape_of(*args.down), cost_of(*args.gate_up) + cost_of(*args.down), [&] { real_->mlp(args); });
}

void RehearsalOps::latent_write(const LatentWriteArgs& args) {
  const OpCost queries = args.q ? cost_of_norm(args.q_b->n_in) + cost_of(*args.q_b) : OpCost{};
  note("latent_write", cost_of_norm(args.kv_lora) + queries, [&] { real_->latent_write(args); });
}

void RehearsalOps::mla_attention(const MlaAttentionArgs& args) {
  note("mla_attention", cost_of(args.w_uk) + cost_of(args.w_uv), [&] { real_->mla_attention(args); });
}

void RehearsalOps::route(const RouteArgs& args) {
  note("route", cost_of(*args.gate) + cost_of_norm(args.n_experts), [&] { real_->route(args); });
}

const int32_t* RehearsalOps::chosen(const int32_t* by_router) const {
  return table_ ? table_ + layer_ * stride_ : by_router;
}

void RehearsalOps::experts(const ExpertsArgs& args) {
  ExpertsArgs with = args;
  with.expert = chosen(args.expert);
  const OpCost expert = cost_of(args.gate_up.host[0]) + cost_of(args.down.host[0]);
  expert_bytes_ = expert.bytes;
  const OpCost of_row{0, static_cast<double>(args.k) * expert.weights};
  note("experts", cost_of(*args.shared_gate_up) + cost_of(*args.shared_down) + of_row, [&] { real_->experts(with); });
  ++layer_;
}

void RehearsalOps::count_experts(const CountExpertsArgs& args) {
  CountExpertsArgs with = args;
  with.expert = chosen(args.expert);
  note("count_experts", {}, [&] { real_->count_experts(with); });
}

void RehearsalOps::logits(const LinearArgs& args) {
  note("logits " + shape_of(*args.weight), cost_of(*args.weight), [&] { real_->logits(args); });
}

void RehearsalOps::wait_for_ranks(double bytes, int shots) {
  if (collectives_.ranks == 1) return;
  const double each = bytes / collectives_.bytes_per_second, others = static_cast<double>(collectives_.ranks - 1);
  double seconds = collectives_.seconds + others * each;
  if (shots == 2) seconds = std::min(seconds, 2 * (collectives_.seconds + others / static_cast<double>(collectives_.ranks) * each));
  note("collective", {0, 0, seconds}, [&] { real_->pause(seconds); });
}

void RehearsalOps::sum_ranks(const SumRanksArgs& args) {
  wait_for_ranks(static_cast<double>(args.n.most * args.width) * sizeof(float), 2);
  note("sum_ranks", args.norm_weight ? cost_of_norm(args.width) : OpCost{}, [&] { real_->sum_ranks(args); });
}

void RehearsalOps::gather_ranks(const GatherRanksArgs& args) {
  wait_for_ranks(static_cast<double>(args.n.most * args.width) * static_cast<double>(args.element_bytes), 1);
  note("gather_ranks", {}, [&] { real_->gather_ranks(args); });
}

void RehearsalOps::top_k(const TopKArgs& args) {
  note("top_k", {}, [&] { real_->top_k(args); });
}

void RehearsalOps::sample(const SampleArgs& args) {
  note("sample", {}, [&] { real_->sample(args); });
}

void RehearsalOps::logprobs(const LogprobArgs& args) {
  note("logprobs", {}, [&] { real_->logprobs(args); });
}

void RehearsalOps::draft_context(const DraftContextArgs& args) {
  note("draft_context", cost_of_norm(args.head_dim), [&] { real_->draft_context(args); });
}

void RehearsalOps::draft_attention(const DraftAttentionArgs& args) {
  note("draft_attention", 2 * cost_of_norm(args.head_dim), [&] { real_->draft_attention(args); });
}

void RehearsalOps::build_trees(const BuildTreesArgs& args) {
  note("build_trees", {}, [&] { real_->build_trees(args); });
}

void RehearsalOps::cut(const CutArgs& args) {
  note("cut", {}, [&] { real_->cut(args); });
}

void RehearsalOps::lay_rows(const LayRowsArgs& args) {
  note("lay_rows", {}, [&] { real_->lay_rows(args); });
}

void RehearsalOps::accept(const AcceptArgs& args) {
  note("accept", {}, [&] { real_->accept(args); });
}

void RehearsalOps::commit(const CommitArgs& args) {
  note("commit", {}, [&] { real_->commit(args); });
}

}  // namespace kdt
