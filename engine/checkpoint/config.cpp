#include "checkpoint/config.h"

#include <set>

#include "checkpoint/config_limits.h"
#include "checkpoint/json_fields.h"
#include "checkpoint/rope_config.h"
#include "checkpoint/shard_manifest.h"

namespace kdt {
namespace {

constexpr int64_t kQuantGroup = 32;

// The only scheme of Kimi's INT4 checkpoints: symmetric, groups of 32 along the input dimension, no activation scales.
int64_t parse_quantization(const Fields& quantization) {
  const auto refuse = [](const Fields& fields, const char* key, const char* expected) {
    fields.refuse(Status::unsupported, key, expected);
  };
  const auto exactly = [&refuse](const Fields& fields, const char* key, const char* value) {
    if (!fields.has(key) || fields.text(key) != value) refuse(fields, key, value);
  };
  exactly(quantization, "quant_method", "compressed-tensors");
  exactly(quantization, "format", "pack-quantized");
  quantization.only_text("quantization_status", "compressed");
  quantization.only_absent("kv_cache_scheme");
  for (const char* key : {"sparsity_config", "transform_config"}) {
    if (quantization.has(key) && !quantization.object(key).keys().empty()) refuse(quantization, key, "none, or empty");
  }
  const Fields groups = quantization.object("config_groups");
  const std::vector<std::string> names = groups.keys();
  if (names.size() != 1) refuse(quantization, "config_groups", "one group");
  const Fields group = groups.object(names[0]);
  group.only_text("format", "pack-quantized");
  group.only_absent("input_activations");
  group.only_absent("output_activations");
  const Fields weights = group.object("weights");
  exactly(weights, "type", "int");
  exactly(weights, "strategy", "group");
  if (weights.integer("num_bits", 1, 64) != 4) refuse(weights, "num_bits", "4");
  if (weights.integer("group_size", -1, kMaxWidth) != kQuantGroup) refuse(weights, "group_size", "32");
  if (!weights.boolean("symmetric")) refuse(weights, "symmetric", "true");
  weights.only_boolean("dynamic", false);
  weights.only_absent("actorder");
  return kQuantGroup;
}

// What is fixed in the computation of this engine. An absent field means the value that Hugging Face's model has by
// default, which is the one computed here; n_group and topk_group are needed, since their defaults there are not 1.
void check_computed(const Fields& text) {
  const std::string type = text.text("model_type");
  if (type != "kimi_k2" && type != "deepseek_v3") {
    text.refuse(Status::unsupported, "model_type", "kimi_k2 or deepseek_v3");
  }
  text.only_text("hidden_act", "silu");
  text.only_text("scoring_func", "sigmoid");
  text.only_text("topk_method", "noaux_tc");
  text.only_boolean("attention_bias", false);
  text.only_boolean("tie_word_embeddings", false);
  text.only_boolean("rope_interleave", true);
  text.only_integer("moe_layer_freq", 1);
  for (const char* key : {"n_group", "topk_group"}) {
    text.integer(key, 1, kMaxExperts);
    text.only_integer(key, 1);
  }
}

// The input dimension of an expert's matrix is cut into whole groups.
void check_groups(const Fields& text, const char* key, int64_t width) {
  if (width % kQuantGroup != 0) text.refuse(Status::bad_file, key, "a multiple of the quantisation's group size, 32");
}

void parse_sizes(const Fields& text, ModelConfig& out) {
  out.vocab_size = text.integer("vocab_size", 1, kMaxVocab);
  out.hidden_size = text.integer("hidden_size", 1, kMaxWidth);
  out.n_layers = text.integer("num_hidden_layers", 1, kMaxLayers);
  out.n_dense_layers = text.integer("first_k_dense_replace", 0, out.n_layers);
  out.n_heads = text.integer("num_attention_heads", 1, kMaxHeads);
  // Every head has keys and values of its own, made from the latent.
  text.only_integer("num_key_value_heads", out.n_heads);
  out.q_lora_rank = text.integer("q_lora_rank", 1, kMaxWidth);
  out.kv_lora_rank = text.integer("kv_lora_rank", 1, kMaxWidth);
  out.qk_nope_dim = text.integer("qk_nope_head_dim", 1, kMaxHeadDim);
  out.qk_rope_dim = text.integer("qk_rope_head_dim", 2, kMaxHeadDim);
  if (out.qk_rope_dim % 2 != 0) text.refuse(Status::bad_file, "qk_rope_head_dim", "an even number");
  out.v_head_dim = text.integer("v_head_dim", 1, kMaxHeadDim);
  out.dense_width = text.integer("intermediate_size", 1, kMaxMlpWidth);
  out.expert_width = text.integer("moe_intermediate_size", 1, kMaxMlpWidth);
  out.n_experts = text.integer("n_routed_experts", 1, kMaxExperts);
  out.n_experts_per_token = text.integer("num_experts_per_tok", 1, out.n_experts);
  out.n_shared_experts = text.integer("n_shared_experts", 1, kMaxSharedExperts);
  out.max_context = text.integer("max_position_embeddings", 1, kMaxContext);
  check_groups(text, "hidden_size", out.hidden_size);
  check_groups(text, "moe_intermediate_size", out.expert_width);
}

// eos_token_id is one id or a list of them.
void add_eos(const Fields& config, int64_t vocab_size, std::set<int32_t>& ids) {
  if (!config.has("eos_token_id")) return;
  const std::vector<int64_t> found = config.is_list("eos_token_id")
                                         ? config.integers("eos_token_id", 0, vocab_size - 1)
                                         : std::vector<int64_t>{config.integer("eos_token_id", 0, vocab_size - 1)};
  for (int64_t id : found) ids.insert(static_cast<int32_t>(id));
}

}  // namespace

ModelConfig parse_model_config(const std::string& json, const std::string& generation_json, const std::string& file) {
  const auto document = parse_json_object(json, file);
  const Fields top(document, file);
  ModelConfig out;
  out.wrapped = top.has("text_config");
  // Only the K2.5/K2.6 wrapper has a vision part, and with it the template of that family.
  out.family = out.wrapped ? ModelFamily::k2_5 : ModelFamily::k2_thinking;
  const Fields text = out.wrapped ? top.object("text_config") : top;
  if (out.wrapped) top.only_boolean("tie_word_embeddings", false);
  check_computed(text);

  const Fields& quantized = text.has("quantization_config") ? text : top;
  if (!quantized.has("quantization_config")) {
    quantized.refuse(Status::unsupported, "quantization_config", "compressed-tensors pack-quantized INT4 experts");
  }
  out.quant_group_size = parse_quantization(quantized.object("quantization_config"));
  parse_sizes(text, out);
  out.routed_scaling_factor = text.number("routed_scaling_factor", 1e-6, 1e6);
  out.norm_topk_prob = text.boolean("norm_topk_prob");
  out.rms_norm_eps = text.number("rms_norm_eps", kMinEps, kMaxEps);
  const Rope rope = parse_rope(text);
  out.rope_theta = rope.theta;
  out.yarn = rope.yarn;

  std::set<int32_t> eos;
  add_eos(top, out.vocab_size, eos);
  add_eos(text, out.vocab_size, eos);
  if (!generation_json.empty()) {
    const std::string generation_file = file.substr(0, file.rfind('/') + 1) + kGenerationConfigName;
    const auto generation = parse_json_object(generation_json, generation_file);
    add_eos(Fields(generation, generation_file), out.vocab_size, eos);
  }
  out.eos_ids.assign(eos.begin(), eos.end());
  return out;
}

ModelConfig load_model_config(const std::string& directory) {
  demand_no_unfinished_shards(directory);
  const std::string file = directory + "/" + kConfigName, generation_file = directory + "/" + kGenerationConfigName;
  const std::string generation =
      file_exists(generation_file) ? read_text_file(generation_file, kMaxConfigBytes) : std::string();
  return parse_model_config(read_text_file(file, kMaxConfigBytes), generation, file);
}

}  // namespace kdt
