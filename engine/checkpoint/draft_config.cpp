#include <cmath>

#include "checkpoint/config.h"
#include "checkpoint/config_limits.h"
#include "checkpoint/json_fields.h"
#include "checkpoint/rope_config.h"
#include "checkpoint/shard_manifest.h"

namespace kdt {
namespace {

// Fields of drafters that look like DFlash and compute something else.
constexpr const char* kForeignFields[] = {"conv_kernel_size", "selector_rank", "input_embedding_scale",
                                          "output_multiplier", "final_logit_softcapping", "draft_vocab_size"};

void check_computed(const Fields& config, const Fields& dflash) {
  config.only_text("model_type", "qwen3");
  config.only_text("hidden_act", "silu");
  config.only_boolean("attention_bias", false);
  config.only_absent("quantization_config");
  for (const char* key : kForeignFields) {
    config.only_absent(key);
    dflash.only_absent(key);
  }
}

int64_t parse_block_size(const Fields& config, const Fields& dflash) {
  constexpr int64_t kMinBlock = 2, kMaxBlock = 256;
  if (!config.has("block_size") && dflash.has("block_size")) return dflash.integer("block_size", kMinBlock, kMaxBlock);
  const int64_t block = config.integer("block_size", kMinBlock, kMaxBlock);
  if (dflash.has("block_size") && dflash.integer("block_size", kMinBlock, kMaxBlock) != block) {
    dflash.refuse(Status::bad_file, "block_size", std::to_string(block) + ", as the config's block_size says");
  }
  return block;
}

// The reference's choice when a drafter names no layers: spread evenly from 1 to N - 3; Python's round() ties to even.
std::vector<int64_t> default_taps(int64_t n_target_layers, int64_t n_draft_layers) {
  if (n_draft_layers == 1) return {n_target_layers / 2};
  std::vector<int64_t> out;
  for (int64_t i = 0; i < n_draft_layers; ++i) {
    const double step = static_cast<double>(i * (n_target_layers - 4)) / static_cast<double>(n_draft_layers - 1);
    out.push_back(static_cast<int64_t>(std::nearbyint(1 + step)));
  }
  return out;
}

std::vector<int64_t> parse_taps(const Fields& dflash, int64_t n_target_layers, int64_t n_draft_layers) {
  const char* key = "target_layer_ids";
  std::vector<int64_t> taps = dflash.has(key) ? dflash.integers(key, 0, n_target_layers - 1)
                                              : default_taps(n_target_layers, n_draft_layers);
  bool good = !taps.empty() && taps.front() >= 0 && taps.back() < n_target_layers;
  for (size_t i = 1; i < taps.size(); ++i) good = good && taps[i - 1] < taps[i];
  if (!good) dflash.refuse(Status::bad_file, key, "layers of the target, one or more, ascending");
  return taps;
}

// layer_types decides where it is given. Without it a layer slides as in Qwen3: when use_sliding_window is true, a
// sliding_window is set and the layer is max_window_layers (0 when absent) or later. use_sliding_window: false, said
// outright, switches the window off for all of them.
std::vector<DraftLayer> parse_layers(const Fields& config, int64_t n_layers) {
  const bool may_slide = config.boolean_or("use_sliding_window", config.has("layer_types"));
  const int64_t window = config.integer_or("sliding_window", 0, 1, kMaxContext);
  std::vector<DraftLayer> out(static_cast<size_t>(n_layers), DraftLayer{0});
  if (!config.has("layer_types")) {
    const int64_t first = config.integer_or("max_window_layers", 0, 0, INT64_MAX);
    for (int64_t i = first; i < n_layers && may_slide; ++i) out[static_cast<size_t>(i)].window = window;
    return out;
  }
  const std::vector<std::string> types = config.texts("layer_types");
  if (types.size() != out.size()) {
    config.refuse(Status::bad_file, "layer_types", std::to_string(n_layers) + " entries, one for each layer");
  }
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] == "full_attention") continue;
    if (types[i] != "sliding_attention") {
      config.refuse(Status::unsupported, "layer_types",
                    "full_attention and sliding_attention, not " + printable(types[i]));
    }
    if (may_slide) out[i].window = config.integer("sliding_window", 1, kMaxContext);
  }
  return out;
}

}  // namespace

DraftConfig parse_draft_config(const std::string& json, const std::string& file) {
  const auto document = parse_json_object(json, file);
  const Fields config(document, file);
  const Fields dflash = config.object("dflash_config");
  check_computed(config, dflash);

  DraftConfig out;
  out.hidden_size = config.integer("hidden_size", 1, kMaxWidth);
  out.vocab_size = config.integer("vocab_size", 1, kMaxVocab);
  out.n_heads = config.integer("num_attention_heads", 1, kMaxHeads);
  out.n_kv_heads = config.integer("num_key_value_heads", 1, out.n_heads);
  if (out.n_heads % out.n_kv_heads != 0) {
    config.refuse(Status::bad_file, "num_key_value_heads", "a divisor of num_attention_heads");
  }
  out.head_dim = config.integer("head_dim", 2, kMaxHeadDim);
  if (out.head_dim % 2 != 0) config.refuse(Status::bad_file, "head_dim", "an even number");
  out.mlp_width = config.integer("intermediate_size", 1, kMaxMlpWidth);
  out.rms_norm_eps = config.number("rms_norm_eps", kMinEps, kMaxEps);
  const Rope rope = parse_rope(config);
  out.rope_theta = rope.theta;
  out.yarn = rope.yarn;
  out.max_context = config.integer("max_position_embeddings", 1, kMaxContext);
  out.block_size = parse_block_size(config, dflash);
  out.mask_token_id = static_cast<int32_t>(dflash.integer("mask_token_id", 0, out.vocab_size - 1));
  out.n_target_layers = config.integer("num_target_layers", 1, kMaxLayers);
  const int64_t n_layers = config.integer("num_hidden_layers", 1, kMaxLayers);
  out.target_layer_ids = parse_taps(dflash, out.n_target_layers, n_layers);
  out.layers = parse_layers(config, n_layers);
  return out;
}

DraftConfig load_draft_config(const std::string& directory) {
  demand_no_unfinished_shards(directory);
  const std::string file = directory + "/" + (is_shard_directory(directory) ? kShardDraftConfigName : kConfigName);
  return parse_draft_config(read_text_file(file, kMaxConfigBytes), file);
}

void check_draft_fits(const DraftConfig& draft, const ModelConfig& target, const std::string& draft_directory) {
  const std::string file = draft_directory + "/" + kConfigName + ": ";
  const auto equal = [&file](const char* key, int64_t found, int64_t expected) {
    if (found != expected) {
      fail(Status::bad_file, file + key, std::to_string(found), "the target model's " + std::to_string(expected));
    }
  };
  equal("hidden_size", draft.hidden_size, target.hidden_size);
  equal("vocab_size", draft.vocab_size, target.vocab_size);
  equal("num_target_layers", draft.n_target_layers, target.n_layers);
  const std::string below = "less than the target model's ";
  for (int64_t tap : draft.target_layer_ids) {
    if (tap < 0 || tap >= target.n_layers) {
      fail(Status::bad_file, file + "dflash_config.target_layer_ids", std::to_string(tap),
           below + std::to_string(target.n_layers) + " layers");
    }
  }
  if (draft.mask_token_id < 0 || draft.mask_token_id >= target.vocab_size) {
    fail(Status::bad_file, file + "dflash_config.mask_token_id", std::to_string(draft.mask_token_id),
         below + std::to_string(target.vocab_size) + " tokens");
  }
}

}  // namespace kdt
