// Backends, their weights and their sizes.
#include "base/philox.h"
#include "hooks.h"

using namespace kdt;
using hooks::Backend;
using hooks::guarded;

namespace {
const std::byte* bytes(const void* data) { return static_cast<const std::byte*>(data); }
}  // namespace

// Space-separated, best first. Borrowed until the thread's next call.
KDT_HOOK const char* kdt_hook_cpu_targets() {
  thread_local std::string names;
  names.clear();
  for (const auto& name : cpu_targets()) names += (names.empty() ? "" : " ") + name;
  return names.c_str();
}

KDT_HOOK const char* kdt_hook_create(int threads, const char* target, Backend** out) {
  return guarded([&] { *out = new Backend{make_cpu_ops(threads, target), {}}; });
}

KDT_HOOK void kdt_hook_destroy(Backend* backend) { delete backend; }

KDT_HOOK const char* kdt_hook_describe(Backend* b, int64_t* threads, int64_t* activation_bytes, int64_t* weight_bytes,
                                       const char** instruction_set) {
  return guarded([&] {
    *threads = b->ops->threads();
    *activation_bytes = static_cast<int64_t>(b->ops->activation_bytes());
    *weight_bytes = static_cast<int64_t>(b->ops->weight_bytes());
    *instruction_set = b->ops->instruction_set();
  });
}

KDT_HOOK const char* kdt_hook_sizes(Backend* b, int64_t rows, int64_t kv_lora, int64_t rope, int64_t n_kv_heads,
                                    int64_t head_dim, int64_t* latent_page, int64_t* latent_scratch,
                                    int64_t* draft_page) {
  return guarded([&] {
    *latent_page = static_cast<int64_t>(b->ops->latent_page_bytes(kv_lora, rope));
    *latent_scratch = static_cast<int64_t>(b->ops->latent_scratch_bytes(rows, kv_lora, rope));
    *draft_page = static_cast<int64_t>(b->ops->draft_page_bytes(n_kv_heads, head_dim));
  });
}

KDT_HOOK const char* kdt_hook_experts_scratch(Backend* b, int64_t rows, int64_t k, int64_t n_experts, int64_t width,
                                              int64_t shared_width, int64_t hidden, int64_t* scratch) {
  return guarded([&] {
    *scratch = static_cast<int64_t>(b->ops->experts_scratch_bytes(rows, k, n_experts, width, shared_width, hidden));
  });
}

KDT_HOOK const char* kdt_hook_upload_raw(Backend* b, const void* data, int64_t n_bytes, const void** out) {
  return guarded([&] { *out = b->ops->upload_raw(bytes(data), static_cast<size_t>(n_bytes)); });
}

KDT_HOOK const char* kdt_hook_upload_matrix(Backend* b, int64_t n_sources, const void* const* bf16,
                                            const int64_t* n_out, int64_t n_in, int64_t row_stride, int64_t* id) {
  return guarded([&] {
    std::vector<MatrixSource> sources;
    for (int64_t i = 0; i < n_sources; ++i) sources.push_back({bytes(bf16[i]), n_out[i], n_in, row_stride});
    *id = b->keep(b->ops->upload_matrix(sources));
  });
}

KDT_HOOK const char* kdt_hook_upload_gate_up(Backend* b, const void* gate, const void* up, int64_t width, int64_t n_in,
                                             int64_t* id) {
  return guarded([&] {
    *id = b->keep(b->ops->upload_gate_up({bytes(gate), width, n_in, 0}, {bytes(up), width, n_in, 0}));
  });
}

KDT_HOOK const char* kdt_hook_upload_int4(Backend* b, const void* packed, const void* scale, int64_t n_out,
                                          int64_t n_in, int64_t group, int64_t* id) {
  return guarded([&] { *id = b->keep(b->ops->upload_int4({bytes(packed), bytes(scale), n_out, n_in}, group)); });
}

KDT_HOOK const char* kdt_hook_upload_int4_gate_up(Backend* b, const void* gate, const void* gate_scale, const void* up,
                                                  const void* up_scale, int64_t width, int64_t n_in, int64_t group,
                                                  int64_t* id) {
  return guarded([&] {
    *id = b->keep(b->ops->upload_int4_gate_up({bytes(gate), bytes(gate_scale), width, n_in},
                                              {bytes(up), bytes(up_scale), width, n_in}, group));
  });
}

KDT_HOOK void kdt_hook_noise(uint64_t seed, uint32_t choice, uint32_t position, uint32_t token, uint32_t* word,
                             double* noise) {
  *word = noise_bits(seed, choice, position, token);
  *noise = gumbel(*word);
}
