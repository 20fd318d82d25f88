#include "text/json_text.h"

#include <charconv>
#include <cmath>

namespace kdt {
namespace {

using nlohmann::ordered_json;

// Looks at brackets, commas and strings alone, so that a hostile text is refused before anything is built from it.
const char* broken_limit(std::string_view text) {
  struct {
    bool object;
    int n_commas;
  } open[kMaxJsonDepth];
  int depth = 0;
  for (size_t i = 0; i < text.size(); i++) {
    switch (text[i]) {
      case '"':
        for (i++; i < text.size() && text[i] != '"'; i++) {
          if (text[i] == '\\') i++;
        }
        break;
      case '{':
      case '[':
        if (depth == kMaxJsonDepth) return "nesting of at most 64 levels";
        open[depth++] = {text[i] == '{', 0};
        break;
      case '}':
      case ']':
        if (depth > 0) depth--;
        break;
      case ',':
        if (depth > 0 && open[depth - 1].object && ++open[depth - 1].n_commas >= kMaxJsonMembers) {
          return "objects of at most 1024 members";
        }
        break;
    }
  }
  return nullptr;
}

void append(const ordered_json& value, std::string_view item_separator, std::string_view key_separator,
            std::string& out) {
  bool first = true;
  auto separate = [&] {
    if (!first) out += item_separator;
    first = false;
  };
  if (value.is_object()) {
    out += '{';
    for (const auto& [key, member] : value.items()) {
      separate();
      out += ordered_json(key).dump();
      out += key_separator;
      append(member, item_separator, key_separator, out);
    }
    out += '}';
  } else if (value.is_array()) {
    out += '[';
    for (const ordered_json& member : value) {
      separate();
      append(member, item_separator, key_separator, out);
    }
    out += ']';
  } else if (value.is_number_float()) {
    out += python_float(value.get<double>());
  } else {
    out += value.dump();
  }
}

}  // namespace

ordered_json parse_json(std::string_view text, const std::string& subject, Status status, uint64_t max_bytes) {
  if (text.size() > max_bytes) {
    fail(status, subject, std::to_string(text.size()) + " bytes", "at most " + std::to_string(max_bytes) + " bytes");
  }
  // The parser takes a NUL for the end of the text.
  if (text.find('\0') != std::string_view::npos) fail(status, subject, "a NUL byte", "JSON text");
  if (const char* limit = broken_limit(text)) fail(status, subject, text, limit);
  try {
    return ordered_json::parse(text);
  } catch (const ordered_json::exception&) {
    fail(status, subject, text, "JSON in UTF-8");
  }
}

std::string dump_json(const ordered_json& value, std::string_view item_separator, std::string_view key_separator) {
  std::string out;
  append(value, item_separator, key_separator, out);
  return out;
}

std::string python_float(double value) {
  char buffer[32];
  auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific);
  std::string_view text(buffer, static_cast<size_t>(end - buffer));
  size_t e = text.find('e');
  int exponent = 0;
  std::from_chars(text.data() + e + 1 + (text[e + 1] == '+'), end, exponent);
  if (exponent < -4 || exponent >= 16) return std::string(text);

  std::string out = value < 0 || std::signbit(value) ? "-" : "";
  std::string digits;
  for (char c : text.substr(0, e)) {
    if (c >= '0' && c <= '9') digits += c;
  }
  if (exponent < 0) return out + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  size_t whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) digits.append(whole + 1 - digits.size(), '0');
  return out + digits.substr(0, whole) + "." + digits.substr(whole);
}

}  // namespace kdt
