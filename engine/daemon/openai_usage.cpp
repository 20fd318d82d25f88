#include "openai_usage.h"

#include <algorithm>

namespace kdt::openai {
namespace {

constexpr const char* kSpeculateNames[] = {"auto", "off", "chain", "tree"};

}  // namespace

void SpeculationFigures::add(const kdt_result& result) {
  rounds_ += result.rounds;
  drafted_rounds_ += result.drafted_rounds;
  draft_nodes_ += result.draft_nodes;
  preemptions_ += result.preemptions;
  committed_ += result.tokens_per_round * static_cast<double>(result.rounds);
  if (result.tokens_per_second > 0) {
    // The first token is prefill's.
    const double decoded = static_cast<double>(std::max<int64_t>(result.generated_tokens - 1, 0));
    decoded_ += decoded;
    decode_seconds_ += decoded / result.tokens_per_second;
  }
  const auto n_depths = static_cast<size_t>(std::max<int64_t>(result.n_depths, 0));
  if (accepted_by_depth_.size() < n_depths) accepted_by_depth_.resize(n_depths);
  for (size_t i = 0; i < n_depths; ++i) accepted_by_depth_[i] += result.accepted_by_depth[i];
  for (size_t i = 0; i < stages_ms_.size(); ++i) stages_ms_[i] += result.timings_ms[i];
  queue_ms_ += result.queue_ms;
  first_token_ms_ += result.first_token_ms;
  total_ms_ += result.total_ms;
}

Json SpeculationFigures::json(const GenerationRequest& request) const {
  Json timings = Json::object();
  for (int32_t stage = 0; stage < KDT_N_STAGES; ++stage) {
    timings[kdt_stage_name(stage)] = stages_ms_[static_cast<size_t>(stage)];
  }
  timings["queue"] = queue_ms_;
  timings["first_token"] = first_token_ms_;
  timings["total"] = total_ms_;
  return {{"rounds", rounds_},
          {"tokens_per_round", rounds_ > 0 ? committed_ / static_cast<double>(rounds_) : 0},
          {"tokens_per_second", decode_seconds_ > 0 ? decoded_ / decode_seconds_ : 0},
          {"accepted_by_depth", accepted_by_depth_},
          {"drafted_rounds", drafted_rounds_},
          {"draft_nodes", draft_nodes_},
          {"preemptions", preemptions_},
          {"seed", request.seed},
          {"speculate", kSpeculateNames[request.speculate]},
          {"timings_ms", std::move(timings)}};
}

Json usage_json(int64_t prompt_tokens, int64_t completion_tokens) {
  return {{"prompt_tokens", prompt_tokens},
          {"completion_tokens", completion_tokens},
          {"total_tokens", prompt_tokens + completion_tokens}};
}

Json usage_json(int64_t prompt_tokens, int64_t completion_tokens, int64_t cached_tokens, int64_t reasoning_tokens) {
  Json usage = usage_json(prompt_tokens, completion_tokens);
  usage["prompt_tokens_details"] = {{"cached_tokens", cached_tokens}};
  usage["completion_tokens_details"] = {{"reasoning_tokens", reasoning_tokens}};
  return usage;
}

}  // namespace kdt::openai
