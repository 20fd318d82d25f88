// What a rank gives, and where ranks meet: of a backend that has no other ranks.
#include "hooks.h"

using namespace kdt;
using hooks::Array;
using hooks::Backend;
using hooks::CountArgument;
using hooks::guarded;
using hooks::RowsArgument;
using hooks::Staged;

KDT_HOOK const char* kdt_hook_embed_partial(Backend* b, const RowsArgument* rows, const void* table, int64_t hidden,
                                            int64_t first_token, int64_t n_tokens, const Array* partial) {
  return guarded([&] {
    Staged s(*b);
    const EmbedArgs args{s.rows(rows), table, hidden, nullptr, s.out<float>(partial), first_token, n_tokens};
    s.run([&](Ops& ops) { ops.embed(args); });
  });
}

KDT_HOOK const char* kdt_hook_linear_partial(Backend* b, const CountArgument* n, const Array* x, const Array* x_index,
                                             int64_t weight, const Array* partial) {
  return guarded([&] {
    Staged s(*b);
    const LinearArgs args{s.count(n), s.act_in(x), &b->matrix(weight), nullptr, true, {0, s.in<int32_t>(x_index)}, {},
                          s.out<float>(partial)};
    s.run([&](Ops& ops) { ops.linear(args); });
  });
}

KDT_HOOK const char* kdt_hook_mlp_partial(Backend* b, const CountArgument* n, const Array* x, int64_t gate_up, int64_t down,
                                          const Array* index, const Array* partial) {
  return guarded([&] {
    Staged s(*b);
    const auto scratch = static_cast<size_t>(n->most * b->matrix(down).n_in) * b->ops->activation_bytes();
    const MlpArgs args{s.count(n), s.act_in(x), &b->matrix(gate_up), &b->matrix(down), s.work(scratch), nullptr,
                       s.in<int32_t>(index), s.out<float>(partial)};
    s.run([&](Ops& ops) { ops.mlp(args); });
  });
}

KDT_HOOK const char* kdt_hook_experts_partial(Backend* b, const CountArgument* n, int64_t hidden, const Array* x,
                                              const Array* expert, const Array* weight, int64_t n_experts, int64_t k,
                                              const int64_t* gate_up, const int64_t* down, int64_t shared_gate_up,
                                              int64_t shared_down, const Array* partial) {
  return guarded([&] {
    Staged s(*b);
    const int64_t width = b->matrix(down[0]).n_in, shared_width = b->matrix(shared_down).n_in;
    const size_t scratch = b->ops->experts_scratch_bytes(n->most, k, n_experts, width, shared_width, hidden);
    const ExpertsArgs args{s.count(n), hidden, s.act_in(x), s.in<int32_t>(expert), s.in<float>(weight), n_experts, k,
                           b->group(gate_up, n_experts), b->group(down, n_experts), width, &b->matrix(shared_gate_up),
                           &b->matrix(shared_down), s.work(scratch), nullptr, s.out<float>(partial)};
    s.run([&](Ops& ops) { ops.experts(args); });
  });
}

KDT_HOOK const char* kdt_hook_sum_ranks(Backend* b, const CountArgument* n, int64_t width, const Array* partial,
                                        const Array* out, int accumulate, const Array* out_index, const Array* norm_weight,
                                        float eps, const Array* norm_out) {
  return guarded([&] {
    Staged s(*b);
    const SumRanksArgs args{s.count(n), width, s.out<float>(partial), s.act_out(out), accumulate != 0,
                            {0, s.in<int32_t>(out_index)}, s.in<float>(norm_weight), eps, s.act_out(norm_out)};
    s.run([&](Ops& ops) { ops.sum_ranks(args); });
  });
}

KDT_HOOK const char* kdt_hook_gather_ranks(Backend* b, const CountArgument* n, int64_t width, const Array* part, int64_t rank,
                                           int64_t n_ranks, const Array* out) {
  return guarded([&] {
    Staged s(*b);
    const GatherRanksArgs args{s.count(n), width, sizeof(float), s.in<float>(part), rank, n_ranks, s.out<float>(out)};
    s.run([&](Ops& ops) { ops.gather_ranks(args); });
  });
}
