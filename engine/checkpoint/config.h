// config.json of the target (K2-Thinking naming, or the K2.5/K2.6 wrapper with `text_config`) and of a DFlash drafter.
//
// Every constant of the model comes from here; nothing has a hard-coded value. A field that is absent, of the wrong
// type, absurd, or that names something this engine does not compute is an Error(bad_file or unsupported) naming file
// and field.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kdt {

// Which of Kimi's templates a checkpoint speaks: decides how tools are declared.
enum class ModelFamily { k2_thinking, k2_5 };

// rope_scaling of type "yarn" (or "deepseek_yarn"); absent: plain RoPE.
struct Yarn {
  double factor;
  int64_t original_context;    // original_max_position_embeddings
  double beta_fast, beta_slow;
  double mscale, mscale_all_dim;
};

struct ModelConfig {
  ModelFamily family;
  bool wrapped;                // K2.5/K2.6 multimodal wrapper
  int64_t vocab_size, hidden_size, n_layers;
  int64_t n_dense_layers;      // first_k_dense_replace
  int64_t n_heads, q_lora_rank, kv_lora_rank, qk_nope_dim, qk_rope_dim, v_head_dim;
  int64_t dense_width;         // intermediate_size
  int64_t expert_width;        // moe_intermediate_size
  int64_t n_experts, n_experts_per_token, n_shared_experts;
  double routed_scaling_factor;
  bool norm_topk_prob;
  double rms_norm_eps, rope_theta;
  std::optional<Yarn> yarn;
  int64_t max_context;         // max_position_embeddings
  int64_t quant_group_size;    // of the INT4 experts, along the input dimension
  std::vector<int32_t> eos_ids;  // of config.json and generation_config.json, union, ascending
};

// One drafter layer's attention: window 0 = full; a query at p sees context keys k with p - k < window.
struct DraftLayer {
  int64_t window;
};

struct DraftConfig {
  int64_t hidden_size, vocab_size, n_heads, n_kv_heads, head_dim, mlp_width;
  double rms_norm_eps, rope_theta;
  std::optional<Yarn> yarn;
  int64_t max_context;
  int64_t block_size;          // the anchor and block_size - 1 mask positions
  int32_t mask_token_id;
  int64_t n_target_layers;
  std::vector<int64_t> target_layer_ids;   // the layers whose OUTPUT (residual stream) is tapped, ascending
  std::vector<DraftLayer> layers;
};

ModelConfig load_model_config(const std::string& directory);
DraftConfig load_draft_config(const std::string& directory);

// The text alone, for the functions above and their fuzz target. `generation_json` may be empty (no such file).
ModelConfig parse_model_config(const std::string& json, const std::string& generation_json, const std::string& file);
DraftConfig parse_draft_config(const std::string& json, const std::string& file);

// Error(bad_file) naming the field when a drafter does not fit the target (width, vocabulary, layer count, taps, mask
// id).
void check_draft_fits(const DraftConfig& draft, const ModelConfig& target, const std::string& draft_directory);

}  // namespace kdt
