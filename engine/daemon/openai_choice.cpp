#include "openai_choice.h"

#include <algorithm>
#include <utility>

namespace kdt::openai {

Choice::Choice(ReplyContext& context, int64_t index) : context_(context), index_(index) {
  if (request().prompt_logprobs >= 0 && index % request().n == 0) prompt_logprobs_ = Json::array();
}

void Choice::take_prompt_token(const kdt_event& event) {
  if (!prompt_logprobs_.is_array()) return;
  prompt_logprobs_.push_back(prompt_logprob(context_.names, event, request().prompt_logprobs));
}

void Choice::take_token(const kdt_event& event) {
  ++n_tokens_;
  if (request().return_token_ids) ids_.push_back(event.token_id);
}

Json Choice::chunk(const char* content, Json value, Json logprobs) {
  Json choice = {
      {"index", index_}, {content, std::move(value)}, {"logprobs", std::move(logprobs)}, {"finish_reason", nullptr}};
  if (request().return_token_ids) choice["token_ids"] = std::exchange(ids_, {});
  return choice;
}

Json Choice::ending(const char* content, Json value) const {
  return {{"index", index_},
          {content, std::move(value)},
          {"logprobs", nullptr},
          {"finish_reason", stopped_ ? "stop" : "length"},
          {"stop_reason", stop_reason_}};
}

void Choice::finish(const kdt_result& result) {
  finished_ = true;
  stopped_ = result.finish_reason == KDT_FINISH_STOP;
  const std::vector<int32_t>& stop_ids = request().stop_token_ids;
  if (result.stop_string && *result.stop_string) {
    stop_reason_ = result.stop_string;
  } else if (std::find(stop_ids.begin(), stop_ids.end(), result.stop_token) != stop_ids.end()) {
    stop_reason_ = result.stop_token;
  }
}

}  // namespace kdt::openai
