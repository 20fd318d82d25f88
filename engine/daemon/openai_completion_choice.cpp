// A completion's choice: text, the prompt before it when it is to be echoed.
#include <utility>

#include "openai_choice.h"
#include "openai_utf8.h"

namespace kdt::openai {
namespace {

class CompletionChoice final : public Choice {
 public:
  CompletionChoice(ReplyContext& context, int64_t index) : Choice(context, index), echo_waits_(request().echo) {}

  std::vector<Json> open() override {
    // With log-probabilities the prompt's come first, and its text goes with them.
    if (!request().stream || !echo_waits_ || wants_logprobs()) return {};
    return {echoed()};
  }

  std::vector<Json> take(const kdt_event& event) override {
    const std::string_view text(event.text, static_cast<size_t>(event.text_bytes));
    if (event.kind == KDT_EVENT_PROMPT_TOKEN) {
      take_prompt_token(event);
      if (request().echo && wants_logprobs()) {
        logprobs_.add(context_.names, event, request().logprobs, prompt_characters_);
        prompt_characters_ += count_characters(text);
      }
      return {};
    }
    std::vector<Json> out;
    if (request().stream && echo_waits_) out.push_back(echoed());
    if (!request().stream && std::exchange(echo_waits_, false)) append(prompt_text());
    if (event.kind == KDT_EVENT_TOKEN) {
      take_token(event);
      if (wants_logprobs()) logprobs_.add(context_.names, event, request().logprobs, n_characters_);
    }
    if (!request().stream) {
      append(text);
    } else {
      n_characters_ += count_characters(text);
      if (!text.empty() || !logprobs_.empty() || !ids_.empty()) out.push_back(text_chunk(text));
    }
    return out;
  }

  Json close() const override { return ending("text", ""); }

  Json whole() const override {
    Json choice = ending("text", text_);
    if (wants_logprobs()) choice["logprobs"] = CompletionLogprobs(logprobs_).take();
    if (prompt_logprobs_.is_array()) choice["prompt_logprobs"] = prompt_logprobs_;
    if (request().return_token_ids) {
      choice["token_ids"] = ids_;
      choice["prompt_token_ids"] = prompt();
    }
    return choice;
  }

 private:
  std::string prompt_text() const {
    const Prompt& asked = request().prompts[static_cast<size_t>(index_ / request().n)];
    return asked.is_text ? asked.text : mended_utf8(context_.text.bytes(asked.ids));
  }

  void append(std::string_view text) {
    text_ += text;
    n_characters_ += count_characters(text);
  }

  Json text_chunk(std::string_view text) {
    Json choice = chunk("text", std::string(text), logprobs_.empty() ? Json() : logprobs_.take());
    if (request().return_token_ids && std::exchange(first_, false)) choice["prompt_token_ids"] = prompt();
    return choice;
  }

  Json echoed() {
    echo_waits_ = false;
    const std::string text = prompt_text();
    n_characters_ += count_characters(text);
    return text_chunk(text);
  }

  bool echo_waits_;
  bool first_ = true;              // no chunk was made yet
  int64_t n_characters_ = 0;       // of the text so far, the echoed prompt's included
  int64_t prompt_characters_ = 0;  // of the prompt's tokens so far
  CompletionLogprobs logprobs_;    // of the choice, or of the next chunk
  std::string text_;               // of a reply that is not streamed
};

}  // namespace

std::unique_ptr<Choice> make_completion_choice(ReplyContext& context, int64_t index) {
  return std::make_unique<CompletionChoice>(context, index);
}

}  // namespace kdt::openai
