#include "openai_request.h"

#include <algorithm>
#include <random>
#include <utility>

#include "openai_fields.h"

namespace kdt::openai {
namespace {

constexpr int64_t kDefaultCompletionTokens = 16;

[[noreturn]] void fail_together(const std::string& param, const std::string& message) {
  throw ApiError(400, "invalid_value", message, param);
}

uint64_t random_seed() {
  std::random_device random;
  return (static_cast<uint64_t>(random()) << 32) | random();
}

void settle_chat(Draft& draft) {
  GenerationRequest& request = draft.request;
  if (draft.tools.is_array() && !draft.tools.empty() && !draft.tools_off) request.tools_json = write_json(draft.tools);
  if (draft.top_logprobs && !draft.chat_logprobs) {
    fail_together("top_logprobs", "top_logprobs: expected logprobs to be true beside it");
  }
  if (draft.chat_logprobs) request.logprobs = static_cast<int32_t>(draft.top_logprobs.value_or(0));
  if (draft.max_completion_tokens) {
    if (request.max_tokens) fail_together("max_tokens", "max_tokens and max_completion_tokens: expected one of them");
    request.max_tokens = draft.max_completion_tokens;
  }
}

void settle_completion(Draft& draft) {
  GenerationRequest& request = draft.request;
  if (!request.max_tokens) request.max_tokens = kDefaultCompletionTokens;
  // The best of one answer is that answer.
  if (draft.best_of && *draft.best_of != request.n) {
    throw unsupported("best_of", "only the value of n is supported");
  }
}

void settle(Draft& draft) {
  GenerationRequest& request = draft.request;
  if (!draft.has_seed) request.seed = random_seed();
  if (draft.has_stream_options && !request.stream) {
    fail_together("stream_options", "stream_options: expected stream to be true beside it");
  }
  if (request.prompt_logprobs >= 0 && request.stream) {
    throw unsupported("prompt_logprobs", "not together with stream");
  }
  if (request.max_tokens == 0 && !request.echo && request.prompt_logprobs < 0) {
    throw invalid_value(draft.max_completion_tokens ? "max_completion_tokens" : "max_tokens", "0",
                        request.kind == RequestKind::chat ? "at least 1, or prompt_logprobs"
                                                          : "at least 1, or echo, or prompt_logprobs");
  }
  if (request.max_tokens && request.min_tokens > *request.max_tokens) {
    throw invalid_value("min_tokens", std::to_string(request.min_tokens),
                        "at most max_tokens, " + std::to_string(*request.max_tokens));
  }
  if (request.n_choices() > draft.limits.sequences) {
    throw invalid_value("n", std::to_string(request.n_choices()) + " choices in all",
                        "prompts times n to be at most " + std::to_string(draft.limits.sequences));
  }
}

}  // namespace

Protocol::Protocol(ServedModel model, RequestLimits limits)
    : model_(std::move(model)), limits_(limits), table_(std::make_unique<const FieldTable>(model_, limits_)) {}

Protocol::~Protocol() = default;

GenerationRequest Protocol::parse_chat(std::string_view body) const {
  Draft draft{model_, limits_};
  draft.request.kind = RequestKind::chat;
  draft.request.max_context = model_.max_context;
  draft.request.model = model_.names.front();
  table_->read(kChat, read_object(body, limits_.json_depth), draft);
  settle_chat(draft);
  settle(draft);
  return std::move(draft.request);
}

GenerationRequest Protocol::parse_completion(std::string_view body) const {
  Draft draft{model_, limits_};
  draft.request.kind = RequestKind::completion;
  draft.request.max_context = model_.max_context;
  draft.request.model = model_.names.front();
  table_->read(kCompletion, read_object(body, limits_.json_depth), draft);
  settle_completion(draft);
  settle(draft);
  return std::move(draft.request);
}

TokenizeRequest Protocol::parse_tokenize(std::string_view body) const {
  Draft draft{model_, limits_};
  table_->read(kTokenize, read_object(body, limits_.json_depth), draft);
  if (draft.has_messages == draft.has_prompt) {
    throw ApiError(400, "missing_required_parameter", "Expected one of the parameters 'prompt' and 'messages'.",
                   "prompt");
  }
  TokenizeRequest request;
  request.is_chat = draft.has_messages;
  if (draft.has_prompt) request.prompt = std::move(draft.request.prompts.front().text);
  request.messages_json = std::move(draft.request.messages_json);
  if (draft.tools.is_array() && !draft.tools.empty()) request.tools_json = write_json(draft.tools);
  request.thinking = draft.request.thinking;
  request.preserve_thinking = draft.request.preserve_thinking;
  return request;
}

std::vector<int32_t> Protocol::parse_detokenize(std::string_view body) const {
  Draft draft{model_, limits_};
  table_->read(kDetokenize, read_object(body, limits_.json_depth), draft);
  return std::move(draft.tokens);
}

namespace {

Json model_json(const ServedModel& model, const std::string& name) {
  return {{"id", name},
          {"object", "model"},
          {"created", model.created},
          {"owned_by", "kdtree"},
          {"max_model_len", model.max_context}};
}

}  // namespace

std::string Protocol::models_body() const {
  Json data = Json::array();
  for (const std::string& name : model_.names) data.push_back(model_json(model_, name));
  return write_json({{"object", "list"}, {"data", std::move(data)}});
}

std::string Protocol::model_body(std::string_view name) const {
  const auto served = std::find(model_.names.begin(), model_.names.end(), name);
  if (served == model_.names.end()) throw model_not_found(name, model_.names);
  return write_json(model_json(model_, *served));
}

}  // namespace kdt::openai
