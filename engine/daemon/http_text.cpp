#include "http_text.h"

namespace kdt {

std::string lower_case(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return out;
}

bool is_json(std::string_view content_type) {
  std::string media_type = lower_case(content_type.substr(0, content_type.find(';')));
  media_type.erase(media_type.find_last_not_of(' ') + 1);
  return media_type == "application/json";
}

std::optional<std::string> percent_decoded(std::string_view text) {
  const auto digit = [](char c) {
    if (c >= '0' && c <= '9') return c - '0';
    const int letter = c | 0x20;
    return letter >= 'a' && letter <= 'f' ? letter - 'a' + 10 : -1;
  };
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    if (i + 2 >= text.size() || digit(text[i + 1]) < 0 || digit(text[i + 2]) < 0) return std::nullopt;
    out += static_cast<char>(digit(text[i + 1]) * 16 + digit(text[i + 2]));
    i += 2;
  }
  return out;
}

std::string host_of(std::string_view origin) {
  const size_t scheme = origin.find("://");
  if (scheme != std::string_view::npos) origin.remove_prefix(scheme + 3);
  const size_t bracket = origin.find(']');
  return lower_case(origin.substr(0, origin.find(':', bracket == std::string_view::npos ? 0 : bracket)));
}

bool names_loopback(std::string_view host) {
  // A site may have a name that begins so, but none that is all numbers.
  const bool is_address = host.find_first_not_of("0123456789.") == std::string_view::npos;
  return host == "localhost" || (host.substr(0, 4) == "127." && is_address) || host == "[::1]";
}

}  // namespace kdt
