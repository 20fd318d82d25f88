// Attention of both models, the router and the experts.
#include "hooks.h"

using namespace kdt;
using hooks::Array;
using hooks::Backend;
using hooks::CountArgument;
using hooks::guarded;
using hooks::RowsArgument;
using hooks::Staged;

namespace {

// Positions that a page table can hold.
int64_t most_positions(const Array* page_tables, int64_t n_streams) {
  return page_tables->count<int32_t>() / std::max<int64_t>(n_streams, 1) * kPageTokens;
}

}  // namespace

KDT_HOOK const char* kdt_hook_route(Backend* b, const CountArgument* n, const Array* x, int64_t gate, const Array* bias,
                                    int64_t k, int normalise, float scaling, const Array* expert, const Array* weight) {
  return guarded([&] {
    Staged s(*b);
    const int64_t n_experts = b->matrix(gate).n_out;
    const auto scores = static_cast<size_t>(n->most * n_experts) * sizeof(float);
    const RouteArgs args{s.count(n), s.act_in(x), &b->matrix(gate), s.in<float>(bias), n_experts, k, normalise != 0,
                         scaling, static_cast<float*>(s.work(scores)), s.out<int32_t>(expert), s.out<float>(weight)};
    s.run([&](Ops& ops) { ops.route(args); });
  });
}

KDT_HOOK const char* kdt_hook_experts(Backend* b, const CountArgument* n, int64_t hidden, const Array* x,
                                      const Array* expert, const Array* weight, int64_t n_experts, int64_t k,
                                      const int64_t* gate_up, const int64_t* down, int64_t shared_gate_up,
                                      int64_t shared_down, const Array* out) {
  return guarded([&] {
    Staged s(*b);
    const int64_t width = b->matrix(down[0]).n_in, shared_width = b->matrix(shared_down).n_in;
    const size_t scratch = b->ops->experts_scratch_bytes(n->most, k, n_experts, width, shared_width, hidden);
    const ExpertsArgs args{s.count(n), hidden, s.act_in(x), s.in<int32_t>(expert), s.in<float>(weight), n_experts, k,
                           b->group(gate_up, n_experts), b->group(down, n_experts), width, &b->matrix(shared_gate_up),
                           &b->matrix(shared_down), s.work(scratch), s.act_out(out)};
    s.run([&](Ops& ops) { ops.experts(args); });
  });
}

KDT_HOOK const char* kdt_hook_count_experts(Backend* b, const CountArgument* n, int64_t n_experts, int64_t k,
                                            const Array* expert, const Array* distinct) {
  return guarded([&] {
    Staged s(*b);
    const CountExpertsArgs args{s.count(n), n_experts, k, s.in<int32_t>(expert), s.out<int32_t>(distinct)};
    s.run([&](Ops& ops) { ops.count_experts(args); });
  });
}

KDT_HOOK const char* kdt_hook_latent_write(Backend* b, const RowsArgument* rows, const Array* page_tables,
                                           int64_t n_streams, const Array* kv, int64_t kv_stride, const Array* norm_weight,
                                           float eps, const Array* cos, const Array* sin, int64_t rope, int64_t kv_lora,
                                           const Array* pages, int64_t page_stride, const Array* scratch, const Array* q,
                                           const Array* q_norm_weight, int64_t q_b, const Array* q_out) {
  return guarded([&] {
    Staged s(*b);
    const Matrix* matrix = q ? &b->matrix(q_b) : nullptr;
    const size_t latents = matrix ? static_cast<size_t>(rows->n.most * matrix->n_in) * b->ops->activation_bytes() : 0;
    const LatentWriteArgs args{s.rows(rows), s.streams(page_tables, n_streams), s.act_in(kv), kv_stride,
                               s.in<float>(norm_weight), eps, {s.in<float>(cos), s.in<float>(sin), rope}, kv_lora,
                               s.out<std::byte>(pages), static_cast<size_t>(page_stride), s.out<std::byte>(scratch),
                               s.act_in(q), s.in<float>(q_norm_weight), matrix, latents > 0 ? s.work(latents) : nullptr,
                               s.act_out(q_out)};
    s.run([&](Ops& ops) { ops.latent_write(args); });
  });
}

KDT_HOOK const char* kdt_hook_mla_attention(Backend* b, const RowsArgument* rows, const Array* page_tables,
                                            int64_t n_streams, const Array* q, const int64_t* w_uk, const int64_t* w_uv,
                                            int64_t n_heads, int64_t nope, int64_t kv_lora, int64_t v_head,
                                            const Array* cos, const Array* sin, int64_t rope, float scale,
                                            const Array* pages, int64_t page_stride, const Array* scratch,
                                            const Array* out) {
  return guarded([&] {
    Staged s(*b);
    const int64_t max_context = most_positions(page_tables, n_streams);
    const size_t work = b->ops->attention_work_bytes(rows->n.most, n_heads, kv_lora + rope, max_context);
    const MlaAttentionArgs args{s.rows(rows), s.streams(page_tables, n_streams), s.act_out(q), b->group(w_uk, n_heads),
                                b->group(w_uv, n_heads), n_heads, nope, kv_lora, v_head,
                                {s.in<float>(cos), s.in<float>(sin), rope}, scale, s.in<std::byte>(pages),
                                static_cast<size_t>(page_stride), s.in<std::byte>(scratch), max_context, s.work(work),
                                s.act_out(out)};
    s.run([&](Ops& ops) { ops.mla_attention(args); });
  });
}

KDT_HOOK const char* kdt_hook_commit(Backend* b, const CountArgument* n, const Array* row, const RowsArgument* rows,
                                     const Array* page_tables, int64_t n_streams, int64_t n_layers, int64_t kv_lora,
                                     int64_t rope, const Array* pages, int64_t page_stride, int64_t layer_page_bytes,
                                     const Array* scratch, int64_t layer_scratch_bytes) {
  return guarded([&] {
    Staged s(*b);
    const CommitArgs args{s.count(n), s.in<int32_t>(row), s.rows(rows), s.streams(page_tables, n_streams), n_layers,
                          kv_lora, rope, s.out<std::byte>(pages), static_cast<size_t>(page_stride),
                          static_cast<size_t>(layer_page_bytes), s.in<std::byte>(scratch),
                          static_cast<size_t>(layer_scratch_bytes)};
    s.run([&](Ops& ops) { ops.commit(args); });
  });
}

KDT_HOOK const char* kdt_hook_draft_context(Backend* b, const RowsArgument* rows, const Array* page_tables,
                                            int64_t n_streams, const Array* kv, const Array* k_norm, float eps,
                                            const Array* cos, const Array* sin, int64_t n_kv_heads, int64_t head_dim,
                                            const Array* pages, int64_t page_stride) {
  return guarded([&] {
    Staged s(*b);
    const DraftContextArgs args{s.rows(rows), s.streams(page_tables, n_streams), s.act_in(kv), s.in<float>(k_norm), eps,
                                {s.in<float>(cos), s.in<float>(sin), head_dim}, n_kv_heads, head_dim,
                                s.out<std::byte>(pages), static_cast<size_t>(page_stride)};
    s.run([&](Ops& ops) { ops.draft_context(args); });
  });
}

KDT_HOOK const char* kdt_hook_draft_attention(Backend* b, const CountArgument* n_streams, int64_t block,
                                              const Array* start, const Array* page_tables, const Array* qkv,
                                              const Array* q_norm, const Array* k_norm, float eps, const Array* cos,
                                              const Array* sin, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim,
                                              int64_t window, int64_t first_query, int64_t n_queries,
                                              const Array* pages, int64_t page_stride, const Array* out) {
  return guarded([&] {
    Staged s(*b);
    const int64_t max_context = most_positions(page_tables, n_streams->most) + block;
    const size_t work = b->ops->attention_work_bytes(n_streams->most * block, n_heads, head_dim, max_context);
    const DraftAttentionArgs args{s.count(n_streams), block, s.in<int32_t>(start),
                                  s.streams(page_tables, n_streams->most), s.act_out(qkv), s.in<float>(q_norm),
                                  s.in<float>(k_norm), eps, {s.in<float>(cos), s.in<float>(sin), head_dim}, n_heads,
                                  n_kv_heads, head_dim, window, first_query, n_queries, s.in<std::byte>(pages),
                                  static_cast<size_t>(page_stride), max_context, s.work(work), s.act_out(out)};
    s.run([&](Ops& ops) { ops.draft_attention(args); });
  });
}
