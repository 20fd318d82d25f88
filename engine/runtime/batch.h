// All requests of the engine between submit and their end: who waits, who runs, and the round that moves them on. Decode
// thread only; readers see requests, figures and nothing else.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/costs.h"
#include "runtime/draft_habits.h"
#include "runtime/figures.h"
#include "runtime/pages.h"
#include "runtime/round.h"
#include "runtime/scheduler.h"
#include "runtime/sequence.h"

namespace kdt {

struct BatchLimits {
  int64_t max_streams, prefill_chunk;
  double dense_bytes, expert_bytes;    // read by every pass; of one expert in every layer
  bool on_clock = true;                // rounds take the time that they say, not that of another machine
};

class Batch {
 public:
  Batch(Round& round, RoundCosts& costs, Pages& pages, Figures& figures, const Tokenizer& tokenizer,
        std::vector<int32_t> stop_ids, const BatchLimits& limits);

  void add(std::shared_ptr<Request> request);
  // Ends what was cancelled or is late (every request below `cancelled_serial` is), admits, and runs one round if there is
  // anything to run. False: nothing can move until a request or a reader does. Whatever it throws fails the engine.
  bool step(uint64_t cancelled_serial);
  // The engine is dead: every request ends with this error. Touches nothing but requests.
  void fail_all(const std::string& error);

  int64_t n_running() const { return static_cast<int64_t>(running_.size()); }
  int64_t n_waiting() const { return static_cast<int64_t>(waiting_.size()); }

  // For tests: see Pages::find_fault.
  std::optional<std::string> find_fault() const;

 private:
  using Clock = Request::Clock;

  bool end_cancelled(uint64_t cancelled_serial);
  Schedule make_schedule();
  // Whether a prompt that is being prefilled, or is about to be, begins with more of this one's blocks than are known: waiting
  // for them is cheaper than computing them again.
  bool prefix_is_coming(const Sequence& sequence, int64_t known_blocks) const;
  void preempt(std::span<const size_t> streams);
  void admit(size_t n);
  // When it is time, or `at_once`: readers learn of what was pushed for them.
  void wake_readers(bool at_once);
  void run_round();
  void plan_round(const Schedule& schedule);
  void plan_drafts(std::span<const Schedule::Decode> decode);
  void observe(const RoundResult& result);
  void after_decode(size_t i, const DecodeResult& decoded, Clock::time_point now);
  void after_prefill(size_t i, const PrefillResult& prefilled, Clock::time_point now);
  void record_blocks(Sequence& sequence);
  void count_generated(Sequence& sequence);
  // Takes the pages back; the request itself learns of it in drop_ended, when every figure shows it.
  void end(Sequence& sequence, Finish reason);
  void drop_ended();
  void set_state();

  Round& round_;
  RoundCosts& costs_;
  Pages& pages_;
  Figures& figures_;
  const Tokenizer& tokenizer_;
  std::vector<int32_t> stop_ids_;
  BatchLimits limits_;

  std::map<Rank, std::unique_ptr<Sequence>> waiting_;
  std::vector<std::unique_ptr<Sequence>> running_;   // in the order admitted
  std::vector<std::unique_ptr<Sequence>> ended_;
  uint64_t n_rounds_ = 0;
  DraftHabits habits_;
  std::optional<Clock::time_point> last_end_;   // of the round before, when there was one
  Clock::time_point last_wake_{};               // of all readers
  double wake_seconds_ = 0;                     // that it takes

  // Of the round in hand
  std::vector<RunningView> running_views_;
  std::vector<WaitingView> waiting_views_;
  std::vector<const Sequence*> joining_;   // those of waiting_views_
  std::vector<Sequence*> decoding_, prefilling_;
  std::vector<DecodeTask> decode_tasks_;
  std::vector<PrefillTask> prefill_tasks_;
  DraftChoice choice_;
  spec::CutTables cut_;
  RoundFigures done_;
};

}  // namespace kdt
