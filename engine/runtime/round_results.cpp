// The back of a round: what its results show. Streams move on here.
#include <algorithm>

#include "runtime/round.h"

namespace kdt {

Tree Round::tree_of(size_t i) const {
  const auto first = static_cast<size_t>(in_.plan.host[i].first);
  const int64_t n_nodes = out_.n_nodes.host[i];
  const auto n = static_cast<size_t>(n_nodes + 1);
  return {n_nodes, {out_.node_token.host + first, n}, {out_.node_parent.host + first, n}, {out_.node_depth.host + first, n},
          {out_.node_weight.host + first, n}};
}

// Of `n` entries from `at` on; of the round's n_top the first `n_top` of each.
Logprobs Round::logprobs(int64_t at, int64_t n, int64_t n_top) {
  const size_t first = top_token_.size();
  for (int64_t i = at; i < at + n; ++i) {
    const int32_t* token = logprobs_.top_token.host + i * n_top_;
    const float* logprob = logprobs_.top_logprob.host + i * n_top_;
    top_token_.insert(top_token_.end(), token, token + n_top);
    top_logprob_.insert(top_logprob_.end(), logprob, logprob + n_top);
  }
  const auto n_tops = static_cast<size_t>(n * n_top);
  return {n_top, {logprobs_.logprob.host + at, static_cast<size_t>(n)}, std::span(top_token_).subspan(first, n_tops),
          std::span(top_logprob_).subspan(first, n_tops)};
}

void Round::read_decode(const RoundPlan& plan) {
  decode_results_.clear();
  int64_t scored = in_.counts.host->n_scored + in_.counts.host->n_prompt_samples;
  for (size_t i = 0; i < plan.decode.size(); ++i) {
    const auto first = static_cast<size_t>(in_.plan.host[i].first);
    const int64_t n_path = out_.n_path.host[i];
    const auto n = static_cast<size_t>(n_path);
    DecodeResult result{tree_of(i), {out_.path.host + first, n}, {out_.path_token.host + first, n}, {}};
    if (plan.decode[i].n_top >= 0) result.logprobs = logprobs(scored, n_path, plan.decode[i].n_top);
    scored += n_path;
    decode_results_.push_back(result);
    Stream& stream = *plan.decode[i].stream;
    stream.length += n_path;
    stream.root = result.tokens.back();
  }
}

void Round::read_prompts(const RoundPlan& plan) {
  prefill_results_.clear();
  int64_t scored = 0, sampled = 0;
  const auto row_bytes = static_cast<size_t>(vocab_) * sizeof(float);
  for (const PrefillTask& task : plan.prefill) {
    PrefillResult result;
    const auto n_tokens = static_cast<int64_t>(task.tokens.size());
    const int64_t root = in_.counts.host->n_scored + sampled;
    if (task.logits || task.prompt_n_top >= 0) {
      const int64_t n_scored = n_tokens - task.sample;
      if (task.prompt_n_top >= 0)
        result.prompt = logprobs(scored, std::min(n_scored, static_cast<int64_t>(task.next.size())), task.prompt_n_top);
      for (int64_t i = 0; task.logits && i < n_tokens; ++i)
        ops_.copy_out(logits_, static_cast<size_t>(i < n_scored ? scored + i : root) * row_bytes, task.logits + i * vocab_,
                      row_bytes);
      scored += n_scored;
    }
    if (task.sample) {
      task.stream->root = out_.sample[sampled++];
      if (task.n_top >= 0) result.root = logprobs(root, 1, task.n_top);
    }
    task.stream->length += n_tokens;
    prefill_results_.push_back(result);
  }
}

}  // namespace kdt
