#include "runtime/emit.h"

#include <algorithm>

namespace kdt {

namespace {

void set_logprobs(Event& event, const Logprobs& logprobs, size_t index) {
  if (index >= logprobs.logprob.size()) return;
  const auto n_top = static_cast<size_t>(logprobs.n_top), at = index * n_top;
  event.logprob = logprobs.logprob[index];
  const auto tokens = logprobs.top_token.subspan(at, n_top);
  const auto values = logprobs.top_logprob.subspan(at, n_top);
  event.top_tokens.assign(tokens.begin(), tokens.end());
  event.top_logprobs.assign(values.begin(), values.end());
}

}  // namespace

Emitter::Emitter(Request& request, const Tokenizer& tokenizer, std::span<const int32_t> stop_ids)
    : request_(request), tokenizer_(tokenizer), stop_ids_(stop_ids), stop_strings_(request.settings().stop) {}

bool Emitter::is_stop(int32_t token) const {
  const RequestSettings& s = request_.settings();
  const auto among = [token](std::span<const int32_t> ids) { return std::find(ids.begin(), ids.end(), token) != ids.end(); };
  return (!s.ignore_eos && among(stop_ids_)) || among(s.stop_tokens);
}

void Emitter::add(int32_t token, const Logprobs& logprobs, size_t index) {
  Held held;
  held.event.token = token;
  const bool skipped = request_.settings().skip_special_tokens && tokenizer_.is_special(token);
  held.event.text = skipped ? characters_.flush() : characters_.push(tokenizer_.bytes(token));
  set_logprobs(held.event, logprobs, index);
  text_bytes_ += static_cast<int64_t>(held.event.text.size());
  held.end = text_bytes_;
  held_.push_back(std::move(held));
}

void Emitter::release(int64_t safe) {
  for (; !held_.empty() && held_.front().end <= safe; held_.pop_front()) {
    events_.push_back(std::move(held_.front().event));
    ++emitted_;
  }
}

// The text ends at match.begin: a token that begins before it keeps the text up to there, the others are dropped.
void Emitter::cut(const StopMatch& match) {
  release(match.begin);
  if (!held_.empty()) {
    Held& held = held_.front();
    const int64_t begin = held.end - static_cast<int64_t>(held.event.text.size());
    if (begin < match.begin) {
      held.event.text.resize(static_cast<size_t>(match.begin - begin));
      events_.push_back(std::move(held.event));
      ++emitted_;
    }
  }
  held_.clear();
  stop_string_ = request_.settings().stop[static_cast<size_t>(match.index)];
}

Finish Emitter::push(std::span<const int32_t> tokens, const Logprobs& logprobs) {
  const RequestSettings& s = request_.settings();
  Finish finish = Finish::none;
  for (size_t i = 0; i < tokens.size() && finish == Finish::none; ++i) {
    const int32_t token = tokens[i];
    // Before min_tokens the stop ids are banned, but for a token that was certain.
    if (is_stop(token) && generated_ >= s.min_tokens) {
      stop_token_ = token;
      finish = Finish::stop;
      break;
    }
    ++generated_;
    add(token, logprobs, i);
    if (!s.stop.empty()) {
      const std::string& text = held_.back().event.text;
      const auto match = tokenizer_.is_special(token) ? stop_strings_.interrupt(static_cast<int64_t>(text.size()))
                                                      : stop_strings_.push(text, generated_ >= s.min_tokens);
      if (match) {
        cut(*match);
        finish = Finish::stop;
        break;
      }
    }
    // Text of a character still incomplete waits too: a token without text of its own goes with those before it.
    release(s.stop.empty() ? text_bytes_ : stop_strings_.safe());
    if (generated_ >= s.max_tokens) finish = Finish::length;
  }
  send();
  return finish;
}

void Emitter::push_prompt(std::span<const int32_t> tokens, const Logprobs& logprobs) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    Event event;
    event.kind = EventKind::prompt_token;
    event.token = tokens[i];
    event.text = prompt_characters_.push(tokenizer_.bytes(tokens[i]));
    set_logprobs(event, logprobs, i);
    events_.push_back(std::move(event));
  }
  send();
}

std::string Emitter::flush() {
  if (stop_string_.empty() && !request_.settings().stop.empty()) {
    if (const auto match = stop_strings_.interrupt()) cut(*match);
  }
  release(text_bytes_);
  send();
  return stop_string_.empty() ? characters_.flush() : std::string();
}

void Emitter::send() {
  if (!events_.empty()) request_.push(events_);
}

}  // namespace kdt
