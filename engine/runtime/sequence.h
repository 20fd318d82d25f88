// One request on its way through the engine: what it has committed, what it holds and what is left to do. Decode thread only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "runtime/controller.h"
#include "runtime/emit.h"
#include "runtime/request.h"
#include "runtime/round.h"
#include "runtime/scheduler.h"

namespace kdt {

// Prompt and output as penalties see them.
class History {
 public:
  void add(int32_t token, bool output) {
    const auto [at, is_new] = place_.emplace(token, token_.size());
    if (is_new) {
      token_.push_back(token);
      count_.push_back(0);
    }
    count_[at->second] += output;
  }
  std::span<const int32_t> tokens() const { return token_; }
  std::span<const int32_t> counts() const { return count_; }   // in the output

 private:
  std::unordered_map<int32_t, size_t> place_;
  std::vector<int32_t> token_, count_;
};

class Sequence {
 public:
  Sequence(std::shared_ptr<Request> request, const Tokenizer& tokenizer, std::span<const int32_t> stop_ids,
           RoundCosts& costs, const Round& round);
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  const RequestSettings& settings() const { return request->settings(); }
  Rank rank() const { return {settings().priority, request->serial()}; }
  bool scores() const { return settings().scores != nullptr; }
  // Whether every prompt token's logits are wanted, so that none of it may come from the prefix cache.
  bool reads_prompt() const { return scores() || settings().prompt_logprobs >= 0; }
  bool generates() const { return !scores() && settings().max_tokens > 0; }
  bool has_root() const { return stream.root >= 0; }
  int64_t n_prompt() const { return static_cast<int64_t>(settings().prompt.size()); }
  // Tokens whose KV must be in pages before the next one is decoded.
  int64_t prefill_end() const { return static_cast<int64_t>(tokens.size()) - has_root(); }
  int64_t tokens_to_prefill() const { return prefill_end() - stream.length; }
  // The prefix cache may yield this much; a first token needs the logits of the last prompt token.
  int64_t cacheable_blocks() const { return reads_prompt() ? 0 : (prefill_end() - !has_root()) / kPageTokens; }
  // Positions a draft may use behind the root: a round brings a bonus token beside what it accepts, and no token past
  // max_tokens is asked for.
  int64_t depth_room() const { return std::max<int64_t>(0, settings().max_tokens - emitter.generated() - 1); }

  // Newly committed tokens; the last one is the root.
  void add_output(std::span<const int32_t> committed);

  const std::shared_ptr<Request> request;
  std::vector<int32_t> tokens;         // prompt, then output; the last one is the root once there is one
  Stream stream;
  Controller controller;
  Emitter emitter;
  Result result;
  std::string last_text;               // once it ended: what belongs to no token
  int64_t n_recorded = 0;              // blocks the prefix cache knows
  int64_t prompt_shown = 0;            // prompt tokens handed out as events
  Request::Clock::time_point first_token{}, last_tokens{};

 private:
  void link_history();

  History history_;
  LogitAdjust adjust_;
  std::vector<int32_t> banned_;
};

}  // namespace kdt
