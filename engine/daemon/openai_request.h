// Requests in OpenAI's protocol, read and validated: everything that can be refused without the engine is refused here.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kdtree.h"
#include "openai_error.h"

namespace kdt::openai {

// What is served. Fixed at start.
struct ServedModel {
  std::vector<std::string> names;   // at least one; a request may use any, answers carry the one it used
  int64_t max_context = 0;          // tokens of prompt + output
  int64_t vocab_size = INT32_MAX;   // token ids are below it
  int32_t max_budget = 1024;
  bool has_drafter = false;
  int64_t created = 0;              // Unix seconds, of /v1/models
};

// Caps on what one request may ask for.
struct RequestLimits {
  int64_t json_depth = 64;
  int64_t n = 64;                   // choices of one prompt
  int64_t sequences = 128;          // prompts times choices
  int64_t stop_strings = 32;
  int64_t logit_bias = 1024;
};

enum class RequestKind { chat, completion };

struct Prompt {
  bool is_text = true;
  std::string text;
  std::vector<int32_t> ids;
};

struct GenerationRequest {
  RequestKind kind = RequestKind::chat;
  std::string model;
  int64_t max_context = 0;          // of the served model

  std::vector<Prompt> prompts;      // completion
  std::string messages_json;        // chat
  std::string tools_json;           // "" : none, or tool_choice "none"
  int32_t thinking = KDT_THINKING_DEFAULT;
  bool preserve_thinking = false;

  int64_t n = 1;
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;
  bool echo = false;
  bool return_token_ids = false;
  bool tokens_as_ids = false;       // "token_id:17" in place of a token's text in logprobs

  std::optional<int64_t> max_tokens;   // absent: 16 for a completion, what the context leaves for chat
  double temperature = 1;
  double top_p = 1;
  double min_p = 0;
  int64_t top_k = 0;
  double presence_penalty = 0;
  double frequency_penalty = 0;
  double repetition_penalty = 1;
  uint64_t seed = 0;                // drawn when the client gave none, so that all choices share it
  int64_t min_tokens = 0;
  bool ignore_eos = false;
  bool skip_special_tokens = true;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;
  std::vector<int32_t> bias_tokens;
  std::vector<float> bias_values;
  int32_t logprobs = -1;            // how many of the top; -1: none
  int32_t prompt_logprobs = -1;     // as the client asked; echo with logprobs asks the engine too
  int64_t priority = 0;
  int32_t timeout_ms = 0;
  int32_t speculate = KDT_SPECULATE_AUTO;
  int64_t budget = 0;
  bool spine = false;

  int64_t n_prompts() const noexcept { return kind == RequestKind::chat ? 1 : static_cast<int64_t>(prompts.size()); }
  int64_t n_choices() const noexcept { return n_prompts() * n; }   // of the reply; choice i answers prompt i / n
};

// Options for kdt_request_submit. They borrow from the request and the prompt's ids, which must outlive the submit.
struct ChoiceOptions {
  kdt_request_options options;
  std::vector<const char*> stop;
};

struct TokenizeRequest {
  bool is_chat = false;
  std::string prompt;
  std::string messages_json;
  std::string tools_json;
  int32_t thinking = KDT_THINKING_DEFAULT;
  bool preserve_thinking = false;
};

struct FieldTable;   // openai_fields.h

// The protocol for one served model: every reader validates by one table, which the OpenAPI document is made of too.
// Immutable, so any thread may use it; each call may take milliseconds for a long body.
class Protocol {
 public:
  explicit Protocol(ServedModel model, RequestLimits limits = {});
  ~Protocol();

  // `body`: the JSON text as it came. Throws ApiError.
  GenerationRequest parse_chat(std::string_view body) const;
  GenerationRequest parse_completion(std::string_view body) const;
  TokenizeRequest parse_tokenize(std::string_view body) const;
  std::vector<int32_t> parse_detokenize(std::string_view body) const;

  std::string models_body() const;                            // GET /v1/models
  std::string model_body(std::string_view name) const;        // GET /v1/models/{model}; throws ApiError
  // An OpenAPI 3.1 description of every endpoint; `authenticated`: an API key is asked for.
  std::string openapi_body(std::string_view version, bool authenticated) const;

  const ServedModel& model() const noexcept { return model_; }
  const RequestLimits& limits() const noexcept { return limits_; }

 private:
  ServedModel model_;
  RequestLimits limits_;
  std::unique_ptr<const FieldTable> table_;
};

// The token ids of every prompt, each with its max_tokens inside the context. Throws ApiError.
std::vector<std::vector<int32_t>> encode_prompts(kdt_engine* engine, const GenerationRequest& request);
// The options of choice `choice` (0 to n - 1) of one prompt.
ChoiceOptions choice_options(const GenerationRequest& request, const std::vector<int32_t>& prompt, int64_t choice);

// The bodies of /tokenize and /detokenize: {"count","max_model_len","tokens"} and {"prompt"}. Throw ApiError.
std::string tokenize_body(kdt_engine* engine, const ServedModel& model, const TokenizeRequest& request);
std::string detokenize_body(kdt_engine* engine, const std::vector<int32_t>& ids);

}  // namespace kdt::openai
