// Attention of both models, the router and the experts.
#include "hooks.h"

using namespace kdt;
using hooks::Backend;
using hooks::guarded;
using hooks::streams_of;

KDT_HOOK const char* kdt_hook_route(Backend* b, int64_t n, const float* x, int64_t gate, const float* bias,
                                    int64_t n_experts, int64_t k, int normalise, float scaling, float* scores,
                                    int32_t* expert, float* weight) {
  return guarded([&] {
    b->ops->route({n, x, &b->matrix(gate), bias, n_experts, k, normalise != 0, scaling, scores, expert, weight});
  });
}

KDT_HOOK const char* kdt_hook_experts(Backend* b, int64_t n, int64_t hidden, const float* x, const int32_t* expert,
                                      const float* weight, int64_t n_experts, int64_t k, const int64_t* gate_up,
                                      const int64_t* down, int64_t width, int64_t shared_gate_up, int64_t shared_down,
                                      void* scratch, float* out) {
  return guarded([&] {
    const auto gate_ups = b->matrices_of(gate_up, n_experts), downs = b->matrices_of(down, n_experts);
    b->ops->experts({n, hidden, x, expert, weight, n_experts, k, gate_ups.data(), downs.data(), width,
                     &b->matrix(shared_gate_up), &b->matrix(shared_down), scratch, out});
  });
}

KDT_HOOK const char* kdt_hook_latent_write(Backend* b, const Rows* rows, const int32_t* page_tables, int64_t n_streams,
                                           int64_t table_width, const float* kv, int64_t kv_stride,
                                           const float* norm_weight, float eps, const float* cos, const float* sin,
                                           int64_t rope, int64_t kv_lora, void* pages, int64_t page_stride,
                                           void* scratch) {
  return guarded([&] {
    const auto streams = streams_of(page_tables, n_streams, table_width);
    b->ops->latent_write({*rows, streams.data(), kv, kv_stride, norm_weight, eps, {cos, sin, rope}, kv_lora, pages,
                          static_cast<size_t>(page_stride), scratch});
  });
}

KDT_HOOK const char* kdt_hook_mla_attention(Backend* b, const Rows* rows, const int32_t* page_tables, int64_t n_streams,
                                            int64_t table_width, float* q, const int64_t* w_uk, const int64_t* w_uv,
                                            int64_t n_heads, int64_t nope, int64_t kv_lora, int64_t v_head,
                                            const float* cos, const float* sin, int64_t rope, float scale,
                                            const void* pages, int64_t page_stride, const void* scratch, float* out) {
  return guarded([&] {
    const auto streams = streams_of(page_tables, n_streams, table_width);
    const auto uk = b->matrices_of(w_uk, n_heads), uv = b->matrices_of(w_uv, n_heads);
    b->ops->mla_attention({*rows, streams.data(), q, uk.data(), uv.data(), n_heads, nope, kv_lora, v_head,
                           {cos, sin, rope}, scale, pages, static_cast<size_t>(page_stride), scratch, out});
  });
}

KDT_HOOK const char* kdt_hook_commit(Backend* b, int64_t n, const int32_t* scratch_row, const int32_t* position,
                                     const int32_t* page_table, int64_t n_layers, int64_t kv_lora, int64_t rope,
                                     void* pages, int64_t page_stride, int64_t layer_page_bytes, const void* scratch,
                                     int64_t layer_scratch_bytes) {
  return guarded([&] {
    const StreamPages stream{page_table};
    b->ops->commit({n, scratch_row, position, &stream, n_layers, kv_lora, rope, pages,
                    static_cast<size_t>(page_stride), static_cast<size_t>(layer_page_bytes), scratch,
                    static_cast<size_t>(layer_scratch_bytes)});
  });
}

KDT_HOOK const char* kdt_hook_draft_context(Backend* b, const Rows* rows, const int32_t* page_tables, int64_t n_streams,
                                            int64_t table_width, const float* kv, const float* k_norm, float eps,
                                            const float* cos, const float* sin, int64_t n_kv_heads, int64_t head_dim,
                                            void* pages, int64_t page_stride) {
  return guarded([&] {
    const auto streams = streams_of(page_tables, n_streams, table_width);
    b->ops->draft_context({*rows, streams.data(), kv, k_norm, eps, {cos, sin, head_dim}, n_kv_heads, head_dim, pages,
                           static_cast<size_t>(page_stride)});
  });
}

KDT_HOOK const char* kdt_hook_draft_attention(Backend* b, int64_t n_streams, int64_t block, const int32_t* start,
                                              const int32_t* page_tables, int64_t table_width, float* qkv,
                                              const float* q_norm, const float* k_norm, float eps, const float* cos,
                                              const float* sin, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim,
                                              int64_t window, int64_t first_query, int64_t n_queries,
                                              const void* pages, int64_t page_stride, float* out) {
  return guarded([&] {
    const auto streams = streams_of(page_tables, n_streams, table_width);
    b->ops->draft_attention({n_streams, block, start, streams.data(), qkv, q_norm, k_norm, eps, {cos, sin, head_dim},
                             n_heads, n_kv_heads, head_dim, window, first_query, n_queries, pages,
                             static_cast<size_t>(page_stride), out});
  });
}
