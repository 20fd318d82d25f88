// What the engine tells about itself.
#include <nlohmann/json.hpp>

#include "runtime/engine.h"

namespace kdt {
namespace {

using Json = nlohmann::ordered_json;

Json yarn_json(const std::optional<Yarn>& yarn) {
  if (!yarn) return nullptr;
  return {{"factor", yarn->factor},       {"original_context", yarn->original_context},
          {"beta_fast", yarn->beta_fast}, {"beta_slow", yarn->beta_slow},
          {"mscale", yarn->mscale},       {"mscale_all_dim", yarn->mscale_all_dim}};
}

Json target_json(const ModelConfig& c) {
  return {{"family", c.family == ModelFamily::k2_5 ? "k2_5" : "k2_thinking"},
          {"vocab_size", c.vocab_size},
          {"hidden_size", c.hidden_size},
          {"layers", c.n_layers},
          {"dense_layers", c.n_dense_layers},
          {"heads", c.n_heads},
          {"q_lora_rank", c.q_lora_rank},
          {"kv_lora_rank", c.kv_lora_rank},
          {"qk_nope_head_dim", c.qk_nope_dim},
          {"qk_rope_head_dim", c.qk_rope_dim},
          {"v_head_dim", c.v_head_dim},
          {"dense_width", c.dense_width},
          {"expert_width", c.expert_width},
          {"experts", c.n_experts},
          {"experts_per_token", c.n_experts_per_token},
          {"shared_experts", c.n_shared_experts},
          {"routed_scaling_factor", c.routed_scaling_factor},
          {"rms_norm_eps", c.rms_norm_eps},
          {"rope_theta", c.rope_theta},
          {"yarn", yarn_json(c.yarn)},
          {"max_context", c.max_context},
          {"int4_group_size", c.quant_group_size}};
}

Json draft_json(const DraftConfig& c) {
  Json windows = Json::array();
  for (const DraftLayer& layer : c.layers) windows.push_back(layer.window);
  return {{"layers", c.layers.size()},   {"hidden_size", c.hidden_size},
          {"heads", c.n_heads},          {"kv_heads", c.n_kv_heads},
          {"head_dim", c.head_dim},      {"mlp_width", c.mlp_width},
          {"block_size", c.block_size},  {"mask_token_id", c.mask_token_id},
          {"target_layer_ids", c.target_layer_ids},
          {"windows", windows},          {"yarn", yarn_json(c.yarn)}};
}

}  // namespace

std::string Engine::describe(double load_seconds, double measure_seconds) const {
  Json costs = Json::array();
  if (costs_.measured())
    for (size_t i = 0; i < spec::CostTable::kRows.size(); ++i)
      costs.push_back({{"rows", spec::CostTable::kRows[i]}, {"verify_ms", costs_.verify().seconds()[i] * 1e3},
                       {"estimated", costs_.guessed(i)}});
  Json draft_ms = Json::array();
  for (int64_t depths = 1; costs_.measured() && depths <= rank_->round().max_depths(); ++depths)
    draft_ms.push_back(costs_.draft(depths, 1) * 1e3);
  const Json info = {
      {"model_path", options_.model_path},
      {"draft_path", options_.draft_path.empty() ? Json(nullptr) : Json(options_.draft_path)},
      {"backend", rank_->ops().backend()},
      {"cpu_target", rank_->ops().instruction_set()},   // of CUDA: sm_90 and its like
      {"threads", rank_->ops().threads()},           // of a rank
      {"tp", options_.tp},
      {"ranks", options_.tp == 1 ? Json(nullptr)
                                 : Json{{"as", others_ ? "threads" : "processes"},
                                        {"deadline_ms", options_.rank_deadline.count()}}},
      {"max_context", configs_.max_context},
      {"prefill_chunk", options_.prefill_chunk},
      {"max_budget", options_.max_budget},
      {"max_streams", options_.max_streams},
      {"max_waiting", options_.max_waiting},
      {"kv_tokens", pages_->n_pages() * kPageTokens},
      {"prefix_cache", options_.prefix_cache},
      {"thinking", thinks_by_default()},
      {"stop_token_ids", stop_ids_},
      {"target", target_json(configs_.model)},
      {"draft", configs_.draft ? draft_json(*configs_.draft) : Json(nullptr)},
      {"bytes",
       {{"target_checkpoint", rank_->target_bytes()},
        {"draft_checkpoint", rank_->draft_bytes()},
        {"weights", rank_->ops().weight_bytes()},
        {"cache_reserved", rank_->round().cache_bytes()}}},
      {"load_ms", load_seconds * 1e3},
      {"measure_ms", measure_seconds * 1e3},
      {"round_costs", costs},
      {"draft_ms_by_depth", draft_ms}};
  return info.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace kdt
