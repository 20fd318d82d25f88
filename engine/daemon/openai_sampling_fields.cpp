// How tokens are chosen, and what ends them.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "openai_fields.h"

namespace kdt::openai {
namespace {

constexpr int64_t kMaxStopBytes = 1024;
constexpr int64_t kMaxStopTokens = 256;
// A top_p of 0 means the most probable token alone, as OpenAI takes it; the engine wants more than 0.
constexpr double kLeastTopP = 1e-9;

void read_seed(const Json& value, Draft& draft) {
  draft.has_seed = true;
  if (value.is_number_unsigned()) {
    draft.request.seed = value.get<uint64_t>();
  } else if (value.is_number_float() && std::abs(value.get<double>()) >= 0x1p63) {
    throw invalid_value("seed", shown(value), "an integer from -2^63 to 2^64 - 1");
  } else {
    draft.request.seed = static_cast<uint64_t>(read_integer("seed", value, INT64_MIN, INT64_MAX));
  }
}

void add_stop(const std::string& name, const Json& value, Draft& draft) {
  const std::string& text = read_string(name, value);
  if (text.empty() || static_cast<int64_t>(text.size()) > kMaxStopBytes || text.find('\0') != std::string::npos) {
    throw invalid_value(name, text, "1 to " + std::to_string(kMaxStopBytes) + " bytes without a NUL");
  }
  draft.request.stop.push_back(text);
}

void read_stop(const Json& value, Draft& draft) {
  if (value.is_string()) return add_stop("stop", value, draft);
  if (!value.is_array()) throw invalid_value("stop", shown(value), "a string or an array of strings");
  size_t i = 0;
  for (const Json& item : read_array("stop", value, draft.limits.stop_strings)) {
    add_stop("stop[" + std::to_string(i++) + "]", item, draft);
  }
}

void read_logit_bias(const Json& value, Draft& draft) {
  const Json& biases = read_members("logit_bias", value);
  if (static_cast<int64_t>(biases.size()) > draft.limits.logit_bias) {
    throw invalid_value("logit_bias", std::to_string(biases.size()) + " entries",
                        "at most " + std::to_string(draft.limits.logit_bias));
  }
  for (const auto& [key, bias] : biases.items()) {
    // Up to nine digits without a leading zero: no two keys are one token.
    const bool digits = !key.empty() && key.size() <= 9 && (key.size() == 1 || key[0] != '0') &&
                        key.find_first_not_of("0123456789") == std::string::npos;
    if (!digits || std::stol(key) >= draft.served.vocab_size) {
      throw invalid_value("logit_bias", key,
                          "keys that are token ids below " + std::to_string(draft.served.vocab_size));
    }
    draft.request.bias_tokens.push_back(static_cast<int32_t>(std::stol(key)));
    draft.request.bias_values.push_back(static_cast<float>(read_number("logit_bias." + key, bias, -100, 100)));
  }
}

void read_speculate(const Json& value, Draft& draft) {
  static const std::vector<std::pair<std::string, int32_t>> kModes = {{"auto", KDT_SPECULATE_AUTO},
                                                                      {"off", KDT_SPECULATE_OFF},
                                                                      {"chain", KDT_SPECULATE_CHAIN},
                                                                      {"tree", KDT_SPECULATE_TREE}};
  const std::string& name = read_string("speculate", value);
  const auto mode = std::find_if(kModes.begin(), kModes.end(), [&](const auto& entry) { return entry.first == name; });
  if (mode == kModes.end()) throw invalid_value("speculate", name, "auto, off, chain or tree");
  draft.request.speculate = mode->second;
  if (mode->second > KDT_SPECULATE_OFF && !draft.served.has_drafter) {
    throw invalid_value("speculate", name, "auto or off: this model has no drafter");
  }
}

}  // namespace

Fields sampling_fields(const ServedModel& model, const RequestLimits& limits) {
  using R = GenerationRequest;
  Fields fields = {
      number_field("temperature", kGenerate, 0, 2, &R::temperature),
      {"top_p", kGenerate, number_schema(0, 1),
       [](const Json& value, Draft& draft) {
         draft.request.top_p = std::max(read_number("top_p", value, 0, 1), kLeastTopP);
       }},
      {"top_k", kGenerate, integer_schema(-1, INT32_MAX),
       [](const Json& value, Draft& draft) {
         draft.request.top_k = std::max<int64_t>(read_integer("top_k", value, -1, INT32_MAX), 0);
       }},
      number_field("min_p", kGenerate, 0, 1, &R::min_p),
      number_field("presence_penalty", kGenerate, -2, 2, &R::presence_penalty),
      number_field("frequency_penalty", kGenerate, -2, 2, &R::frequency_penalty),
      {"repetition_penalty",
       kGenerate,
       {{"type", "number"}, {"exclusiveMinimum", 0}, {"maximum", 10}},
       [](const Json& value, Draft& draft) {
         draft.request.repetition_penalty = read_number("repetition_penalty", value, 0, 10, true);
       }},
      {"seed", kGenerate, {{"type", "integer"}, {"minimum", INT64_MIN}, {"maximum", UINT64_MAX}}, read_seed},
      {"max_tokens", kGenerate, integer_schema(0, INT32_MAX),
       [](const Json& value, Draft& draft) {
         draft.request.max_tokens = read_integer("max_tokens", value, 0, INT32_MAX);
       }},
      {"max_completion_tokens", kChat, integer_schema(0, INT32_MAX),
       [](const Json& value, Draft& draft) {
         draft.max_completion_tokens = read_integer("max_completion_tokens", value, 0, INT32_MAX);
       }},
      integer_field("min_tokens", kGenerate, 0, INT32_MAX, &R::min_tokens),
      boolean_field("ignore_eos", kGenerate, &R::ignore_eos),
      boolean_field("skip_special_tokens", kGenerate, &R::skip_special_tokens),
      {"stop_token_ids", kGenerate, ids_schema(model, 0, kMaxStopTokens),
       [](const Json& value, Draft& draft) {
         draft.request.stop_token_ids = read_ids("stop_token_ids", value, kMaxStopTokens, draft.served);
       }},
      {"logit_bias",
       kGenerate,
       {{"type", "object"},
        {"propertyNames", {{"pattern", "^(0|[1-9][0-9]{0,8})$"}}},
        {"additionalProperties", number_schema(-100, 100)},
        {"maxProperties", limits.logit_bias}},
       read_logit_bias},
      {"speculate", kGenerate, {{"enum", {"auto", "off"}}}, read_speculate},
      integer_field("budget", kGenerate, 0, model.max_budget, &R::budget),
      boolean_field("spine", kGenerate, &R::spine)};
  const Json stop = {{"type", "string"}, {"minLength", 1}, {"maxLength", kMaxStopBytes}};
  const Json stops = {{"type", "array"}, {"items", stop}, {"maxItems", limits.stop_strings}};
  fields.push_back({"stop", kGenerate, {{"anyOf", {stop, stops}}}, read_stop});
  if (model.has_drafter) {
    for (Field& field : fields) {
      if (field.name == "speculate") field.schema = {{"enum", {"auto", "off", "chain", "tree"}}};
    }
  }
  return fields;
}

}  // namespace kdt::openai
