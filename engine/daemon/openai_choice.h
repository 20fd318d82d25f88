// One choice of a reply: its events become chunks, or gather into the choice of the body.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "openai_json.h"
#include "openai_logprobs.h"
#include "openai_request.h"
#include "openai_text.h"

namespace kdt::openai {

// What the choices of a reply share. Lives as long as they do.
struct ReplyContext {
  std::shared_ptr<const GenerationRequest> request;
  std::vector<std::vector<int32_t>> prompts;
  const ModelText& text;
  TokenNames names;
};

class Choice {
 public:
  // Choice `index` of the reply, which answers prompt index / n.
  Choice(ReplyContext& context, int64_t index);
  virtual ~Choice() = default;

  // Chunk choices, {"index", "delta" or "text", "logprobs", "finish_reason"}; none unless the reply is streamed.
  virtual std::vector<Json> open() = 0;
  virtual std::vector<Json> take(const kdt_event& event) = 0;
  // The last chunk's choice, after FINISHED.
  virtual Json close() const = 0;
  // The body's choice.
  virtual Json whole() const = 0;

  void finish(const kdt_result& result);
  bool finished() const noexcept { return finished_; }
  int64_t n_tokens() const noexcept { return n_tokens_; }
  int64_t n_reasoning_tokens() const noexcept { return n_reasoning_tokens_; }
  const std::vector<int32_t>& prompt() const { return context_.prompts[static_cast<size_t>(index_ / request().n)]; }
  const Json& prompt_logprobs() const noexcept { return prompt_logprobs_; }

 protected:
  const GenerationRequest& request() const noexcept { return *context_.request; }
  bool wants_logprobs() const noexcept { return request().logprobs >= 0; }
  void take_prompt_token(const kdt_event& event);
  void take_token(const kdt_event& event);
  // `content`: "delta" or "text" with its value. Ids that were not sent yet go with it.
  Json chunk(const char* content, Json value, Json logprobs);
  Json ending(const char* content, Json value) const;

  ReplyContext& context_;
  int64_t index_;
  int64_t n_tokens_ = 0;
  int64_t n_reasoning_tokens_ = 0;
  std::vector<int32_t> ids_;        // all of the choice, or of the next chunk; kept only when they are asked for
  Json prompt_logprobs_ = nullptr;  // an array, of the first choice of each prompt, when it is asked for
  bool finished_ = false;
  bool stopped_ = false;        // finish reason stop, else length
  Json stop_reason_ = nullptr;  // the stop string or id of the request that ended it
};

std::unique_ptr<Choice> make_chat_choice(ReplyContext& context, int64_t index);
std::unique_ptr<Choice> make_completion_choice(ReplyContext& context, int64_t index);

}  // namespace kdt::openai
