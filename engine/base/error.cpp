#include "base/error.h"

#include <cstdio>

namespace kdt {

std::string printable(std::string_view value, size_t limit) {
  std::string out;
  for (unsigned char c : value) {
    if (out.size() >= limit) return out + "…";
    if (c >= 0x20 && c != 0x7f) {
      out += static_cast<char>(c);
    } else {
      char hex[5];
      std::snprintf(hex, sizeof hex, "\\x%02x", c);
      out += hex;
    }
  }
  return out;
}

Error::Error(Status status, std::string_view subject, std::string_view value, std::string_view expected)
    : std::runtime_error(printable(subject, 400) + ": " + printable(value) + ": expected " + std::string(expected)),
      status_(status) {}

void fail(Status status, std::string_view subject, std::string_view value, std::string_view expected) {
  throw Error(status, subject, value, expected);
}

}  // namespace kdt
