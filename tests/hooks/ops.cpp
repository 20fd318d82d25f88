// Row-wise operations, the vocabulary and the tree.
#include "hooks.h"

using namespace kdt;
using hooks::Backend;
using hooks::guarded;

namespace {

std::vector<Sampling> samplings(int64_t n, const double* temperature, const double* top_p, const double* min_p,
                                const int32_t* top_k, const uint64_t* seed, const uint32_t* choice) {
  std::vector<Sampling> all;
  for (int64_t i = 0; i < n; ++i) all.push_back({temperature[i], top_p[i], min_p[i], top_k[i], seed[i], choice[i]});
  return all;
}

}  // namespace

KDT_HOOK const char* kdt_hook_embed(Backend* b, int64_t n, const int32_t* token, const void* table, int64_t hidden,
                                    float* out) {
  return guarded([&] { b->ops->embed({{n, token, nullptr, nullptr, nullptr, nullptr}, table, hidden, out}); });
}

KDT_HOOK const char* kdt_hook_rms_norm(Backend* b, int64_t n, int64_t width, const float* x, int64_t x_stride,
                                       const int32_t* x_index, const float* weight, float eps, float* out,
                                       int64_t out_stride, const int32_t* out_index) {
  return guarded([&] {
    b->ops->rms_norm({n, width, x, weight, eps, out, {x_stride, x_index}, {out_stride, out_index}});
  });
}

KDT_HOOK const char* kdt_hook_linear(Backend* b, int64_t n, const float* x, int64_t x_stride, const int32_t* x_index,
                                     int64_t weight, float* out, int64_t out_stride, const int32_t* out_index,
                                     int accumulate) {
  return guarded([&] {
    b->ops->linear({n, x, &b->matrix(weight), out, accumulate != 0, {x_stride, x_index}, {out_stride, out_index}});
  });
}

KDT_HOOK const char* kdt_hook_logits(Backend* b, int64_t n, const float* x, int64_t weight, float* out) {
  return guarded([&] { b->ops->logits({n, x, &b->matrix(weight), out}); });
}

KDT_HOOK const char* kdt_hook_copy(Backend* b, int64_t elements, const float* from, float* to) {
  return guarded([&] { b->ops->copy({elements, from, to}); });
}

KDT_HOOK const char* kdt_hook_mlp(Backend* b, int64_t n, const float* x, int64_t gate_up, int64_t down, float* scratch,
                                  float* out, const int32_t* index) {
  return guarded([&] { b->ops->mlp({n, x, &b->matrix(gate_up), &b->matrix(down), scratch, out, index}); });
}

KDT_HOOK const char* kdt_hook_top_k(Backend* b, int64_t n, int64_t vocab, int64_t k, const float* logits, int noisy,
                                    int64_t depths, const int32_t* position, const double* temperature,
                                    const uint64_t* seed, const uint32_t* choice, int32_t* token, float* log_q) {
  return guarded([&] {
    std::vector<Sampling> sampling(static_cast<size_t>(noisy ? n / depths : 0));
    for (size_t i = 0; i < sampling.size(); ++i) sampling[i] = {temperature[i], 1, 0, 0, seed[i], choice[i]};
    b->ops->top_k({n, vocab, k, logits, noisy ? sampling.data() : nullptr, depths, position, token, log_q});
  });
}

KDT_HOOK const char* kdt_hook_sample(Backend* b, int64_t n, const int32_t* position, const int32_t* stream,
                                     int64_t vocab, const float* logits, int64_t n_streams, const double* temperature,
                                     const double* top_p, const double* min_p, const int32_t* top_k,
                                     const uint64_t* seed, const uint32_t* choice, int32_t* token) {
  return guarded([&] {
    const auto sampling = samplings(n_streams, temperature, top_p, min_p, top_k, seed, choice);
    b->ops->sample({{n, nullptr, position, stream, nullptr, nullptr}, vocab, logits, sampling.data(), nullptr, token});
  });
}

// Lists of stream i: elements [first[i], first[i + 1]) of `token` and what belongs to it.
KDT_HOOK const char* kdt_hook_sample_adjusted(Backend* b, int64_t n, const int32_t* row_token, const int32_t* position,
                                              const int32_t* stream, const int32_t* parent, int64_t vocab,
                                              const float* logits, int64_t n_streams, const double* temperature,
                                              const uint64_t* seed, const float* penalties, const int64_t* seen_first,
                                              const int32_t* seen, const int32_t* seen_count, const int64_t* bias_first,
                                              const int32_t* bias_token, const float* bias, const int64_t* banned_first,
                                              const int32_t* banned, const int32_t* banned_until, int32_t* token) {
  return guarded([&] {
    std::vector<Sampling> sampling;
    std::vector<LogitAdjust> adjust;
    std::vector<const LogitAdjust*> by_stream;
    for (int64_t i = 0; i < n_streams; ++i) {
      sampling.push_back({temperature[i], 1, 0, 0, seed[i], 0});
      adjust.push_back({penalties[3 * i], penalties[3 * i + 1], penalties[3 * i + 2], seen + seen_first[i],
                        seen_count + seen_first[i], seen_first[i + 1] - seen_first[i], bias_token + bias_first[i],
                        bias + bias_first[i], bias_first[i + 1] - bias_first[i], banned + banned_first[i],
                        banned_first[i + 1] - banned_first[i], banned_until[i]});
    }
    for (const LogitAdjust& a : adjust) by_stream.push_back(&a);
    b->ops->sample({{n, row_token, position, stream, parent, nullptr}, vocab, logits, sampling.data(), by_stream.data(), token});
  });
}

KDT_HOOK const char* kdt_hook_logprobs(Backend* b, int64_t n, int64_t vocab, int64_t n_top, const float* logits,
                                       const int32_t* row, const int32_t* token, float* logprob, int32_t* top_token,
                                       float* top_logprob) {
  return guarded([&] { b->ops->logprobs({n, vocab, n_top, logits, row, token, logprob, top_token, top_logprob}); });
}

KDT_HOOK const char* kdt_hook_build_tree(Backend* b, int64_t depths, int64_t k, const int32_t* token,
                                         const float* log_q, int64_t budget, int spine, int32_t* node_token,
                                         int32_t* node_parent, int32_t* node_depth, float* node_weight,
                                         int64_t* n_nodes) {
  return guarded([&] {
    b->ops->build_tree({depths, k, token, log_q, budget, spine != 0, node_token, node_parent, node_depth, node_weight,
                        n_nodes});
  });
}

KDT_HOOK const char* kdt_hook_accept(Backend* b, int64_t n_nodes, const int32_t* node_token, const int32_t* node_parent,
                                     const int32_t* sample, int32_t* path, int64_t* n_path) {
  return guarded([&] { b->ops->accept({n_nodes, node_token, node_parent, sample, path, n_path}); });
}
