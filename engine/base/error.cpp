#include "base/error.h"

#include <cstdio>

namespace kdt {

namespace {

// Bytes of the well-formed UTF-8 character at the front of `text`; 0 when there is none.
size_t character_length(std::string_view text) {
  const auto at = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const auto tail = [&](size_t from, size_t to) {
    for (size_t i = from; i < to; ++i)
      if ((at(i) & 0xc0) != 0x80) return false;
    return true;
  };
  const unsigned lead = at(0), second = at(1);
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) return tail(1, 2) ? 2 : 0;
  if (lead >= 0xe0 && lead <= 0xef) {
    const bool good = (lead != 0xe0 || second >= 0xa0) && (lead != 0xed || second <= 0x9f);
    return good && tail(1, 3) ? 3 : 0;
  }
  if (lead >= 0xf0 && lead <= 0xf4) {
    const bool good = (lead != 0xf0 || second >= 0x90) && (lead != 0xf4 || second <= 0x8f);
    return good && tail(1, 4) ? 4 : 0;
  }
  return 0;
}

}  // namespace

std::string printable(std::string_view value, size_t limit) {
  std::string out;
  while (!value.empty()) {
    if (out.size() >= limit) return out + "…";
    const auto c = static_cast<unsigned char>(value.front());
    const size_t length = character_length(value);
    if (length > 0 && c >= 0x20 && c != 0x7f) {
      out += value.substr(0, length);
    } else {
      char hex[5];
      std::snprintf(hex, sizeof hex, "\\x%02x", c);
      out += hex;
    }
    value.remove_prefix(length > 0 ? length : 1);
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
