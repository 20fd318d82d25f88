#include "text/utf8_stream.h"

#include <algorithm>
#include <cstdint>

namespace kdt {
namespace {

enum class Form { character, ill_formed, incomplete };

// The character at the front of `text`, or the maximal part of one (at least a byte): what one U+FFFD stands for.
struct Part {
  Form form;
  size_t size;
};

Part front_part(std::string_view text) {
  auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  unsigned char lead = byte(0);
  if (lead < 0x80) return {Form::character, 1};
  if (lead < 0xc2 || lead > 0xf4) return {Form::ill_formed, 1};
  size_t size = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  // Only the second byte's range depends on the lead: no overlong forms, no surrogates, nothing past U+10FFFF.
  unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  for (size_t i = 1; i < size; i++) {
    if (i == text.size()) return {Form::incomplete, i};
    if (byte(i) < low || byte(i) > high) return {Form::ill_formed, i};
    low = 0x80;
    high = 0xbf;
  }
  return {Form::character, size};
}

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

}  // namespace

std::string Utf8Stream::push(std::string_view bytes) {
  std::string joined = std::move(held_);
  held_.clear();
  joined += bytes;
  std::string out;
  out.reserve(joined.size());
  std::string_view rest = joined;
  while (!rest.empty()) {
    Part part = front_part(rest);
    if (part.form == Form::incomplete) {
      held_ = rest;
      break;
    }
    out += part.form == Form::character ? rest.substr(0, part.size) : kReplacement;
    rest.remove_prefix(part.size);
  }
  return out;
}

std::string Utf8Stream::flush() {
  if (held_.empty()) return {};
  held_.clear();
  return std::string(kReplacement);
}

size_t find_invalid_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    Part part = front_part(text.substr(at));
    if (part.form != Form::character) return at;
    at += part.size;
  }
  return std::string_view::npos;
}

}  // namespace kdt
