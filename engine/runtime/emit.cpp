#include "runtime/emit.h"

#include <algorithm>

namespace kdt {

Emitter::Emitter(Request& request, const Tokenizer& tokenizer, std::span<const int32_t> stop_ids)
    : request_(request), tokenizer_(tokenizer), stop_ids_(stop_ids) {}

Finish Emitter::push(std::span<const int32_t> tokens) {
  Finish finish = Finish::none;
  for (const int32_t token : tokens) {
    const bool stop = std::find(stop_ids_.begin(), stop_ids_.end(), token) != stop_ids_.end();
    if (stop && !request_.settings().ignore_eos) {
      finish = Finish::stop;
      break;
    }
    events_.push_back({false, token, characters_.push(tokenizer_.bytes(token))});
    if (++emitted_ >= request_.settings().max_tokens) {
      finish = Finish::length;
      break;
    }
  }
  if (!events_.empty()) request_.push(events_);
  return finish;
}

}  // namespace kdt
