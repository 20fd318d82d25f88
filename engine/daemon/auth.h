// API keys: who may use the daemon.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kdt {

class ApiKeys {
 public:
  // Keys from a file (unless `path` is empty) and from the environment's KDTREE_API_KEY, one a line. Empty lines and
  // lines that begin with # are left out. Throws Failure for a file that cannot be read, is no regular file of at most
  // 1 MiB, holds no key, or a key no header can carry.
  static ApiKeys load(const std::string& path);

  // Whether a key is asked for at all.
  bool required() const noexcept { return !keys_.empty(); }
  // `authorization`: the header's value. Takes the same time for every key of a length, right or wrong.
  bool accepts(std::string_view authorization) const noexcept;

 private:
  void add(const std::string& text, const std::string& source);

  std::vector<std::string> keys_;
};

}  // namespace kdt
