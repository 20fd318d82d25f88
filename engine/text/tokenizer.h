// Kimi's tokenizer: `tiktoken.model` (rank BPE) with Kimi's splitting pattern, and its 256 reserved special tokens.
//
// Ids equal tiktoken's `encode_ordinary` within each piece after Kimi's own splits (400,000 characters, and runs of more
// than 25,000 white-space or non-white-space characters). Special tokens are never parsed out of text: only `special()`
// yields their ids. Immutable after load and safe to share between threads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kdt {

class Tokenizer {
 public:
  // Reads tiktoken.model and tokenizer_config.json of a checkpoint directory.
  static Tokenizer load(const std::string& directory);
  // From the files' bytes (for tests and fuzzing); `name` is for messages.
  static Tokenizer parse(std::string_view tiktoken_model, std::string_view tokenizer_config_json, const std::string& name);
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // Text must be valid UTF-8: otherwise Error(invalid_argument) naming the byte offset.
  std::vector<int32_t> encode(std::string_view text) const;
  // The bytes of one token (a special token's are its name); empty for an id with no token. Borrowed from the tokenizer.
  std::string_view bytes(int32_t id) const;
  // The concatenated bytes; Error(invalid_argument) for an id outside the vocabulary.
  std::string decode(std::span<const int32_t> ids) const;
  std::optional<int32_t> special(std::string_view name) const;
  bool is_special(int32_t id) const;
  int32_t size() const;         // ranks + specials

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

}  // namespace kdt
