// Row-wise operations and the vocabulary.
#include "hooks.h"

using namespace kdt;
using hooks::Array;
using hooks::Backend;
using hooks::CountArgument;
using hooks::guarded;
using hooks::RowsArgument;
using hooks::Staged;

KDT_HOOK const char* kdt_hook_embed(Backend* b, const RowsArgument* rows, const void* table, int64_t hidden,
                                    const Array* out) {
  return guarded([&] {
    Staged s(*b);
    const EmbedArgs args{s.rows(rows), table, hidden, s.act_out(out)};
    s.run([&](Ops& ops) { ops.embed(args); });
  });
}

KDT_HOOK const char* kdt_hook_rms_norm(Backend* b, const CountArgument* n, int64_t width, const Array* x, int64_t x_stride,
                                       const Array* x_index, const Array* weight, float eps, const Array* out,
                                       int64_t out_stride, const Array* out_index) {
  return guarded([&] {
    Staged s(*b);
    const RmsNormArgs args{s.count(n), width, s.act_in(x), s.in<float>(weight), eps, s.act_out(out),
                           {x_stride, s.in<int32_t>(x_index)}, {out_stride, s.in<int32_t>(out_index)}};
    s.run([&](Ops& ops) { ops.rms_norm(args); });
  });
}

KDT_HOOK const char* kdt_hook_linear(Backend* b, const CountArgument* n, const Array* x, int64_t x_stride,
                                     const Array* x_index, int64_t weight, const Array* out, int64_t out_stride,
                                     const Array* out_index, int accumulate) {
  return guarded([&] {
    Staged s(*b);
    const LinearArgs args{s.count(n), s.act_in(x), &b->matrix(weight), s.act_out(out), accumulate != 0,
                          {x_stride, s.in<int32_t>(x_index)}, {out_stride, s.in<int32_t>(out_index)}};
    s.run([&](Ops& ops) { ops.linear(args); });
  });
}

KDT_HOOK const char* kdt_hook_logits(Backend* b, const CountArgument* n, const Array* x, const Array* x_index,
                                     int64_t weight, const Array* out) {
  return guarded([&] {
    Staged s(*b);
    const LinearArgs args{s.count(n), s.act_in(x), &b->matrix(weight), s.out<float>(out), false,
                          {0, s.in<int32_t>(x_index)}};
    s.run([&](Ops& ops) { ops.logits(args); });
  });
}

KDT_HOOK const char* kdt_hook_copy(Backend* b, const CountArgument* n, int64_t width, const Array* from, const Array* to) {
  return guarded([&] {
    Staged s(*b);
    const CopyArgs args{s.count(n), width, s.act_in(from), s.act_out(to)};
    s.run([&](Ops& ops) { ops.copy(args); });
  });
}

KDT_HOOK const char* kdt_hook_mlp(Backend* b, const CountArgument* n, const Array* x, int64_t gate_up, int64_t down,
                                  const Array* out, const Array* index) {
  return guarded([&] {
    Staged s(*b);
    const auto scratch = static_cast<size_t>(n->most * b->matrix(down).n_in) * b->ops->activation_bytes();
    const MlpArgs args{s.count(n), s.act_in(x), &b->matrix(gate_up), &b->matrix(down), s.work(scratch), s.act_out(out),
                       s.in<int32_t>(index)};
    s.run([&](Ops& ops) { ops.mlp(args); });
  });
}

// samplings: null, or one a stream of `depths` rows.
KDT_HOOK const char* kdt_hook_top_k(Backend* b, const CountArgument* n, int64_t vocab, int64_t k, const Array* logits,
                                    const Array* samplings, int64_t depths, const Array* position, const Array* token,
                                    const Array* log_q) {
  return guarded([&] {
    Staged s(*b);
    const TopKArgs args{s.count(n), vocab, k, s.in<float>(logits), s.in<Sampling>(samplings), depths,
                        s.in<int32_t>(position), s.work(b->ops->vocabulary_work_bytes(n->most, vocab, k)),
                        s.out<int32_t>(token), s.out<float>(log_q)};
    s.run([&](Ops& ops) { ops.top_k(args); });
  });
}

namespace {

// Lists of stream i: elements [first[i], first[i + 1]) of `token` and what belongs to it.
struct AdjustArgument {
  Array penalties;   // float [n_streams, 3]
  Array seen_first, seen, seen_count, bias_first, bias_token, bias, banned_first, banned, banned_until;
};

std::vector<LogitAdjust> adjusts(Staged& s, const AdjustArgument& a, int64_t n_streams) {
  const auto first = [](const Array& of) { return static_cast<const int64_t*>(of.data); };
  const auto* penalties = static_cast<const float*>(a.penalties.data);
  const int64_t *seen_first = first(a.seen_first), *bias_first = first(a.bias_first), *banned_first = first(a.banned_first);
  const auto *seen = s.in<int32_t>(&a.seen), *seen_count = s.in<int32_t>(&a.seen_count);
  const auto *bias_token = s.in<int32_t>(&a.bias_token), *banned = s.in<int32_t>(&a.banned);
  const auto* bias = s.in<float>(&a.bias);
  std::vector<LogitAdjust> all;
  for (int64_t i = 0; i < n_streams; ++i)
    all.push_back({penalties[3 * i], penalties[3 * i + 1], penalties[3 * i + 2], seen + seen_first[i],
                   seen_count + seen_first[i], seen_first[i + 1] - seen_first[i], bias_token + bias_first[i],
                   bias + bias_first[i], bias_first[i + 1] - bias_first[i], banned + banned_first[i],
                   banned_first[i + 1] - banned_first[i], static_cast<const int32_t*>(a.banned_until.data)[i]});
  return all;
}

}  // namespace

// adjust: null, or of every stream.
KDT_HOOK const char* kdt_hook_sample(Backend* b, const RowsArgument* rows, int64_t vocab, const Array* logits,
                                     const Array* samplings, const AdjustArgument* adjust, const Array* token) {
  return guarded([&] {
    Staged s(*b);
    std::vector<LogitAdjust> made;
    if (adjust) made = adjusts(s, *adjust, samplings->count<Sampling>());
    const SampleArgs args{s.rows(rows), vocab, s.in<float>(logits), s.in<Sampling>(samplings),
                          adjust ? s.values(made) : nullptr, s.work(b->ops->vocabulary_work_bytes(rows->n.most, vocab, 0)),
                          s.out<int32_t>(token)};
    s.run([&](Ops& ops) { ops.sample(args); });
  });
}

KDT_HOOK const char* kdt_hook_logprobs(Backend* b, const CountArgument* n, int64_t vocab, int64_t n_top,
                                       const Array* logits, const Array* row, const Array* token, const Array* logprob,
                                       const Array* top_token, const Array* top_logprob) {
  return guarded([&] {
    Staged s(*b);
    const LogprobArgs args{s.count(n), vocab, n_top, s.in<float>(logits), s.in<int32_t>(row), s.in<int32_t>(token),
                           s.out<float>(logprob), s.out<int32_t>(top_token), s.out<float>(top_logprob)};
    s.run([&](Ops& ops) { ops.logprobs(args); });
  });
}
