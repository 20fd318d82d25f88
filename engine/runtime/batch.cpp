#include "runtime/batch.h"

#include <algorithm>
#include <chrono>

namespace kdt {
namespace {

constexpr size_t kAdmissionsAStep = 16;    // looked at: the first of them run a round before the rest is
// A reader that wakes takes a CPU from the threads that compute: this part of the time goes there, and rounds in between share
// a wake-up. Seconds: nobody reads faster than the least, and the next round after the most brings one.
constexpr double kWakeShare = 1.0 / 250, kLeastWake = 0.005, kMostWake = 0.02, kWakeRate = 1.0 / 8;
constexpr uint64_t kCountEvery = 512;      // rounds: counting experts is recorded apart, which takes as long as several rounds

double seconds_between(Request::Clock::time_point from, Request::Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

Batch::Batch(Round& round, RoundCosts& costs, Pages& pages, Figures& figures, const Tokenizer& tokenizer,
             std::vector<int32_t> stop_ids, const BatchLimits& limits)
    : round_(round), costs_(costs), pages_(pages), figures_(figures), tokenizer_(tokenizer),
      stop_ids_(std::move(stop_ids)), limits_(limits) {
  set_state();
}

void Batch::add(std::shared_ptr<Request> request) {
  auto sequence = std::make_unique<Sequence>(std::move(request), tokenizer_, stop_ids_, costs_, round_);
  const Rank rank = sequence->rank();
  waiting_.emplace(rank, std::move(sequence));
  set_state();
}

bool Batch::step(uint64_t cancelled_serial) {
  done_ = {};
  const bool ended = end_cancelled(cancelled_serial);
  const auto start = Clock::now();
  const Schedule schedule = make_schedule();
  preempt(schedule.preempt);
  const bool moves = !schedule.decode.empty() || !schedule.prefill.empty();
  plan_round(schedule);
  std::erase(running_, nullptr);   // those that lost their pages
  if (moves) {
    done_.host_seconds = seconds_between(start, Clock::now());
    run_round();
  } else {
    last_end_.reset();
    wake_readers(true);
  }
  if (schedule.preempt.empty()) admit(schedule.n_admit);
  drop_ended();
  return ended || moves || schedule.n_admit > 0 || !schedule.preempt.empty();
}

bool Batch::end_cancelled(uint64_t cancelled_serial) {
  const auto now = Clock::now();
  const auto over = [&](const Sequence& s) {
    return s.request->cancelled() || s.request->serial() < cancelled_serial || s.request->late(now);
  };
  bool any = false;
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    if (!over(*at->second)) {
      ++at;
      continue;
    }
    end(*at->second, Finish::cancelled);
    ended_.push_back(std::move(at->second));
    at = waiting_.erase(at);
    any = true;
  }
  for (const auto& sequence : running_) {
    if (!over(*sequence)) continue;
    end(*sequence, Finish::cancelled);
    any = true;
  }
  if (any) drop_ended();
  return any;
}

Schedule Batch::make_schedule() {
  running_views_.clear();
  waiting_views_.clear();
  joining_.clear();
  for (const auto& s : running_) {
    running_views_.push_back({s->rank(), s->tokens_to_prefill(), s->stream.length,
                              static_cast<int64_t>(s->stream.pages.size()), s->controller.budget(),
                              std::min(s->controller.depths(), s->depth_room()), s->request->full()});
  }
  const auto places = static_cast<size_t>(std::max<int64_t>(0, limits_.max_streams - n_running()));
  for (const auto& [rank, s] : waiting_) {
    if (waiting_views_.size() >= std::min(places, kAdmissionsAStep)) break;
    const Pages::Match known = pages_.match(s->tokens, s->cacheable_blocks());
    if (prefix_is_coming(*s, known.blocks)) break;
    // Through its last token, and the root's place when one is to be decoded behind them.
    const int64_t total = pages_for(static_cast<int64_t>(s->tokens.size()) + s->generates());
    waiting_views_.push_back({rank, total - known.blocks + known.idle});
    joining_.push_back(s.get());
  }
  return schedule(running_views_, waiting_views_, pages_.available(),
                  {limits_.max_streams, limits_.prefill_chunk, round_.limits().max_rows});
}

bool Batch::prefix_is_coming(const Sequence& s, int64_t known_blocks) const {
  if (!pages_.keeps_prefixes()) return false;
  const auto brings_more = [&](const Sequence& other) {
    if (other.tokens_to_prefill() == 0 || other.request->full()) return false;
    const int64_t blocks = std::min(s.cacheable_blocks(), other.prefill_end() / kPageTokens);
    const auto end = s.tokens.begin() + blocks * kPageTokens;
    return std::mismatch(s.tokens.begin(), end, other.tokens.begin()).first - s.tokens.begin() >=
           (known_blocks + 1) * kPageTokens;
  };
  return std::any_of(running_.begin(), running_.end(), [&](const auto& other) { return brings_more(*other); }) ||
         std::any_of(joining_.begin(), joining_.end(), [&](const auto* other) { return brings_more(*other); });
}

void Batch::preempt(std::span<const size_t> streams) {
  for (const size_t i : streams) {
    std::unique_ptr<Sequence>& sequence = running_[i];
    pages_.give_back(sequence->stream.pages);
    sequence->stream.length = 0;
    sequence->n_recorded = 0;
    ++sequence->result.preemptions;
    sequence->request->update(sequence->result);
    sequence->request->wake();
    figures_.add_preemption();
    const Rank rank = sequence->rank();
    waiting_.emplace(rank, std::move(sequence));
  }
}

void Batch::admit(size_t n) {
  const auto now = Clock::now();
  for (size_t i = 0; i < n; ++i) {
    Sequence& s = *waiting_.begin()->second;
    const int64_t n_tokens = static_cast<int64_t>(s.tokens.size());
    const int64_t blocks = pages_.match(s.tokens, s.cacheable_blocks()).blocks;
    pages_.take_prefix(s.tokens, blocks, s.stream.pages);
    if (!pages_.take(pages_for(n_tokens + s.generates()) - blocks, s.stream.pages)) {
      // A round in between took pages the schedule had counted: it waits a little longer.
      pages_.give_back(s.stream.pages);
      return;
    }
    s.stream.length = blocks * kPageTokens;
    s.n_recorded = blocks;
    if (s.result.preemptions == 0) {
      s.result.queue_seconds = seconds_between(s.request->submitted(), now);
      s.result.cached_tokens = s.stream.length;
    }
    figures_.add_admission(n_tokens, s.stream.length);
    running_.push_back(std::move(waiting_.begin()->second));
    waiting_.erase(waiting_.begin());
  }
}

void Batch::plan_round(const Schedule& schedule) {
  decoding_.clear();
  prefilling_.clear();
  decode_tasks_.clear();
  prefill_tasks_.clear();
  for (const Schedule::Decode& decode : schedule.decode) {
    Sequence& s = *running_[decode.stream];
    pages_.take(decode.more_pages, s.stream.pages);
    decoding_.push_back(&s);
    decode_tasks_.push_back({&s.stream, s.controller.plan(decode.depths, decode.budget), s.settings().logprobs});
  }
  for (const Schedule::Prefill& prefill : schedule.prefill) {
    Sequence& s = *running_[prefill.stream];
    const auto at = static_cast<size_t>(s.stream.length), n = static_cast<size_t>(prefill.tokens);
    PrefillTask task{&s.stream, std::span<const int32_t>(s.tokens).subspan(at, n)};
    const bool last = s.stream.length + prefill.tokens == s.prefill_end();
    task.sample = last && s.generates() && !s.has_root();
    task.n_top = s.settings().logprobs;
    if (s.scores()) task.logits = s.settings().scores + s.stream.length * round_.vocab_size();
    if (s.settings().prompt_logprobs >= 0 && s.stream.length < s.n_prompt()) {
      const size_t end = std::min(at + n + 1, s.settings().prompt.size());
      task.prompt_n_top = s.settings().prompt_logprobs;
      task.next = std::span<const int32_t>(s.tokens).subspan(at + 1, end - at - 1);
    }
    prefilling_.push_back(&s);
    prefill_tasks_.push_back(task);
  }
  plan_drafts(schedule.decode);
}

// Of the streams in mode auto, which share the time of their round.
void Batch::plan_drafts(std::span<const Schedule::Decode> decode) {
  const auto may_draft = [&](size_t i) {
    return decoding_[i]->controller.may_draft(decode[i].depths, decode[i].budget);
  };
  DraftWish wish;
  wish.n_streams = static_cast<int64_t>(decode_tasks_.size());
  for (const PrefillTask& task : prefill_tasks_) wish.prompt_rows += static_cast<int64_t>(task.tokens.size());
  for (size_t i = 0; i < decode_tasks_.size(); ++i) {
    wish.n_fixed += decode_tasks_[i].plan.budget > 0;
    wish.fixed_nodes += decode_tasks_[i].plan.budget;
    if (!may_draft(i)) continue;
    ++wish.n_may[DraftHabits::index(decoding_[i]->stream.sampling)];
    wish.n_new += !decoding_[i]->controller.asked();
  }
  choice_ = habits_.choose(wish, costs_, round_);
  for (size_t i = 0; choice_.any() && i < decode_tasks_.size(); ++i) {
    if (!may_draft(i) || !choice_.drafts[DraftHabits::index(decoding_[i]->stream.sampling)]) continue;
    decode_tasks_[i].plan = decoding_[i]->controller.draft(std::min(decode[i].depths, choice_.depths),
                                                           std::min(decode[i].budget, choice_.tree_nodes));
  }
  if (!choice_.any()) return;
  cut_ = costs_.cut_tables(wish.n_streams + wish.prompt_rows, wish.n_streams,
                           round_.records() ? choice_.room : round_.limits().max_rows);
}

void Batch::wake_readers(bool at_once) {
  const auto start = Clock::now();
  const double between = std::clamp(wake_seconds_ / kWakeShare, kLeastWake, kMostWake);
  if (!at_once && seconds_between(last_wake_, start) < between) return;
  for (const auto& sequence : running_) sequence->request->wake();
  last_wake_ = Clock::now();
  const double seconds = seconds_between(start, last_wake_);
  wake_seconds_ += kWakeRate * (seconds - wake_seconds_);
  done_.host_seconds += seconds;
}

void Batch::run_round() {
  RoundPlan plan{decode_tasks_, prefill_tasks_};
  plan.count_experts = n_rounds_++ % kCountEvery == 0;
  if (choice_.any()) plan.cut = &cut_;
  wake_readers(!prefill_tasks_.empty());   // a pass over prompts is long
  const RoundResult result = round_.run(plan, done_.time);

  const auto now = Clock::now();
  observe(result);
  for (size_t i = 0; i < decoding_.size(); ++i) after_decode(i, result.decode[i], now);
  for (size_t i = 0; i < prefilling_.size(); ++i) after_prefill(i, result.prefill[i], now);
  done_.time[Stage::emit] = seconds_between(now, Clock::now());
  done_.host_seconds += done_.time[Stage::emit];
  for (const auto& sequence : running_) {
    if (sequence->result.finish == Finish::none) sequence->request->update(sequence->result);
  }
  figures_.add_round(done_);
  if (limits_.on_clock && last_end_ && result.usual && prefill_tasks_.empty()) {
    const double seconds = result.draft_seconds + result.verify_seconds;
    costs_.observe_host(static_cast<int64_t>(decoding_.size()), seconds_between(*last_end_, Clock::now()) - seconds, seconds);
  }
  last_end_ = Clock::now();
}

void Batch::observe(const RoundResult& result) {
  double tokens = 0;
  int64_t rows = 0, n_drafted = 0, depths = 0, deepest = 0, n_auto = 0, auto_nodes = 0;
  bool automatic = false;
  for (size_t i = 0; i < decoding_.size(); ++i) {
    const DecodeResult& decoded = result.decode[i];
    const size_t accepted = decoded.path.size() - 1;
    if (decode_tasks_[i].plan.calibration >= 0) {
      for (const int32_t depth : decoded.tree.depth) deepest = std::max<int64_t>(deepest, depth);
      ++n_auto;
      auto_nodes += decoded.tree.n_nodes;
      done_.auto_accepted += static_cast<int64_t>(accepted);
    }
    decoding_[i]->controller.observe(decoded);
    automatic |= decoding_[i]->controller.automatic();
    tokens += static_cast<double>(decoded.tokens.size());
    rows += decoded.tree.n_nodes + 1;
    depths = std::max(depths, decode_tasks_[i].plan.depths);
    ++done_.decode_streams;
    done_.accepted += static_cast<int64_t>(accepted);
    n_drafted += decode_tasks_[i].plan.budget > 0;
    if (decoded.tree.n_nodes > 0) {   // not one that was cut to the root
      ++done_.drafts;
      done_.draft_nodes += decoded.tree.n_nodes;
      done_.nodes.push_back(decoded.tree.n_nodes);
    }
    if (done_.accepted_by_depth.size() < accepted) done_.accepted_by_depth.resize(accepted);
    for (size_t depth = 0; depth < accepted; ++depth) ++done_.accepted_by_depth[depth];
  }
  for (const PrefillTask& task : prefill_tasks_) done_.prompt_tokens += static_cast<int64_t>(task.tokens.size());
  done_.distinct_experts = result.distinct_experts;
  done_.read_bytes = limits_.dense_bytes + limits_.expert_bytes * round_.expected_experts(rows + done_.prompt_tokens);
  const auto automatic_streams = static_cast<double>(n_auto);
  if (n_auto > 0)
    done_.auto_expected = automatic_streams * result.outlook.at(static_cast<double>(auto_nodes) / automatic_streams);
  habits_.learn(result.outlook, deepest);
  if (!result.usual) return;
  if (prefill_tasks_.empty()) costs_.observe_verify(rows, result.room, result.verify_seconds);
  if (n_drafted > 0) costs_.observe_draft(depths, n_drafted, result.draft_seconds);
  if (automatic)
    costs_.observe_rate(tokens, result.draft_seconds + result.verify_seconds + costs_.host(done_.decode_streams));
}

}  // namespace kdt
