#include "runtime/sequence.h"

namespace kdt {

Sequence::Sequence(std::shared_ptr<Request> r, const Tokenizer& tokenizer, std::span<const int32_t> stop_ids,
                   RoundCosts& costs, const Round& round)
    : request(std::move(r)), tokens(request->settings().prompt), controller(costs, request->settings(), round),
      emitter(*request, tokenizer, stop_ids), result(request->result()) {
  const RequestSettings& s = settings();
  stream.sampling = s.sampling;
  adjust_.repetition = s.repetition_penalty;
  adjust_.frequency = s.frequency_penalty;
  adjust_.presence = s.presence_penalty;
  adjust_.bias_token = s.bias_tokens.data();
  adjust_.bias = s.bias_values.data();
  adjust_.n_bias = static_cast<int64_t>(s.bias_tokens.size());
  if (s.min_tokens > 0) {
    if (!s.ignore_eos) banned_.assign(stop_ids.begin(), stop_ids.end());
    banned_.insert(banned_.end(), s.stop_tokens.begin(), s.stop_tokens.end());
    adjust_.banned = banned_.data();
    adjust_.n_banned = static_cast<int64_t>(banned_.size());
    adjust_.banned_until = static_cast<int32_t>(n_prompt() + s.min_tokens);
  }
  const bool penalises = s.repetition_penalty != 1 || s.frequency_penalty != 0 || s.presence_penalty != 0;
  if (penalises) {
    for (const int32_t token : s.prompt) history_.add(token, false);
    link_history();
  }
  if (penalises || adjust_.n_bias > 0 || adjust_.n_banned > 0) stream.adjust = &adjust_;
}

void Sequence::add_output(std::span<const int32_t> committed) {
  tokens.insert(tokens.end(), committed.begin(), committed.end());
  if (adjust_.n_seen == 0) return;
  for (const int32_t token : committed) history_.add(token, true);
  link_history();
}

void Sequence::link_history() {
  adjust_.seen = history_.tokens().data();
  adjust_.seen_count = history_.counts().data();
  adjust_.n_seen = static_cast<int64_t>(history_.tokens().size());
}

}  // namespace kdt
