// Backends, their weights and memory, and rounds: what is sent, submitted and fetched.
#include <algorithm>

#include "base/philox.h"
#include "cpu/cpu_ops.h"
#include "hooks.h"
#ifdef KDT_CUDA
#include "cuda/cuda_ops.h"
#endif

using namespace kdt;
using hooks::Array;
using hooks::Backend;
using hooks::guarded;

namespace {

const std::byte* bytes(const Array* array) { return static_cast<const std::byte*>(array->data); }

// "" when the first device can be used.
std::string why_no_cuda() {
#ifdef KDT_CUDA
  try {
    const auto devices = cuda_devices();
    return devices.empty() ? "no CUDA device" : devices.front().unusable;
  } catch (const std::exception& e) {
    return std::string("no CUDA device: ") + e.what();
  }
#else
  return "built without CUDA";
#endif
}

}  // namespace

std::unique_ptr<Ops> hooks::make_ops(int threads, const std::string& target) {
#ifdef KDT_CUDA
  if (target == "cuda") return make_cuda_ops(0);
#endif
  return make_cpu_ops(threads, target);
}

// Space-separated, best first. Borrowed until the thread's next call, as the next one's.
KDT_HOOK const char* kdt_hook_cpu_targets() {
  thread_local std::string names;
  names.clear();
  for (const auto& name : cpu_targets()) names += (names.empty() ? "" : " ") + name;
  return names.c_str();
}

// Why there is no backend "cuda"; empty: there is.
KDT_HOOK const char* kdt_hook_why_no_cuda() {
  thread_local std::string why;
  why = why_no_cuda();
  return why.c_str();
}

KDT_HOOK const char* kdt_hook_create(int threads, const char* target, Backend** out) {
  return guarded([&] { *out = new Backend{hooks::make_ops(threads, target)}; });
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

KDT_HOOK const char* kdt_hook_upload_raw(Backend* b, const Array* data, const void** out) {
  return guarded([&] { *out = b->ops->upload_raw(bytes(data), static_cast<size_t>(data->bytes)); });
}

// Source i has its first element at bf16[i].
KDT_HOOK const char* kdt_hook_upload_matrix(Backend* b, int64_t n_sources, const void* const* bf16, const int64_t* n_out,
                                            int64_t n_in, int64_t row_stride, int64_t* id) {
  return guarded([&] {
    std::vector<MatrixSource> sources;
    for (int64_t i = 0; i < n_sources; ++i)
      sources.push_back({static_cast<const std::byte*>(bf16[i]), n_out[i], n_in, row_stride});
    *id = b->keep(b->ops->upload_matrix(sources));
  });
}

KDT_HOOK const char* kdt_hook_upload_gate_up(Backend* b, const Array* gate, const Array* up, int64_t width, int64_t n_in,
                                             int64_t* id) {
  return guarded([&] {
    *id = b->keep(b->ops->upload_gate_up({bytes(gate), width, n_in, 0}, {bytes(up), width, n_in, 0}));
  });
}

KDT_HOOK const char* kdt_hook_upload_int4(Backend* b, const Array* packed, const Array* scale, int64_t n_out,
                                          int64_t n_in, int64_t group, int64_t* id) {
  return guarded([&] { *id = b->keep(b->ops->upload_int4({bytes(packed), bytes(scale), n_out, n_in}, group)); });
}

KDT_HOOK const char* kdt_hook_upload_int4_gate_up(Backend* b, const Array* gate, const Array* gate_scale, const Array* up,
                                                  const Array* up_scale, int64_t width, int64_t n_in, int64_t group,
                                                  int64_t* id) {
  return guarded([&] {
    *id = b->keep(b->ops->upload_int4_gate_up({bytes(gate), bytes(gate_scale), width, n_in},
                                              {bytes(up), bytes(up_scale), width, n_in}, group));
  });
}

// New memory of as many bytes as `out` has, with `data` put into it at `offset`.
KDT_HOOK const char* kdt_hook_memory(Backend* b, const Array* data, int64_t offset, const Array* out) {
  return guarded([&] {
    Buffer memory = b->ops->allocate(static_cast<size_t>(out->bytes));
    b->ops->copy_in(memory, static_cast<size_t>(offset), data->data, static_cast<size_t>(data->bytes));
    b->ops->copy_out(memory, 0, out->data, static_cast<size_t>(out->bytes));
  });
}

KDT_HOOK const char* kdt_hook_capacity(Backend* b, int64_t rows, int64_t* capacity) {
  return guarded([&] { *capacity = b->ops->capacity(rows); });
}

// Rounds of one shape under one key: of each, the distinct experts among its first live[round] rows of expert [rounds, n, k].
// calls: out, how often the work was called; seconds: out [rounds], of the stage that was marked.
KDT_HOOK const char* kdt_hook_rounds(Backend* b, int64_t id, int64_t n, int64_t k, int64_t n_experts, const Array* live,
                                     const Array* expert, const Array* distinct, const Array* seconds, int64_t* calls) {
  return guarded([&] {
    Ops& ops = *b->ops;
    const size_t choices = static_cast<size_t>(n * k), bytes = (1 + choices) * sizeof(int32_t);
    // Recorded work keeps its memory: it stays as long as the key may come again.
    const auto [round, made] = b->rounds.try_emplace(id);
    if (made) round->second = {ops.exchange(bytes), ops.exchange(sizeof(int32_t))};
    const auto& [in, out] = round->second;
    auto *host = reinterpret_cast<int32_t*>(in.host()), *device = reinterpret_cast<int32_t*>(in.device());
    const SubmitKey key{-1, id};
    *calls = 0;
    for (int64_t i = 0; i < live->count<int32_t>(); ++i) {
      host[0] = static_cast<const int32_t*>(live->data)[i];
      std::copy_n(static_cast<const int32_t*>(expert->data) + static_cast<size_t>(i) * choices, choices, host + 1);
      ops.send(in, bytes);
      ops.submit(&key, [&] {
        ++*calls;
        ops.count_experts({{n, device}, n_experts, k, device + 1, reinterpret_cast<int32_t*>(out.device())});
        ops.mark(Stage::verify);
        ops.fetch(out, sizeof(int32_t));
        ops.mark(Stage::commit);
      });
      static_cast<double*>(seconds->data)[i] = ops.wait()[Stage::verify];
      static_cast<int32_t*>(distinct->data)[i] = *reinterpret_cast<const int32_t*>(out.host());
    }
  });
}

KDT_HOOK void kdt_hook_noise(uint64_t seed, uint32_t choice, uint32_t position, uint32_t token, uint32_t* word,
                             double* noise) {
  *word = noise_bits(seed, choice, position, token);
  *noise = gumbel(*word);
}
