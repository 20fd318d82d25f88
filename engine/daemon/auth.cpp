#include "auth.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "failure.h"

namespace kdt {
namespace {

constexpr const char* kVariable = "KDTREE_API_KEY";
constexpr size_t kLongestKey = 4096;
constexpr size_t kLargestFile = size_t{1} << 20;

// The text of a small regular file: a pipe would make the start wait, a device might never end.
std::string read_key_file(const std::string& path) {
  constexpr const char* kExpected = "a regular file of API keys, one a line, at most 1 MiB";
  struct File {
    int descriptor;
    ~File() {
      if (descriptor >= 0) close(descriptor);
    }
  };
  const File file{open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)};
  struct stat status {};
  if (file.descriptor < 0 || fstat(file.descriptor, &status) != 0) fail_run(path, std::strerror(errno), kExpected);
  if (!S_ISREG(status.st_mode)) fail_run(path, S_ISDIR(status.st_mode) ? "a directory" : "no regular file", kExpected);
  std::string text;
  char buffer[1 << 14];
  for (ssize_t n = 1; n > 0;) {
    n = read(file.descriptor, buffer, sizeof(buffer));
    if (n < 0) fail_run(path, std::strerror(errno), kExpected);
    text.append(buffer, static_cast<size_t>(n));
    if (text.size() > kLargestFile) fail_run(path, "more than 1 MiB", kExpected);
  }
  return text;
}

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
    keys.add(read_key_file(path), path);
    if (!keys.required()) fail_run(path, "no key", "API keys, one a line");
  }
  // Empty is as good as not set; anything else is meant to lock the door.
  if (const char* text = std::getenv(kVariable); text && *text != '\0') {
    const size_t before = keys.keys_.size();
    keys.add(text, kVariable);
    if (keys.keys_.size() == before) fail_run(kVariable, "no key", "API keys, one a line; `#` begins a comment");
  }
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
