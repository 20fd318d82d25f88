// config.json of target and drafter: the bundled pair, every spelling that is accepted, every refusal.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "checkpoint/config.h"

using namespace kdt;
using nlohmann::json;

namespace {

std::string source_root() {
  const char* root = std::getenv("KDTREE_SOURCE_ROOT");
  return root != nullptr ? root : ".";
}
json target_json() { return json::parse(std::ifstream(source_root() + "/models/tiny-k2/config.json")); }
json draft_json() { return json::parse(std::ifstream(source_root() + "/models/tiny-k2-dflash/config.json")); }

ModelConfig target(const json& config, const std::string& generation = "") {
  return parse_model_config(config.dump(), generation, "m/config.json");
}
DraftConfig draft(const json& config) { return parse_draft_config(config.dump(), "d/config.json"); }

// The status and message of the kdt::Error that `call` throws; "" when it returns.
struct Failure {
  Status status = Status::ok;
  std::string message;
};
template <typename Call>
Failure failure_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return {error.status(), error.what()};
  }
  return {};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The leaf that a JSON pointer names, set to `value`; "erase" erases it.
struct Edit {
  const char* pointer;
  json value;
  Status status;
  const char* expected;
};

void check_edits(const json& base, const std::vector<Edit>& edits, const std::function<void(const json&)>& read) {
  for (const Edit& edit : edits) {
    json config = base;
    if (edit.value == json("erase")) {
      const json::json_pointer pointer(edit.pointer);
      config[pointer.parent_pointer()].erase(pointer.back());
    } else {
      config[json::json_pointer(edit.pointer)] = edit.value;
    }
    const Failure failure = failure_of([&] { read(config); });
    CAPTURE(edit.pointer);
    CAPTURE(failure.message);
    CHECK(failure.status == edit.status);
    CHECK(contains(failure.message, edit.expected));
  }
}

constexpr Status kBad = Status::bad_file, kUnsupported = Status::unsupported, kGood = Status::ok;

// A K2.5/K2.6 config around the bundled one.
json wrapped() {
  json text = target_json();
  text.erase("tie_word_embeddings");
  return {{"architectures", {"KimiK25ForConditionalGeneration"}}, {"model_type", "kimi_k25"}, {"eos_token_id", 1793},
          {"tie_word_embeddings", false}, {"vision_config", {{"hidden_size", 64}}}, {"text_config", text}};
}

}  // namespace

TEST_CASE("the bundled target") {
  const ModelConfig c = load_model_config(source_root() + "/models/tiny-k2");
  CHECK(c.family == ModelFamily::k2_thinking);
  CHECK_FALSE(c.wrapped);
  CHECK(c.vocab_size == 2048);
  CHECK(c.hidden_size == 256);
  CHECK(c.n_layers == 5);
  CHECK(c.n_dense_layers == 1);
  CHECK(c.n_heads == 8);
  CHECK(c.q_lora_rank == 128);
  CHECK(c.kv_lora_rank == 128);
  CHECK(c.qk_nope_dim == 32);
  CHECK(c.qk_rope_dim == 32);
  CHECK(c.v_head_dim == 32);
  CHECK(c.dense_width == 512);
  CHECK(c.expert_width == 256);
  CHECK(c.n_experts == 16);
  CHECK(c.n_experts_per_token == 4);
  CHECK(c.n_shared_experts == 1);
  CHECK(c.routed_scaling_factor == 2.0);
  CHECK(c.norm_topk_prob);
  CHECK(c.rms_norm_eps == 1e-5);
  CHECK(c.rope_theta == 50000);
  REQUIRE(c.yarn.has_value());
  CHECK(c.yarn->factor == 4);
  CHECK(c.yarn->original_context == 1024);
  CHECK(c.yarn->beta_fast == 32);
  CHECK(c.yarn->beta_slow == 1);
  CHECK(c.yarn->mscale == 1);
  CHECK(c.yarn->mscale_all_dim == 1);
  CHECK(c.max_context == 4096);
  CHECK(c.quant_group_size == 32);
  CHECK(c.eos_ids == std::vector<int32_t>{1794});
}

TEST_CASE("the bundled drafter, and that it fits") {
  const DraftConfig d = load_draft_config(source_root() + "/models/tiny-k2-dflash");
  CHECK(d.hidden_size == 256);
  CHECK(d.vocab_size == 2048);
  CHECK(d.n_heads == 16);
  CHECK(d.n_kv_heads == 8);
  CHECK(d.head_dim == 32);
  CHECK(d.mlp_width == 512);
  CHECK(d.max_context == 4096);
  CHECK(d.block_size == 8);
  CHECK(d.mask_token_id == 2046);
  CHECK(d.n_target_layers == 5);
  CHECK(d.target_layer_ids == std::vector<int64_t>{1, 2, 3});
  REQUIRE(d.layers.size() == 2);
  CHECK(d.layers[0].window == 256);
  CHECK(d.layers[1].window == 256);
  CHECK(d.yarn->factor == 4);
  check_draft_fits(d, target(target_json()), "d");
}

TEST_CASE("the K2.5/K2.6 wrapper says the same, and quantization may lie at either level") {
  const ModelConfig plain = target(target_json()), inner = target(wrapped());
  CHECK(inner.family == ModelFamily::k2_5);
  CHECK(inner.wrapped);
  CHECK(inner.n_experts == plain.n_experts);
  CHECK(inner.eos_ids == std::vector<int32_t>{1793, 1794});
  json hoisted = wrapped();
  hoisted["quantization_config"] = hoisted["text_config"]["quantization_config"];
  hoisted["text_config"].erase("quantization_config");
  CHECK(target(hoisted).quant_group_size == 32);
}

TEST_CASE("stop ids are the union of both files, one id or a list") {
  json config = target_json();
  config["eos_token_id"] = {7, 3};
  CHECK(target(config, R"({"eos_token_id":[3,5]})").eos_ids == std::vector<int32_t>{3, 5, 7});
  config.erase("eos_token_id");
  CHECK(target(config).eos_ids.empty());
  CHECK(contains(failure_of([&] { target(config, R"({"eos_token_id":2048})"); }).message,
                 "m/generation_config.json: eos_token_id: 2048: expected an integer from 0 to 2047"));
  CHECK(failure_of([&] { target(config, "{"); }).status == kBad);
}

TEST_CASE("rotary spellings") {
  json config = target_json();
  json scaling = config["rope_scaling"];
  const auto rope = [&](const json& value, const char* key, bool theta_on_top) {
    json c = target_json();
    c.erase("rope_scaling");
    if (!theta_on_top) c.erase("rope_theta");
    c[key] = value;
    return target(c);
  };
  CHECK_FALSE(rope(nullptr, "rope_scaling", true).yarn.has_value());
  CHECK_FALSE(rope({{"rope_type", "default"}}, "rope_scaling", true).yarn.has_value());
  json parameters = scaling;
  parameters.erase("type");
  parameters["rope_type"] = "deepseek_yarn";
  CHECK(rope(parameters, "rope_parameters", true).rope_theta == 50000);
  parameters["rope_theta"] = 10000;
  const ModelConfig newer = rope(parameters, "rope_parameters", false);
  CHECK(newer.rope_theta == 10000);
  CHECK(newer.yarn->factor == 4);
  for (const char* key : {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}) scaling.erase(key);
  const Yarn defaults = *rope(scaling, "rope_scaling", true).yarn;
  CHECK(defaults.beta_fast == 32);
  CHECK(defaults.beta_slow == 1);
  CHECK(defaults.mscale == 1);
  CHECK(defaults.mscale_all_dim == 0);
}

TEST_CASE("every field of the target that is needed is refused when absent or of the wrong type") {
  const char* needed[] = {"vocab_size", "hidden_size", "num_hidden_layers", "first_k_dense_replace",
                          "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                          "v_head_dim", "intermediate_size", "moe_intermediate_size", "n_routed_experts",
                          "num_experts_per_tok", "n_shared_experts", "routed_scaling_factor", "norm_topk_prob",
                          "rms_norm_eps", "rope_theta", "max_position_embeddings", "n_group", "topk_group"};
  const json values[] = {nullptr, "text", json::array(), json::object(), -1, 1e300, INT64_MIN, UINT64_MAX};
  for (const char* key : needed) {
    json config = target_json();
    config.erase(key);
    const Failure absent = failure_of([&] { target(config); });
    CAPTURE(key);
    CHECK(absent.status == kBad);
    CHECK(contains(absent.message, "m/config.json: " + std::string(key) + ": absent: expected "));
    for (const json& value : values) {
      config[key] = value;
      const Failure failure = failure_of([&] { target(config); });
      CAPTURE(failure.message);
      CHECK(failure.status == kBad);
      CHECK(contains(failure.message, std::string("config.json: ") + key + ": "));
    }
  }
}

TEST_CASE("target: absurd and unsupported values") {
  const std::string weights = "/quantization_config/config_groups/group_0/weights/";
  const std::string bits = weights + "num_bits", group = weights + "group_size", symmetric = weights + "symmetric",
                    strategy = weights + "strategy", dynamic = weights + "dynamic", order = weights + "actorder",
                    inputs = "/quantization_config/config_groups/group_0/input_activations";
  check_edits(target_json(),
              {{"/hidden_size", 65537, kBad, "hidden_size: 65537: expected an integer from 1 to 65536"},
               {"/hidden_size", 250, kBad, "multiple of the quantisation's group size"},
               {"/hidden_size", 256.5, kBad, "hidden_size: 256.5"},
               {"/moe_intermediate_size", 48, kBad, "multiple of the quantisation's group size"},
               {"/num_hidden_layers", 1025, kBad, "num_hidden_layers"},
               {"/first_k_dense_replace", 6, kBad, "first_k_dense_replace: 6: expected an integer from 0 to 5"},
               {"/num_experts_per_tok", 17, kBad, "num_experts_per_tok: 17: expected an integer from 1 to 16"},
               {"/qk_rope_head_dim", 31, kBad, "qk_rope_head_dim: 31: expected an even number"},
               {"/rms_norm_eps", 0, kBad, "rms_norm_eps"},
               {"/eos_token_id", 2048, kBad, "eos_token_id"},
               {"/eos_token_id", "x", kBad, "eos_token_id"},
               {"/num_key_value_heads", 4, kUnsupported, "num_key_value_heads: 4: expected 8"},
               {"/model_type", "llama", kUnsupported, "model_type: \"llama\""},
               {"/model_type", "deepseek_v3", kGood, ""},
               {"/scoring_func", "softmax", kUnsupported, "scoring_func: \"softmax\": expected sigmoid"},
               {"/topk_method", "greedy", kUnsupported, "topk_method"},
               {"/n_group", 8, kUnsupported, "n_group: 8: expected 1"},
               {"/topk_group", 4, kUnsupported, "topk_group"},
               {"/hidden_act", "gelu", kUnsupported, "hidden_act"},
               {"/attention_bias", true, kUnsupported, "attention_bias"},
               {"/tie_word_embeddings", true, kUnsupported, "tie_word_embeddings"},
               {"/rope_interleave", false, kUnsupported, "rope_interleave"},
               {"/moe_layer_freq", 2, kUnsupported, "moe_layer_freq"},
               {"/num_nextn_predict_layers", 1, kGood, ""},
               {"/rope_scaling/type", "linear", kUnsupported, "rope_scaling.type: \"linear\""},
               {"/rope_scaling/type", 3, kBad, "rope_scaling.type: 3"},
               {"/rope_scaling/rope_type", "default", kBad, "rope_scaling.type"},
               {"/rope_scaling/factor", 0.5, kBad, "rope_scaling.factor"},
               {"/rope_scaling/beta_fast", 0.5, kBad, "rope_scaling.beta_fast"},
               {"/rope_scaling/attention_factor", 1.5, kUnsupported, "rope_scaling.attention_factor"},
               {"/rope_scaling/original_max_position_embeddings", "erase", kBad, "max_position_embeddings: absent"},
               {"/rope_scaling", 4, kBad, "rope_scaling: 4: expected an object"},
               {"/quantization_config", "erase", kUnsupported, "quantization_config: absent"},
               {"/quantization_config/quant_method", "gptq", kUnsupported, "config.quant_method: \"gptq\""},
               {"/quantization_config/format", "float-quantized", kUnsupported, "quantization_config.format"},
               {"/quantization_config/quantization_status", "frozen", kUnsupported, "quantization_status"},
               {"/quantization_config/kv_cache_scheme", json::object(), kUnsupported, "kv_cache_scheme"},
               {"/quantization_config/transform_config", {{"R1", 1}}, kUnsupported, "transform_config"},
               {"/quantization_config/transform_config", json::object(), kGood, ""},
               {"/quantization_config/config_groups/group_1", json::object(), kUnsupported, "config_groups"},
               {inputs.c_str(), json::object(), kUnsupported, "group_0.input_activations"},
               {bits.c_str(), 8, kUnsupported, "num_bits: 8: expected 4"},
               {group.c_str(), 128, kUnsupported, "weights.group_size: 128: expected 32"},
               {symmetric.c_str(), false, kUnsupported, "symmetric"},
               {strategy.c_str(), "channel", kUnsupported, "strategy"},
               {dynamic.c_str(), true, kUnsupported, "dynamic"},
               {order.c_str(), "group", kUnsupported, "actorder"}},
              [](const json& config) { target(config); });
  check_edits(wrapped(),
              {{"/text_config/hidden_size", 0, kBad, "m/config.json: text_config.hidden_size: 0"},
               {"/text_config", 1, kBad, "text_config: 1: expected an object"},
               {"/tie_word_embeddings", true, kUnsupported, "tie_word_embeddings"}},
              [](const json& config) { target(config); });
}

TEST_CASE("drafter: block size, taps and windows in every spelling") {
  json config = draft_json();
  config.erase("block_size");
  config["dflash_config"]["block_size"] = 4;
  CHECK(draft(config).block_size == 4);
  config["block_size"] = 8;
  CHECK(contains(failure_of([&] { draft(config); }).message, "dflash_config.block_size: 4: expected 8"));

  json kimi = draft_json();
  kimi["num_target_layers"] = 61;
  kimi["num_hidden_layers"] = 6;
  kimi.erase("layer_types");
  kimi["dflash_config"].erase("target_layer_ids");
  CHECK(draft(kimi).target_layer_ids == std::vector<int64_t>{1, 12, 24, 35, 47, 58});
  CHECK(draft(kimi).layers.size() == 6);
  CHECK(draft(kimi).layers[5].window == 256);
  kimi["max_window_layers"] = 4;
  CHECK(draft(kimi).layers[3].window == 0);
  CHECK(draft(kimi).layers[4].window == 256);
  kimi["use_sliding_window"] = false;
  CHECK(draft(kimi).layers[5].window == 0);
  kimi.erase("use_sliding_window");
  CHECK(draft(kimi).layers[5].window == 0);
  kimi["num_hidden_layers"] = 1;
  CHECK(draft(kimi).target_layer_ids == std::vector<int64_t>{30});
  kimi["num_target_layers"] = 4;
  kimi["num_hidden_layers"] = 3;  // the rule gives 1, 1, 1
  CHECK(contains(failure_of([&] { draft(kimi); }).message, "target_layer_ids: absent"));

  json mixed = draft_json();
  mixed["layer_types"] = {"full_attention", "sliding_attention"};
  mixed.erase("use_sliding_window");
  CHECK(draft(mixed).layers[0].window == 0);
  CHECK(draft(mixed).layers[1].window == 256);
  mixed["use_sliding_window"] = false;
  CHECK(draft(mixed).layers[1].window == 0);
}

TEST_CASE("drafter: absent, absurd and unsupported values") {
  check_edits(draft_json(),
              {{"/dflash_config", "erase", kBad, "d/config.json: dflash_config: absent"},
               {"/dflash_config/mask_token_id", "erase", kBad, "dflash_config.mask_token_id: absent"},
               {"/dflash_config/mask_token_id", 2048, kBad, "dflash_config.mask_token_id: 2048"},
               {"/dflash_config/target_layer_ids", {1, 5}, kBad, "target_layer_ids: 5: expected integers from 0 to 4"},
               {"/dflash_config/target_layer_ids", {2, 2}, kBad, "target_layer_ids"},
               {"/dflash_config/target_layer_ids", {3, 1}, kBad, "target_layer_ids"},
               {"/dflash_config/target_layer_ids", json::array(), kBad, "target_layer_ids"},
               {"/dflash_config/target_layer_ids", {1.5}, kBad, "target_layer_ids: 1.5"},
               {"/dflash_config/conv_kernel_size", 2, kUnsupported, "conv_kernel_size"},
               {"/block_size", 1, kBad, "block_size: 1: expected an integer from 2 to 256"},
               {"/block_size", 257, kBad, "block_size"},
               {"/block_size", "erase", kBad, "block_size: absent"},
               {"/num_target_layers", "erase", kBad, "num_target_layers: absent"},
               {"/num_hidden_layers", 3, kBad, "layer_types: an array of 2: expected 3 entries"},
               {"/layer_types/0", "linear_attention", kUnsupported, "layer_types"},
               {"/sliding_window", "erase", kBad, "sliding_window: absent"},
               {"/sliding_window", 0, kBad, "sliding_window: 0"},
               {"/num_key_value_heads", 3, kBad, "num_key_value_heads"},
               {"/head_dim", 33, kBad, "head_dim: 33"},
               {"/head_dim", "erase", kBad, "head_dim: absent"},
               {"/model_type", "llama", kUnsupported, "model_type"},
               {"/quantization_config", json::object(), kUnsupported, "quantization_config"},
               {"/attention_bias", true, kUnsupported, "attention_bias"}},
              [](const json& config) { draft(config); });
}

TEST_CASE("a drafter that does not fit is refused by the field") {
  const ModelConfig model = target(target_json());
  check_edits(draft_json(),
              {{"/hidden_size", 128, kBad, "d/config.json: hidden_size: 128: expected the target model's 256"},
               {"/vocab_size", 4096, kBad, "vocab_size: 4096: expected the target model's 2048"},
               {"/num_target_layers", 61, kBad, "num_target_layers: 61: expected the target model's 5"}},
              [&](const json& config) { check_draft_fits(draft(config), model, "d"); });
  DraftConfig built = draft(draft_json());
  built.target_layer_ids = {1, 5};
  CHECK(contains(failure_of([&] { check_draft_fits(built, model, "d"); }).message, "target_layer_ids: 5"));
}

TEST_CASE("text that is no config") {
  const std::string deep(1'000'000, '[');
  for (const std::string& text : {std::string(), std::string("null"), std::string("[]"), std::string("{\"a\":1"),
                                  std::string("{\"a\":1e999}"), std::string("{\"a\":\"\xc3\x28\"}"), deep,
                                  std::string("{\"hidden_size\":1,\"hidden_size\":2}")}) {
    CHECK(failure_of([&] { parse_model_config(text, "", "m/config.json"); }).status == kBad);
    CHECK(failure_of([&] { parse_draft_config(text, "m/config.json"); }).status == kBad);
  }
}
