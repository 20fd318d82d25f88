// What a round yielded reaches its requests; those that end leave the batch.
#include <algorithm>
#include <chrono>

#include "runtime/batch.h"

namespace kdt {
namespace {

double seconds_between(Request::Clock::time_point from, Request::Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

Logprobs without_first(const Logprobs& all, size_t n) {
  const size_t n_tops = n * static_cast<size_t>(all.n_top);
  return {all.n_top, all.logprob.subspan(n), all.top_token.subspan(n_tops), all.top_logprob.subspan(n_tops)};
}

}  // namespace

void Batch::after_decode(size_t i, const DecodeResult& decoded, Clock::time_point now) {
  Sequence& s = *decoding_[i];
  Result& r = s.result;
  const auto n = static_cast<int64_t>(decoded.tokens.size());
  const size_t accepted = decoded.path.size() - 1;
  const auto emit_start = Clock::now();
  ++r.rounds;
  r.drafted_rounds += decoded.tree.n_nodes > 0;
  r.draft_nodes += decoded.tree.n_nodes;
  r.committed += n;
  if (r.accepted_by_depth.size() < accepted) r.accepted_by_depth.resize(accepted);
  for (size_t depth = 0; depth < accepted; ++depth) ++r.accepted_by_depth[depth];
  for (size_t stage = 0; stage < kStages; ++stage) r.time.seconds[stage] += done_.time.seconds[stage];
  s.add_output(decoded.tokens);
  const Finish reason = s.emitter.push(decoded.tokens, decoded.logprobs);
  count_generated(s);
  r.decode_seconds = seconds_between(s.first_token, now);
  figures_.add_token_interval(seconds_between(s.last_tokens, now) / static_cast<double>(n), n);
  s.last_tokens = now;
  record_blocks(s);
  r.time[Stage::emit] += seconds_between(emit_start, Clock::now());
  if (reason != Finish::none) end(s, reason);
}

void Batch::after_prefill(size_t i, const PrefillResult& prefilled, Clock::time_point now) {
  Sequence& s = *prefilling_[i];
  const PrefillTask& task = prefill_tasks_[i];
  for (const double seconds : done_.time.seconds) s.result.time[Stage::prefill] += seconds;
  record_blocks(s);
  if (s.settings().prompt_logprobs >= 0) {
    if (s.prompt_shown == 0) {
      s.emitter.push_prompt({s.tokens.data(), 1}, {});
      s.prompt_shown = 1;
    }
    // After a preemption some of them were shown before.
    const int64_t next_at = s.stream.length - static_cast<int64_t>(task.tokens.size()) + 1;
    const auto seen = static_cast<size_t>(std::clamp<int64_t>(s.prompt_shown - next_at, 0, static_cast<int64_t>(task.next.size())));
    s.emitter.push_prompt(task.next.subspan(seen), without_first(prefilled.prompt, seen));
    s.prompt_shown += static_cast<int64_t>(task.next.size() - seen);
  }
  if (task.sample) {
    s.first_token = s.last_tokens = now;
    s.result.first_token_seconds = seconds_between(s.request->submitted(), now);
    figures_.add_first_token(s.result.first_token_seconds);
    last_wake_ = {};   // a first token is not kept
    s.add_output({&s.stream.root, 1});
    const Finish reason = s.emitter.push({&s.stream.root, 1}, prefilled.root);
    count_generated(s);
    if (reason != Finish::none) end(s, reason);
  } else if (!s.generates() && s.tokens_to_prefill() == 0) {
    end(s, Finish::length);
  }
}

// What clients get: not the tokens of an accepted path behind the end of the text.
void Batch::count_generated(Sequence& s) {
  done_.generated_tokens += s.emitter.emitted() - s.result.generated_tokens;
  s.result.generated_tokens = s.emitter.emitted();
}

void Batch::record_blocks(Sequence& s) {
  for (; (s.n_recorded + 1) * kPageTokens <= s.stream.length; ++s.n_recorded)
    pages_.record(s.tokens, s.n_recorded, s.stream.pages);
}

void Batch::end(Sequence& s, Finish reason) {
  pages_.give_back(s.stream.pages);
  Result& r = s.result;
  s.last_text = s.emitter.flush();
  count_generated(s);
  r.stop_token = s.emitter.stop_token();
  r.stop_string = s.emitter.stop_string();
  // A stop string may turn out only here, when no longer one can follow.
  r.finish = reason == Finish::length && !r.stop_string.empty() ? Finish::stop : reason;
  if (r.finish == Finish::cancelled && s.request->late(Clock::now()))
    r.error = "timeout_ms: " + std::to_string(s.settings().timeout.count()) + ": expected the text to end within it";
  r.total_seconds = seconds_between(s.request->submitted(), Clock::now());
}

void Batch::drop_ended() {
  for (auto& sequence : running_)
    if (sequence->result.finish != Finish::none) ended_.push_back(std::move(sequence));
  std::erase(running_, nullptr);
  // Counters, then gauges, then the requests themselves: who sees that nothing runs any more finds all of it counted.
  for (const auto& sequence : ended_)
    if (!sequence->scores()) figures_.add_finished(sequence->settings(), sequence->result);
  set_state();
  for (const auto& sequence : ended_) sequence->request->finish(sequence->result, std::move(sequence->last_text));
  ended_.clear();
}

void Batch::set_state() {
  figures_.set_state({n_running(), n_waiting(), pages_.n_in_use(), pages_.n_idle(), pages_.n_pages()});
}

void Batch::fail_all(const std::string& error) {
  const auto fail = [&](const std::unique_ptr<Sequence>& sequence) {
    if (!sequence) return;   // it was on its way to the waiting ones
    Result& r = sequence->result;
    if (r.finish == Finish::none) {
      r.finish = Finish::error;
      r.error = error;
    }
    figures_.add_finished(sequence->settings(), r);
    sequence->request->finish(r, {});
  };
  for (const auto& sequence : running_) fail(sequence);
  for (const auto& [rank, sequence] : waiting_) fail(sequence);
  running_.clear();
  waiting_.clear();
  ended_.clear();
  figures_.set_state({0, 0, 0, 0, pages_.n_pages()});
}

std::optional<std::string> Batch::find_fault() const {
  std::vector<const std::vector<int32_t>*> tables;
  for (const auto& sequence : running_) tables.push_back(&sequence->stream.pages);
  return pages_.find_fault(tables);
}

}  // namespace kdt
