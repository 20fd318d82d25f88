// Committed tokens become events: stop ids and stop strings end the text, characters are handed out whole.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "runtime/request.h"
#include "runtime/round.h"
#include "text/stop_strings.h"
#include "text/tokenizer.h"
#include "text/utf8_stream.h"

namespace kdt {

// One request's output. A token is held back, its text, id and log-probability together, while its text may be part of a
// stop string; tokens that lie wholly inside the one that ended the text are never handed out. Special tokens belong to no
// stop string.
class Emitter {
 public:
  // `stop_ids`: the model's own, honoured unless the request ignores them.
  Emitter(Request& request, const Tokenizer& tokenizer, std::span<const int32_t> stop_ids);

  // Queues events for these tokens; returns the finish reason once the text has ended (later tokens are dropped).
  Finish push(std::span<const int32_t> tokens, const Logprobs& logprobs);
  // Queues events for prompt tokens from `first` on; `logprobs` are of those past the first, which has none.
  void push_prompt(std::span<const int32_t> tokens, const Logprobs& logprobs);
  // Once, at the end, whatever ended it: queues the tokens still held and returns the text that belongs to no token.
  std::string flush();

  int64_t generated() const { return generated_; }   // committed, the held ones included: what max_tokens counts
  int64_t emitted() const { return emitted_; }       // handed out
  int32_t stop_token() const { return stop_token_; }
  const std::string& stop_string() const { return stop_string_; }

 private:
  bool is_stop(int32_t token) const;
  void add(int32_t token, const Logprobs& logprobs, size_t index);
  void release(int64_t safe);                        // hands out held tokens whose text ends at or before `safe`
  void cut(const StopMatch& match);
  void send();

  Request& request_;
  const Tokenizer& tokenizer_;
  std::span<const int32_t> stop_ids_;
  Utf8Stream characters_, prompt_characters_;
  StopStrings stop_strings_;
  struct Held {
    Event event;
    int64_t end;                                     // of its text, in bytes from the start of the output
  };
  std::deque<Held> held_;
  int64_t text_bytes_ = 0;                           // of the output, the held text included
  int64_t generated_ = 0, emitted_ = 0;
  int32_t stop_token_ = -1;
  std::string stop_string_;
  std::vector<Event> events_;
};

}  // namespace kdt
