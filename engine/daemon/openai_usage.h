// What a reply cost: OpenAI's usage, and the `kdtree` extension field.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "openai_json.h"
#include "openai_request.h"

namespace kdt::openai {

// The figures of one choice, or of several together.
class SpeculationFigures {
 public:
  void add(const kdt_result& result);
  // {rounds, tokens_per_round, tokens_per_second, accepted_by_depth, drafted_rounds, draft_nodes, preemptions, seed,
  // speculate, timings_ms}; times are sums over the choices.
  Json json(const GenerationRequest& request) const;

 private:
  int64_t rounds_ = 0, drafted_rounds_ = 0, draft_nodes_ = 0, preemptions_ = 0;
  double committed_ = 0;  // tokens of the rounds
  double decode_seconds_ = 0;
  double decoded_ = 0;  // tokens of decode_seconds_
  std::vector<int64_t> accepted_by_depth_;
  std::array<double, KDT_N_STAGES> stages_ms_ = {};
  double queue_ms_ = 0, first_token_ms_ = 0, total_ms_ = 0;
};

Json usage_json(int64_t prompt_tokens, int64_t completion_tokens);
Json usage_json(int64_t prompt_tokens, int64_t completion_tokens, int64_t cached_tokens, int64_t reasoning_tokens);

}  // namespace kdt::openai
