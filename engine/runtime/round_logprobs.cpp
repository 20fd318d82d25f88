// The back of a round: what its results show, log-probabilities and logits included.
#include <algorithm>

#include "runtime/round.h"

namespace kdt {

// `row` [n]: rows of logits_; `token` [n]: what followed. The arrays have room for the whole round, so that spans stay.
Logprobs Round::take_logprobs(int64_t n, int64_t n_top, const int32_t* row, const int32_t* token) {
  const size_t at = logprob_.size(), top_at = top_token_.size();
  const auto size = static_cast<size_t>(n), n_tops = static_cast<size_t>(n * n_top);
  logprob_.resize(at + size);
  top_token_.resize(top_at + n_tops);
  top_logprob_.resize(top_at + n_tops);
  ops_.logprobs({n, vocab_, n_top, logits_.as<float>(), row, token, logprob_.data() + at, top_token_.data() + top_at,
                 top_logprob_.data() + top_at});
  return {n_top, std::span(logprob_).subspan(at, size), std::span(top_token_).subspan(top_at, n_tops),
          std::span(top_logprob_).subspan(top_at, n_tops)};
}

void Round::find_logprobs(const RoundPlan& plan) {
  decode_results_.clear();
  prefill_results_.clear();
  size_t n = 0, n_tops = 0;
  const auto count = [&](int64_t tokens, int64_t n_top) {
    if (n_top < 0) return;
    n += static_cast<size_t>(tokens);
    n_tops += static_cast<size_t>(tokens * n_top);
  };
  for (size_t i = 0; i < plan.decode.size(); ++i) count(branches_[i].n_path, plan.decode[i].n_top);
  for (const PrefillTask& task : plan.prefill) {
    if (task.sample) count(1, task.n_top);
    count(static_cast<int64_t>(task.next.size()), task.prompt_n_top);
  }
  logprob_.clear();
  top_token_.clear();
  top_logprob_.clear();
  logprob_.reserve(n);
  top_token_.reserve(n_tops);
  top_logprob_.reserve(n_tops);

  for (size_t i = 0; i < plan.decode.size(); ++i) {
    const Branch& branch = branches_[i];
    const auto at = static_cast<size_t>(branch.path_at), n_path = static_cast<size_t>(branch.n_path);
    DecodeResult result{tree_of(branch), std::span(path_).subspan(at, n_path), std::span(committed_).subspan(at, n_path), {}};
    if (plan.decode[i].n_top >= 0)
      result.logprobs = take_logprobs(branch.n_path, plan.decode[i].n_top, commit_row_.data() + at, committed_.data() + at);
    decode_results_.push_back(result);
  }

  const int64_t n_trees = branches_.empty() ? 0 : branches_.back().row + branches_.back().n_nodes + 1;
  int64_t sampled = n_trees, scored = n_sampled_;
  for (const PrefillTask& task : plan.prefill) {
    PrefillResult result;
    const auto n_tokens = static_cast<int64_t>(task.tokens.size());
    const auto root_row = static_cast<int32_t>(sampled);
    if (task.sample) {
      if (task.n_top >= 0) result.root = take_logprobs(1, task.n_top, &root_row, &task.stream->root);
      ++sampled;
    }
    if (task.logits || task.prompt_n_top >= 0) {
      wanted_row_.resize(static_cast<size_t>(n_tokens));
      for (int64_t i = 0; i < n_tokens; ++i)
        wanted_row_[static_cast<size_t>(i)] = task.sample && i + 1 == n_tokens ? root_row : static_cast<int32_t>(scored++);
      if (task.prompt_n_top >= 0)
        result.prompt = take_logprobs(static_cast<int64_t>(task.next.size()), task.prompt_n_top, wanted_row_.data(),
                                      task.next.data());
      if (task.logits) {
        const auto row_bytes = static_cast<size_t>(vocab_) * sizeof(float);
        for (int64_t i = 0; i < n_tokens; ++i)
          ops_.copy_out(logits_, static_cast<size_t>(wanted_row_[static_cast<size_t>(i)]) * row_bytes,
                        task.logits + i * vocab_, row_bytes);
      }
    }
    prefill_results_.push_back(result);
  }
}

}  // namespace kdt
