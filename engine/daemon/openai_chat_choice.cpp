// A chat's choice: the assistant's turn as content, reasoning and tool calls.
#include <utility>

#include "openai_choice.h"

namespace kdt::openai {
namespace {

struct ToolCall {
  std::string id, name, arguments;
};

Json delta_of(const Part& part) {
  switch (part.kind) {
    case KDT_PART_REASONING:
      return {{"reasoning_content", part.text}};
    case KDT_PART_TOOL_BEGIN:
      return {{"tool_calls", Json::array({{{"index", part.tool_index},
                                           {"id", part.id},
                                           {"type", "function"},
                                           {"function", {{"name", part.name}, {"arguments", ""}}}}})}};
    case KDT_PART_TOOL_ARGUMENTS:
      return {{"tool_calls", Json::array({{{"index", part.tool_index}, {"function", {{"arguments", part.text}}}}})}};
    default:
      return {{"content", part.text}};
  }
}

class ChatChoice final : public Choice {
 public:
  ChatChoice(ReplyContext& context, int64_t index)
      : Choice(context, index), reader_(context.text.read_turn(request().thinking, !request().tools_json.empty())) {}

  std::vector<Json> open() override {
    if (!request().stream) return {};
    return {chunk("delta", {{"role", "assistant"}, {"content", ""}}, nullptr)};
  }

  std::vector<Json> take(const kdt_event& event) override {
    if (event.kind == KDT_EVENT_PROMPT_TOKEN) {
      take_prompt_token(event);
      return {};
    }
    std::vector<Part> parts;
    Json logprob = nullptr;
    if (event.kind == KDT_EVENT_TOKEN) {
      take_token(event);
      ++n_undecided_;
      if (wants_logprobs()) logprob = chat_logprob(context_.names, event, request().logprobs);
    }
    if (event.kind == KDT_EVENT_TOKEN || event.text_bytes > 0) {
      parts = reader_->push(event.token_id, {event.text, static_cast<size_t>(event.text_bytes)});
    }
    if (event.kind == KDT_EVENT_FINISHED) {
      for (Part& part : reader_->finish()) parts.push_back(std::move(part));
    }
    for (const Part& part : parts) count(part);
    if (request().stream) return chunks(parts, std::move(logprob));
    if (!logprob.is_null()) logprobs_.push_back(std::move(logprob));
    for (Part& part : parts) gather(std::move(part));
    return {};
  }

  Json close() const override { return with_reason(ending("delta", Json::object())); }

  Json whole() const override {
    Json message = {{"role", "assistant"}, {"content", content_}, {"refusal", nullptr}};
    if (content_.empty() && n_calls_ > 0) message["content"] = nullptr;
    if (!reasoning_.empty()) message["reasoning_content"] = reasoning_;
    if (n_calls_ > 0) {
      Json calls = Json::array();
      for (const ToolCall& call : calls_) {
        calls.push_back({{"id", call.id},
                         {"type", "function"},
                         {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
      }
      message["tool_calls"] = std::move(calls);
    }
    Json choice = with_reason(ending("message", std::move(message)));
    if (wants_logprobs()) choice["logprobs"] = {{"content", logprobs_}, {"refusal", nullptr}};
    if (request().return_token_ids) choice["token_ids"] = ids_;
    return choice;
  }

 private:
  // A token that yields nothing yet counts as what the next part is.
  void count(const Part& part) {
    const int64_t n = std::exchange(n_undecided_, 0);
    if (part.kind == KDT_PART_REASONING) n_reasoning_tokens_ += n;
    if (part.kind == KDT_PART_TOOL_BEGIN) ++n_calls_;
  }

  // A chunk for each part; the token's log-probability and id go with the first, or alone.
  std::vector<Json> chunks(const std::vector<Part>& parts, Json logprob) {
    Json logprobs = nullptr;
    if (!logprob.is_null()) logprobs = {{"content", Json::array({std::move(logprob)})}, {"refusal", nullptr}};
    std::vector<Json> out;
    for (const Part& part : parts) out.push_back(chunk("delta", delta_of(part), std::exchange(logprobs, nullptr)));
    if (!logprobs.is_null() || !ids_.empty()) out.push_back(chunk("delta", Json::object(), std::move(logprobs)));
    return out;
  }

  void gather(Part part) {
    switch (part.kind) {
      case KDT_PART_REASONING:
        reasoning_ += part.text;
        break;
      case KDT_PART_TOOL_BEGIN:
        calls_.push_back({std::move(part.id), std::move(part.name), {}});
        break;
      case KDT_PART_TOOL_ARGUMENTS:
        if (!calls_.empty()) calls_.back().arguments += part.text;
        break;
      default:
        content_ += part.text;
    }
  }

  Json with_reason(Json choice) const {
    if (stopped_ && n_calls_ > 0) choice["finish_reason"] = "tool_calls";
    return choice;
  }

  std::unique_ptr<TurnReader> reader_;
  int64_t n_undecided_ = 0;
  int64_t n_calls_ = 0;
  // Of a reply that is not streamed.
  std::string content_, reasoning_;
  std::vector<ToolCall> calls_;
  Json logprobs_ = Json::array();
};

}  // namespace

std::unique_ptr<Choice> make_chat_choice(ReplyContext& context, int64_t index) {
  return std::make_unique<ChatChoice>(context, index);
}

}  // namespace kdt::openai
