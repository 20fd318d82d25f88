// Committed tokens become events: stop ids end the text, characters are handed out whole.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/request.h"
#include "text/tokenizer.h"
#include "text/utf8_stream.h"

namespace kdt {

class Emitter {
 public:
  // `stop_ids` are honoured unless the request ignores them.
  Emitter(Request& request, const Tokenizer& tokenizer, std::span<const int32_t> stop_ids);

  // Queues events for these tokens; returns the finish reason once the text has ended (later tokens are dropped).
  Finish push(std::span<const int32_t> tokens);
  int64_t emitted() const { return emitted_; }
  std::string flush() { return characters_.flush(); }

 private:
  Request& request_;
  const Tokenizer& tokenizer_;
  std::span<const int32_t> stop_ids_;
  Utf8Stream characters_;
  int64_t emitted_ = 0;
  std::vector<Event> events_;
};

}  // namespace kdt
