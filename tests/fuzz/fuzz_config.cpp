// The config readers on arbitrary text: a kdt::Error, or a config inside its limits. The input is config.json and,
// after a NUL, generation_config.json; the first is read as a target's and as a drafter's.
#include <cstdlib>
#include <string>

#include "base/error.h"
#include "checkpoint/config.h"
#include "checkpoint/config_limits.h"

namespace {

void demand(bool good) {
  if (!good) std::abort();
}

bool in(int64_t value, int64_t low, int64_t high) { return value >= low && value <= high; }

void check(const kdt::ModelConfig& c) {
  demand(in(c.vocab_size, 1, kdt::kMaxVocab) && in(c.hidden_size, 1, kdt::kMaxWidth));
  demand(in(c.n_layers, 1, kdt::kMaxLayers) && in(c.n_dense_layers, 0, c.n_layers));
  demand(in(c.n_experts, 1, kdt::kMaxExperts) && in(c.n_experts_per_token, 1, c.n_experts));
  demand(c.hidden_size % c.quant_group_size == 0 && c.expert_width % c.quant_group_size == 0);
  demand(c.qk_rope_dim % 2 == 0 && c.rope_theta > 1 && c.rms_norm_eps > 0);
  for (size_t i = 0; i < c.eos_ids.size(); ++i) {
    demand(in(c.eos_ids[i], 0, c.vocab_size - 1) && (i == 0 || c.eos_ids[i - 1] < c.eos_ids[i]));
  }
}

void check(const kdt::DraftConfig& c) {
  demand(in(c.mask_token_id, 0, c.vocab_size - 1) && in(c.block_size, 2, 256) && c.head_dim % 2 == 0);
  demand(c.n_heads % c.n_kv_heads == 0 && !c.layers.empty() && !c.target_layer_ids.empty());
  for (size_t i = 0; i < c.target_layer_ids.size(); ++i) {
    demand(in(c.target_layer_ids[i], 0, c.n_target_layers - 1));
    demand(i == 0 || c.target_layer_ids[i - 1] < c.target_layer_ids[i]);
  }
  for (const kdt::DraftLayer& layer : c.layers) demand(in(layer.window, 0, kdt::kMaxContext));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const size_t split = text.find('\0');
  const std::string config = text.substr(0, split);
  const std::string generation = split == std::string::npos ? "" : text.substr(split + 1);
  try {
    check(kdt::parse_model_config(config, generation, "fuzz/config.json"));
  } catch (const kdt::Error&) {
  }
  try {
    const kdt::DraftConfig draft = kdt::parse_draft_config(config, "fuzz/config.json");
    check(draft);
    kdt::ModelConfig target{};
    target.hidden_size = draft.hidden_size;
    target.vocab_size = draft.vocab_size;
    target.n_layers = draft.n_target_layers;
    kdt::check_draft_fits(draft, target, "fuzz");
  } catch (const kdt::Error&) {
  }
  return 0;
}
