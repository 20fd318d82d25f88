// Turns the bytes of a token stream into whole UTF-8 characters.
//
// A character may be spread over several tokens: its bytes are held back until it is complete. Bytes that cannot become a
// character yield one U+FFFD each maximal ill-formed part, as Unicode recommends (and as Python's errors="replace" does).
#pragma once

#include <string>
#include <string_view>

namespace kdt {

class Utf8Stream {
 public:
  // The characters that are complete after these bytes.
  std::string push(std::string_view bytes);
  // What was held back, as U+FFFD: the stream ended inside a character.
  std::string flush();

 private:
  std::string held_;   // at most 3 bytes: a valid but incomplete prefix
};

// Offset of the first byte that is not valid UTF-8, or npos.
size_t find_invalid_utf8(std::string_view text);

}  // namespace kdt
