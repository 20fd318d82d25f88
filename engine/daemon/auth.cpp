#include "auth.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "failure.h"

namespace kdt {
namespace {

constexpr const char* kVariable = "KDTREE_API_KEY";
constexpr size_t kLongestKey = 4096;

// Every byte of the key is looked at, whatever the candidate is. The volatile sum keeps the compiler from leaving
// early.
bool equal_in_constant_time(std::string_view key, std::string_view candidate) noexcept {
  volatile unsigned difference = key.size() == candidate.size() ? 0 : 1;
  for (size_t i = 0; i < key.size(); ++i) {
    const char other = candidate.empty() ? '\0' : candidate[i % candidate.size()];
    difference = difference | static_cast<unsigned char>(key[i] ^ other);
  }
  return difference == 0;
}

bool starts_with_bearer(std::string_view text) noexcept {
  constexpr std::string_view kScheme = "bearer ";
  return text.size() > kScheme.size() &&
         std::equal(kScheme.begin(), kScheme.end(), text.begin(), [](char scheme, char c) {
           return scheme == (c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c);
         });
}

}  // namespace

ApiKeys ApiKeys::load(const std::string& path) {
  ApiKeys keys;
  if (!path.empty()) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    const bool is_empty = file.is_open() && file.peek() == std::ifstream::traits_type::eof() && !file.bad();
    if (!is_empty && !(text << file.rdbuf())) {
      fail_run(path, std::strerror(errno ? errno : EIO), "a readable file of API keys, one a line");
    }
    keys.add(text.str(), path);
    if (!keys.required()) fail_run(path, "no key", "API keys, one a line");
  }
  if (const char* text = std::getenv(kVariable)) keys.add(text, kVariable);
  return keys;
}

void ApiKeys::add(const std::string& text, const std::string& source) {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    std::string key = text.substr(begin, end - begin);
    begin = end + 1;
    while (!key.empty() && (key.back() == '\r' || key.back() == ' ' || key.back() == '\t')) key.pop_back();
    if (key.empty() || key.front() == '#') continue;
    const bool sendable = std::all_of(key.begin(), key.end(), [](char c) { return c > ' ' && c < 0x7f; });
    if (!sendable || key.size() > kLongestKey) {
      fail_run(source, "a key", "printable ASCII without spaces, at most 4096 bytes");
    }
    keys_.push_back(std::move(key));
  }
}

bool ApiKeys::accepts(std::string_view authorization) const noexcept {
  if (!starts_with_bearer(authorization)) return false;
  std::string_view candidate = authorization.substr(authorization.find(' '));
  candidate.remove_prefix(std::min(candidate.find_first_not_of(' '), candidate.size()));
  bool accepted = false;
  for (const std::string& key : keys_) accepted = equal_in_constant_time(key, candidate) || accepted;
  return accepted;
}

}  // namespace kdt
