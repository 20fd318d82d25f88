#include "rehearsal/report.h"

#include <nlohmann/json.hpp>

namespace kdt {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kMs = 1e3, kUs = 1e6;

Json step_json(const StepFigures& step, double bandwidth, bool collectives) {
  Json stages = Json::object();
  for (size_t i = 0; i < kStages; ++i)
    if (step.stages.seconds[i] > 0) stages[kStageNames[i]] = step.stages.seconds[i] * kMs;
  const double floor = step.bytes() / bandwidth;
  Json out = {{"nodes", step.nodes},
              {"prefix", step.prefix},
              {"streams", step.streams},
              {"rows", step.nodes * step.streams},
              {"overlap", step.overlap},
              {"distinct_experts", step.experts},
              {"expert_bytes", step.expert_bytes},
              {"weight_bytes", step.weight_bytes},
              {"kv_bytes", step.kv_bytes},
              {"bytes", step.bytes()},
              {"floor_ms", floor * kMs},
              {"ms", step.median * kMs},
              {"fastest_ms", step.fastest * kMs},
              {"host_ms", step.wall * kMs},
              {"times_floor", step.median / floor},
              {"stages_ms", stages}};
  if (collectives) out["collectives_ms"] = step.collectives * kMs;
  return out;
}

Json ops_json(const StepOps& of, double bandwidth) {
  Json ops = Json::array();
  for (const OpFigures& op : of.ops)
    ops.push_back({{"op", op.name},
                   {"calls", op.calls},
                   {"bytes", op.bytes},
                   {"floor_us", op.bytes / bandwidth * kUs},
                   {"us", op.seconds * kUs},
                   {"saved_us", op.saved * kUs}});
  return {{"nodes", of.nodes},
          {"prefix", of.prefix},
          {"streams", of.streams},
          {"step_ms", of.step_seconds * kMs},
          {"marks_us", of.mark_seconds * kUs},
          {"ops", ops}};
}

Json all(const std::vector<StepFigures>& steps, double bandwidth, bool collectives) {
  Json list = Json::array();
  for (const StepFigures& step : steps) list.push_back(step_json(step, bandwidth, collectives));
  return list;
}

Json prefill_json(const PrefillFigures& of) {
  return {{"tokens", of.tokens},
          {"chunk", of.chunk},
          {"ms", of.seconds * kMs},
          {"host_ms", of.wall * kMs},
          {"tokens_per_second", static_cast<double>(of.tokens) / of.seconds},
          {"attention_ms", of.attention * kMs},
          {"tflop", of.operations * 1e-12},
          {"tflops", of.operations / of.seconds * 1e-12}};
}

Json model_json(const ModelConfig& c) {
  return {{"layers", c.n_layers},           {"dense_layers", c.n_dense_layers}, {"hidden", c.hidden_size},
          {"vocab", c.vocab_size},          {"heads", c.n_heads},               {"dense_width", c.dense_width},
          {"experts", c.n_experts},         {"expert_width", c.expert_width},   {"experts_per_token", c.n_experts_per_token},
          {"q_lora", c.q_lora_rank},        {"kv_lora", c.kv_lora_rank}};
}

}  // namespace

std::string rehearsal_json(const RehearsalPlan& plan, const RehearsalReport& report) {
  Json ops = Json::array();
  for (const StepOps& of : report.ops) ops.push_back(ops_json(of, report.read_bandwidth));
  Json prefill = Json::array();
  for (const PrefillFigures& of : report.prefill) prefill.push_back(prefill_json(of));
  Json draft = nullptr;
  if (report.draft)
    draft = {{"layers", report.draft->layers.size()},
             {"block", report.draft->block_size},
             {"heads", report.draft->n_heads},
             {"kv_heads", report.draft->n_kv_heads},
             {"mlp_width", report.draft->mlp_width},
             {"taps", report.draft->target_layer_ids}};
  Json out = {{"config", plan.where},
              {"tp", plan.tp},
              {"rank", plan.rank},
              {"collectives", plan.collectives ? "emulate" : "none"},
              {"routing", plan.routed ? "router" : "drawn"},
              {"backend", report.backend},
              {"instruction_set", report.instruction_set},
              {"threads", report.threads},
              {"model", model_json(report.model)},
              {"draft", draft},
              {"read_bandwidth", report.read_bandwidth},
              {"load_seconds", report.load_seconds},
              {"seconds", report.total_seconds},
              {"replays", plan.replays},
              {"memory",
               {{"weight_bytes", report.weight_bytes},
                {"page_bytes", report.page_bytes},
                {"buffer_bytes", report.buffer_bytes},
                {"free_bytes", report.free_bytes},
                {"max_rows", report.max_rows},
                {"max_context", report.max_context},
                {"pages", report.n_pages}}},
              {"steps", all(report.steps, report.read_bandwidth, plan.collectives.has_value())},
              {"rounds", all(report.rounds, report.read_bandwidth, plan.collectives.has_value())},
              {"ops", ops},
              {"prefill", prefill},
              {"left_out", report.left_out},
              {"beyond_context", report.beyond_context}};
  if (plan.collectives) {
    out["collective_us"] = plan.collectives->seconds * kUs;
    out["link_gbps"] = plan.collectives->bytes_per_second * 1e-9;
  }
  return out.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace kdt
