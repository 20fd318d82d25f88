// Log-probabilities in the shapes of the protocol.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "openai_json.h"
#include "openai_text.h"

namespace kdt::openai {

// Tokens as text. Not always whole characters: bytes of a part of one are escaped ("\xe2\x82").
class TokenNames {
 public:
  // `as_ids`: "token_id:17" in place of the text. `text` must outlive it.
  TokenNames(const ModelText& text, bool as_ids) : text_(text), as_ids_(as_ids) {}

  const std::string& bytes(int32_t id);
  std::string name(int32_t id);
  // As the older completions protocol spells what is not UTF-8: "bytes:\xe2\x82".
  std::string completion_name(int32_t id);

 private:
  const ModelText& text_;
  bool as_ids_;
  std::unordered_map<int32_t, std::string> bytes_;
};

// One item of a chat's logprobs.content, with at most `n_top` alternatives.
Json chat_logprob(TokenNames& names, const kdt_event& event, int32_t n_top);

// The four parallel arrays of a completion's logprobs.
class CompletionLogprobs {
 public:
  // `offset`: the characters of text before the token.
  void add(TokenNames& names, const kdt_event& event, int32_t n_top, int64_t offset);
  bool empty() const noexcept { return tokens_.empty(); }
  // Leaves it empty.
  Json take();

 private:
  Json tokens_ = Json::array(), logprobs_ = Json::array(), tops_ = Json::array(), offsets_ = Json::array();
};

// One item of prompt_logprobs: {"17": {"logprob", "rank", "decoded_token"}}, null for the prompt's first token.
Json prompt_logprob(TokenNames& names, const kdt_event& event, int32_t n_top);

}  // namespace kdt::openai
