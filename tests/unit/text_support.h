// What the tests of engine/text share. Include after doctest.h.
#pragma once

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "base/error.h"
#include "text/tokenizer.h"

namespace kdt {

inline std::string source_root() {
  const char* root = std::getenv("KDTREE_SOURCE_ROOT");
  REQUIRE(root != nullptr);
  return root;
}

inline std::string source_file(const std::string& path) {
  std::ifstream file(source_root() + "/" + path, std::ios::binary);
  REQUIRE(file);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline const Tokenizer& bundled() {
  static const Tokenizer tokenizer = Tokenizer::load(source_root() + "/models/tiny-k2");
  return tokenizer;
}

template <class Work>
std::string message_of(Status status, Work work) {
  try {
    work();
  } catch (const Error& error) {
    CHECK(error.status() == status);
    return error.what();
  }
  FAIL("no error");
  return {};
}

inline std::string repeat(std::string_view text, size_t n) {
  std::string out;
  for (size_t i = 0; i < n; i++) out += text;
  return out;
}

// A tokenizer_config.json that names no special token.
inline const std::string kNoNames = R"({"added_tokens_decoder":{}})";

}  // namespace kdt
