#include "failure.h"

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

std::string message(std::string_view field, std::string_view value, std::string_view expected) {
  return std::string(field) + ": " + printable(value) + ": expected " + std::string(expected);
}

}  // namespace

void fail_usage(std::string_view field, std::string_view value, std::string_view expected) {
  throw Failure(kExitUsage, message(field, value, expected));
}

void fail_run(std::string_view field, std::string_view value, std::string_view expected) {
  throw Failure(kExitFailed, message(field, value, expected));
}

}  // namespace kdt
