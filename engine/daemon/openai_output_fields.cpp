// What the answer looks like, when it is made, and the fields that are known without having an effect.
#include <cmath>
#include <string>
#include <utility>

#include "openai_fields.h"

namespace kdt::openai {
namespace {

constexpr int64_t kMaxTop = 20;
constexpr double kMaxTimeoutSeconds = 86400;

void read_stream_options(const Json& value, Draft& draft) {
  draft.has_stream_options = true;
  for (const auto& [key, setting] : read_members("stream_options", value).items()) {
    const std::string name = "stream_options." + key;
    if (key != "include_usage" && key != "continuous_usage_stats" && key != "include_obfuscation") {
      throw ApiError(400, "unknown_parameter", "Unknown parameter: '" + one_line(name) + "'.", one_line(name));
    }
    const bool on = !setting.is_null() && read_boolean(name, setting);
    if (key == "include_usage") draft.request.include_usage = on;
    if (key == "continuous_usage_stats") draft.request.continuous_usage = on;
  }
}

Json stream_options_schema() {
  return Json::parse(R"({
    "type": "object",
    "properties": {
      "include_usage": {"type": ["boolean", "null"]},
      "continuous_usage_stats": {"type": ["boolean", "null"]},
      "include_obfuscation": {"type": ["boolean", "null"]}},
    "additionalProperties": false
  })");
}

Field ignored(std::string name, unsigned endpoints) {
  return {std::move(name), endpoints, Json::object(), [](const Json&, Draft&) {}};
}

// A field of other servers whose one value means what this server does anyway.
Field only(std::string name, unsigned endpoints, Json value) {
  return {name, endpoints, {{"const", value}}, [=](const Json& given, Draft&) {
            if (given != value) throw unsupported(name, "only " + write_json(value) + " is supported");
          }};
}

Field refused(std::string name, unsigned endpoints, std::string why) {
  return {name, endpoints, {{"type", "null"}}, [=](const Json&, Draft&) { throw unsupported(name, why); }};
}

}  // namespace

Fields output_fields(const ServedModel&, const RequestLimits& limits) {
  using R = GenerationRequest;
  return {
      integer_field("n", kGenerate, 1, limits.n, &R::n),
      {"best_of", kCompletion, integer_schema(1, limits.n),
       [](const Json& value, Draft& draft) { draft.best_of = read_integer("best_of", value, 1, draft.limits.n); }},
      boolean_field("stream", kGenerate, &R::stream),
      {"stream_options", kGenerate, stream_options_schema(), read_stream_options},
      {"logprobs",
       kChat,
       {{"type", "boolean"}},
       [](const Json& value, Draft& draft) { draft.chat_logprobs = read_boolean("logprobs", value); }},
      {"top_logprobs", kChat, integer_schema(0, kMaxTop),
       [](const Json& value, Draft& draft) { draft.top_logprobs = read_integer("top_logprobs", value, 0, kMaxTop); }},
      integer_field("logprobs", kCompletion, 0, kMaxTop, &R::logprobs),
      integer_field("prompt_logprobs", kGenerate, 0, kMaxTop, &R::prompt_logprobs),
      boolean_field("echo", kCompletion, &R::echo),
      boolean_field("return_token_ids", kGenerate, &R::return_token_ids),
      boolean_field("return_tokens_as_token_ids", kGenerate, &R::tokens_as_ids),
      integer_field("priority", kGenerate, INT32_MIN, INT32_MAX, &R::priority),
      {"timeout",
       kGenerate,
       {{"type", "number"}, {"exclusiveMinimum", 0}, {"maximum", kMaxTimeoutSeconds}},
       [](const Json& value, Draft& draft) {
         const double seconds = read_number("timeout", value, 0, kMaxTimeoutSeconds, true);
         draft.request.timeout_ms = static_cast<int32_t>(std::ceil(seconds * 1000));
       }}};
}

Fields accepted_fields() {
  Fields fields;
  for (const char* name : {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                           "prompt_cache_retention", "prediction", "request_id"}) {
    fields.push_back(ignored(name, kGenerate));
  }
  // The tokenizer adds none, whatever is asked.
  fields.push_back({"add_special_tokens", kGenerate | kTokenize, {{"type", "boolean"}}, [](const Json& value, Draft&) {
                      read_boolean("add_special_tokens", value);
                    }});
  const Fields one_value = {only("parallel_tool_calls", kChat, true),
                            only("response_format", kGenerate, {{"type", "text"}}),
                            only("modalities", kChat, Json::array({"text"})),
                            only("echo", kChat, false),
                            only("best_of", kChat, 1),
                            only("verbosity", kChat, "medium"),
                            only("add_generation_prompt", kChat | kTokenize, true),
                            only("continue_final_message", kChat | kTokenize, false),
                            only("return_token_strs", kTokenize, false),
                            only("include_reasoning", kChat, true),
                            only("separate_reasoning", kChat, true),
                            only("use_beam_search", kGenerate, false),
                            only("early_stopping", kGenerate, false),
                            only("include_stop_str_in_output", kGenerate, false),
                            only("spaces_between_special_tokens", kGenerate, true),
                            only("length_penalty", kGenerate, 1),
                            only("typical_p", kGenerate, 1),
                            only("tfs_z", kGenerate, 1),
                            only("top_a", kGenerate, 0),
                            only("mirostat", kGenerate, 0),
                            only("mirostat_mode", kGenerate, 0),
                            only("dry_multiplier", kGenerate, 0),
                            only("xtc_probability", kGenerate, 0)};
  fields.insert(fields.end(), one_value.begin(), one_value.end());
  return fields;
}

Fields refused_fields() {
  struct Refusal {
    unsigned endpoints;
    const char* why;
    std::vector<const char*> names;
  };
  const Refusal refusals[] = {
      {kGenerate,
       "output is not constrained to a grammar or schema",
       {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend",
        "guided_whitespace_pattern", "structured_outputs", "grammar", "json_schema", "regex", "ebnf"}},
      {kChat, "declare tools instead", {"functions", "function_call"}},
      {kChat, "use chat_template_kwargs.thinking", {"reasoning_effort", "reasoning", "thinking"}},
      {kChat,
       "the chat format is the checkpoint's own",
       {"chat_template", "documents", "mm_processor_kwargs", "web_search_options", "audio"}},
      {kCompletion, "text is only continued", {"suffix", "prompt_embeds"}},
      {kGenerate,
       "not implemented",
       {"logits_processors", "allowed_token_ids", "bad_words", "truncate_prompt_tokens", "lora_request", "lora",
        "cache_salt", "kv_transfer_params", "vllm_xargs", "thinking_token_budget", "mirostat_tau", "mirostat_eta",
        "dry_base", "dry_allowed_length", "dry_sequence_breakers", "xtc_threshold", "sampler_seed", "samplers"}}};
  Fields fields;
  for (const Refusal& refusal : refusals) {
    for (const char* name : refusal.names) fields.push_back(refused(name, refusal.endpoints, refusal.why));
  }
  return fields;
}

}  // namespace kdt::openai
