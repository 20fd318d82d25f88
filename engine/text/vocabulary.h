// The tokens of a checkpoint: tiktoken.model and the special tokens of tokenizer_config.json.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace kdt {

// Special tokens that Kimi reserves right after the ranks; those without a name are `<|reserved_token_{id}|>`.
constexpr int32_t kReservedSpecials = 256;

struct Vocabulary {
  std::string pool;                                     // the bytes of all tokens, by id
  std::vector<uint64_t> offsets;                        // [size() + 1] into pool
  std::unordered_map<std::string_view, int32_t> ranks;  // keys point into pool: a Vocabulary never moves
  std::unordered_map<std::string_view, int32_t> specials;
  size_t longest_rank = 0;                              // bytes

  Vocabulary() = default;
  Vocabulary(const Vocabulary&) = delete;
  Vocabulary& operator=(const Vocabulary&) = delete;

  int32_t n_ranks() const { return static_cast<int32_t>(ranks.size()); }
  int32_t size() const { return static_cast<int32_t>(offsets.size()) - 1; }
  std::string_view token(int32_t id) const {
    return std::string_view(pool).substr(offsets[id], offsets[id + 1] - offsets[id]);
  }
};

// The two files' bytes; `name` is the directory, for messages. Error(bad_file) naming file and line, or file and field.
void parse_vocabulary(std::string_view tiktoken_model, std::string_view tokenizer_config, const std::string& name,
                      Vocabulary& out);

constexpr uint64_t kMaxModelBytes = 64u << 20;
constexpr uint64_t kMaxTokenizerConfigBytes = 16u << 20;

}  // namespace kdt
