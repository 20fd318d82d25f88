#include "openai_response.h"

#include <chrono>
#include <random>
#include <utility>

#include "openai_choice.h"
#include "openai_usage.h"

namespace kdt::openai {
namespace {

std::string random_id(const char* prefix) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::random_device random;
  std::string id = prefix;
  for (int word = 0; word < 4; ++word) {
    uint32_t bits = random();
    for (int digit = 0; digit < 8; ++digit, bits >>= 4) id += kHex[bits & 15];
  }
  return id;
}

int64_t unix_seconds() {
  using namespace std::chrono;
  return duration_cast<seconds>(system_clock::now().time_since_epoch()).count();
}

ApiError failure_of(const kdt_result& result, const GenerationRequest& request) {
  if (result.finish_reason == KDT_FINISH_ERROR)
    return from_status(KDT_ERR_ENGINE_FAILED, result.error ? result.error : "");
  if (request.timeout_ms > 0 && result.total_ms >= request.timeout_ms) {
    return ApiError(408, "timeout",
                    "The request ran past its timeout of " + std::to_string(request.timeout_ms) + " ms.", "timeout");
  }
  return ApiError(503, "cancelled", "The request was cancelled before it was complete.");
}

}  // namespace

struct Reply::State {
  State(std::shared_ptr<const GenerationRequest> asked, std::vector<std::vector<int32_t>> prompts,
        const ModelText& text)
      : context{asked, std::move(prompts), text, TokenNames(text, asked->tokens_as_ids)},
        request(*asked),
        is_chat(asked->kind == RequestKind::chat),
        id(random_id(is_chat ? "chatcmpl-" : "cmpl-")),
        created(unix_seconds()) {
    for (const auto& prompt : context.prompts) prompt_tokens += static_cast<int64_t>(prompt.size());
    for (int64_t i = 0; i < request.n_choices(); ++i) {
      choices.push_back(is_chat ? make_chat_choice(context, i) : make_completion_choice(context, i));
    }
  }

  Json envelope(const char* object, Json choices_json) const {
    return {{"id", id},
            {"object", object},
            {"created", created},
            {"model", request.model},
            {"choices", std::move(choices_json)},
            {"system_fingerprint", std::string("kdtree-") + kdt_version()}};
  }

  Json chunk(Json choice) const {
    Json choices_json = Json::array();
    if (!choice.is_null()) choices_json.push_back(std::move(choice));
    Json out = envelope(is_chat ? "chat.completion.chunk" : "text_completion", std::move(choices_json));
    if (request.include_usage) out["usage"] = nullptr;
    if (request.continuous_usage) out["usage"] = usage_json(prompt_tokens, completion_tokens());
    return out;
  }

  int64_t completion_tokens() const {
    int64_t n = 0;
    for (const auto& choice : choices) n += choice->n_tokens();
    return n;
  }

  Json usage() const {
    int64_t reasoning = 0;
    for (const auto& choice : choices) reasoning += choice->n_reasoning_tokens();
    return usage_json(prompt_tokens, completion_tokens(), cached_tokens, reasoning);
  }

  void send(std::vector<Json> chunks, Payloads& out) const {
    for (Json& choice : chunks) out.push_back(write_json(chunk(std::move(choice))));
  }

  ReplyContext context;
  const GenerationRequest& request;
  bool is_chat;
  std::string id;
  int64_t created;
  std::vector<std::unique_ptr<Choice>> choices;
  size_t n_finished = 0;
  std::optional<ApiError> failure;
  SpeculationFigures figures;
  int64_t prompt_tokens = 0;  // of each prompt once
  int64_t cached_tokens = 0;
};

Reply::Reply(std::shared_ptr<const GenerationRequest> request, std::vector<std::vector<int32_t>> prompts,
             const ModelText& text)
    : state_(std::make_unique<State>(std::move(request), std::move(prompts), text)) {}

Reply::~Reply() = default;

void Reply::begin(Payloads& out) {
  State& s = *state_;
  for (size_t i = 0; i < s.choices.size(); ++i) {
    for (Json& choice : s.choices[i]->open()) {
      Json chunk = s.chunk(std::move(choice));
      if (s.is_chat && s.request.return_token_ids) chunk["prompt_token_ids"] = s.context.prompts.front();
      out.push_back(write_json(chunk));
    }
  }
}

void Reply::event(int64_t choice, const kdt_event& event, Payloads& out) {
  if (!done()) state_->send(state_->choices[static_cast<size_t>(choice)]->take(event), out);
}

void Reply::finish(int64_t index, const kdt_result& result, Payloads& out) {
  State& s = *state_;
  if (done()) return;
  if (result.finish_reason != KDT_FINISH_STOP && result.finish_reason != KDT_FINISH_LENGTH) {
    return fail(failure_of(result, s.request), out);
  }
  Choice& choice = *s.choices[static_cast<size_t>(index)];
  choice.finish(result);
  s.figures.add(result);
  if (index % s.request.n == 0) s.cached_tokens += result.cached_tokens;
  ++s.n_finished;
  if (!s.request.stream) return;
  Json last = s.chunk(choice.close());
  SpeculationFigures figures;
  figures.add(result);
  last["kdtree"] = figures.json(s.request);
  out.push_back(write_json(last));
  if (done() && s.request.include_usage) {
    Json chunk = s.chunk(nullptr);
    chunk["usage"] = s.usage();
    out.push_back(write_json(chunk));
  }
}

void Reply::fail(const ApiError& error, Payloads& out) {
  if (done()) return;
  state_->failure = error;
  if (state_->request.stream) out.push_back(error.body());
}

bool Reply::done() const noexcept { return state_->failure || state_->n_finished == state_->choices.size(); }

const std::optional<ApiError>& Reply::failure() const noexcept { return state_->failure; }

std::string Reply::body() const {
  const State& s = *state_;
  Json choices = Json::array();
  for (const auto& choice : s.choices) choices.push_back(choice->whole());
  Json out = s.envelope(s.is_chat ? "chat.completion" : "text_completion", std::move(choices));
  out["usage"] = s.usage();
  if (s.is_chat && s.request.return_token_ids) out["prompt_token_ids"] = s.context.prompts.front();
  if (s.is_chat && s.request.prompt_logprobs >= 0) out["prompt_logprobs"] = s.choices.front()->prompt_logprobs();
  out["kdtree"] = s.figures.json(s.request);
  return write_json(out);
}

const std::string& Reply::id() const noexcept { return state_->id; }
int64_t Reply::prompt_tokens() const noexcept { return state_->prompt_tokens; }
int64_t Reply::completion_tokens() const noexcept { return state_->completion_tokens(); }

}  // namespace kdt::openai
