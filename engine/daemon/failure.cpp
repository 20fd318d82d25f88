#include "failure.h"

#include <iostream>

namespace kdt {
namespace {

constexpr size_t kLongestValue = 80;

// Values come from users, the environment and files: kept to one printable line of bounded length.
std::string printable(std::string_view value) {
  if (value.empty()) return "empty";
  std::string out;
  for (const char c : value.substr(0, kLongestValue)) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 0x20 || byte == 0x7f ? '?' : c;
  }
  if (value.size() > kLongestValue) {
    // A cut inside a UTF-8 character would print as garbage: back to the character's start.
    size_t end = out.size();
    while (end > 0 && (static_cast<unsigned char>(value[end]) & 0xc0) == 0x80) --end;
    out.resize(end);
    out += "...";
  }
  return out;
}

// Length of the UTF-8 character that starts at `at`; 0 when there is none. Continuation bytes are checked, overlong
// forms are not: terminals cope with those.
size_t character_length(std::string_view text, size_t at) {
  const auto lead = static_cast<unsigned char>(text[at]);
  const size_t length = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
  if (length > text.size() - at) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((static_cast<unsigned char>(text[at + i]) & 0xc0) != 0x80) return 0;
  }
  return length;
}

std::string message(std::string_view field, std::string_view value, std::string_view expected) {
  return std::string(field) + ": " + printable(value) + ": expected " + std::string(expected);
}

void print_line(std::string line, std::string_view message) {
  for (size_t at = 0; at < message.size();) {
    const size_t length = character_length(message, at);
    line += length > 0 ? message.substr(at, length) : "?";
    at += length > 0 ? length : 1;
  }
  std::cerr << line + "\n" << std::flush;   // one write: processes of a job share the terminal
}

}  // namespace

void fail_usage(std::string_view field, std::string_view value, std::string_view expected) {
  throw Failure(kExitUsage, message(field, value, expected));
}

void fail_run(std::string_view field, std::string_view value, std::string_view expected) {
  throw Failure(kExitFailed, message(field, value, expected));
}

void print_error(std::string_view message) { print_line("error: ", message); }
void print_warning(std::string_view message) { print_line("warning: ", message); }

}  // namespace kdt
