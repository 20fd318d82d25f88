// The one error idiom of the engine: exceptions inside, kdt_status at the C ABI.
//
// Every message reads `<field or file>: <value>: expected <what>`, so that a user can act on it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace kdt {

// The values of kdt_status in kdtree.h; a test compares the two lists.
enum class Status : int32_t {
  ok = 0,
  invalid_argument = -1,   // a setting or an input of the caller is out of its range
  bad_file = -2,           // a file of the checkpoint is malformed or does not fit its config
  io = -3,                 // a file could not be opened or read
  out_of_memory = -4,
  context_length = -5,     // prompt + max_tokens do not fit the context
  unsupported = -6,        // well-formed, but something this engine does not implement
  cancelled = -7,
  timeout = -8,            // nothing happened within the time given
  buffer_too_small = -9,   // the needed size is reported beside it
  engine_failed = -10,     // the engine hit an error of its own and takes no more requests
  internal = -11,
  queue_full = -12,        // as many requests wait as may
  shutting_down = -13,     // the engine takes nothing new
};

class Error : public std::runtime_error {
 public:
  Error(Status status, std::string_view subject, std::string_view value, std::string_view expected);
  Error(Status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  Status status() const noexcept { return status_; }

 private:
  Status status_;
};

// `subject: value: expected what`. Long or unprintable values are shortened and escaped.
[[noreturn]] void fail(Status status, std::string_view subject, std::string_view value, std::string_view expected);

inline void check_argument(bool good, std::string_view subject, std::string_view value, std::string_view expected) {
  if (!good) fail(Status::invalid_argument, subject, value, expected);
}

// Printable, one line, at most `limit` bytes: what comes from a file or a client may be hostile.
std::string printable(std::string_view value, size_t limit = 80);

}  // namespace kdt
