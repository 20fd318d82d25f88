// From a validated request to what the library takes.
#include <algorithm>

#include "openai_json.h"
#include "openai_library.h"
#include "openai_request.h"
#include "openai_text.h"
#include "openai_utf8.h"

namespace kdt::openai {
namespace {

using Ids = std::vector<int32_t>;

Ids encode_text(kdt_engine* engine, const std::string& text) {
  return collect<Ids>(text.size() / 2 + 8, [&](int32_t* ids, int64_t capacity, int64_t* n) {
    return kdt_tokenize(engine, text.data(), static_cast<int64_t>(text.size()), ids, capacity, n);
  });
}

// `Request` is a GenerationRequest or a TokenizeRequest.
template <class Request>
Ids encode_chat(kdt_engine* engine, const Request& request) {
  const char* tools = request.tools_json.empty() ? nullptr : request.tools_json.c_str();
  return collect<Ids>(request.messages_json.size() / 2 + 16, [&](int32_t* ids, int64_t capacity, int64_t* n) {
    return kdt_chat_encode(engine, request.messages_json.c_str(), tools, request.thinking, request.preserve_thinking,
                           ids, capacity, n);
  });
}

// What a choice may generate: as asked, or what the prompt leaves of the context.
int64_t max_tokens_of(const GenerationRequest& request, int64_t n_prompt) {
  return request.max_tokens.value_or(std::max<int64_t>(request.max_context - n_prompt, 1));
}

void check_context(const GenerationRequest& request, int64_t n_prompt) {
  const int64_t max_tokens = max_tokens_of(request, n_prompt);
  if (n_prompt + max_tokens > request.max_context) {
    throw context_length_exceeded(n_prompt, max_tokens, request.max_context,
                                  request.kind == RequestKind::chat ? "messages" : "prompt");
  }
  if (request.min_tokens > max_tokens) {
    throw invalid_value("min_tokens", std::to_string(request.min_tokens), "at most " + std::to_string(max_tokens));
  }
}

}  // namespace

std::vector<Ids> encode_prompts(kdt_engine* engine, const GenerationRequest& request) {
  std::vector<Ids> prompts;
  if (request.kind == RequestKind::chat) {
    prompts.push_back(encode_chat(engine, request));
  } else {
    for (const Prompt& prompt : request.prompts) {
      prompts.push_back(prompt.is_text ? encode_text(engine, prompt.text) : prompt.ids);
    }
  }
  for (const Ids& ids : prompts) check_context(request, static_cast<int64_t>(ids.size()));
  return prompts;
}

ChoiceOptions choice_options(const GenerationRequest& request, const Ids& prompt, int64_t choice) {
  ChoiceOptions out;
  for (const std::string& stop : request.stop) out.stop.push_back(stop.c_str());
  kdt_request_options& o = out.options;
  if (const kdt_status status = kdt_request_options_init(&o, sizeof o); status != KDT_OK) {
    throw from_status(status, kdt_last_error());
  }
  o.max_tokens =
      static_cast<int32_t>(std::min<int64_t>(max_tokens_of(request, static_cast<int64_t>(prompt.size())), INT32_MAX));
  o.prompt = prompt.data();
  o.n_prompt = static_cast<int64_t>(prompt.size());
  o.temperature = request.temperature;
  o.top_p = request.top_p;
  o.min_p = request.min_p;
  o.top_k = static_cast<int32_t>(request.top_k);
  o.has_seed = 1;
  o.seed = request.seed;
  o.speculate = request.speculate;
  o.budget = static_cast<int32_t>(request.budget);
  o.spine = request.spine;
  o.ignore_eos = request.ignore_eos;
  o.skip_special_tokens = request.skip_special_tokens;
  o.min_tokens = static_cast<int32_t>(request.min_tokens);
  o.repetition_penalty = request.repetition_penalty;
  o.presence_penalty = request.presence_penalty;
  o.frequency_penalty = request.frequency_penalty;
  o.bias_tokens = request.bias_tokens.data();
  o.bias_values = request.bias_values.data();
  o.n_bias = static_cast<int64_t>(request.bias_tokens.size());
  o.stop = out.stop.data();
  o.n_stop = static_cast<int64_t>(out.stop.size());
  o.stop_tokens = request.stop_token_ids.data();
  o.n_stop_tokens = static_cast<int64_t>(request.stop_token_ids.size());
  o.logprobs = request.logprobs;
  o.prompt_logprobs = request.prompt_logprobs;
  // An echo has the prompt's log-probabilities too; and a request without tokens to generate is one for its prompt.
  if (request.echo) o.prompt_logprobs = std::max(o.prompt_logprobs, request.logprobs);
  if (o.max_tokens == 0) o.prompt_logprobs = std::max(o.prompt_logprobs, 0);
  o.choice = static_cast<uint32_t>(choice);
  o.priority = static_cast<int32_t>(request.priority);
  o.timeout_ms = request.timeout_ms;
  return out;
}

std::string tokenize_body(kdt_engine* engine, const ServedModel& model, const TokenizeRequest& request) {
  const Ids ids = request.is_chat ? encode_chat(engine, request) : encode_text(engine, request.prompt);
  return write_json(
      {{"count", ids.size()}, {"max_model_len", model.max_context}, {"tokens", ids}, {"token_strs", nullptr}});
}

std::string detokenize_body(kdt_engine* engine, const Ids& ids) {
  return write_json({{"prompt", mended_utf8(EngineText(engine).bytes(ids))}});
}

}  // namespace kdt::openai
