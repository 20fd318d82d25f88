// A submitted generation: its settings, its event queue and its result. Shared by the decode thread and one reader.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "base/stage.h"
#include "ops/types.h"

namespace kdt {

enum class Speculate { automatic, off, chain, tree };
enum class Ranking { automatic, plain, noise };
enum class Finish { none, stop, length, cancelled, error };
const char* finish_name(Finish finish);

// Validated settings of one request.
struct RequestSettings {
  std::vector<int32_t> prompt;
  int64_t max_tokens = 128;
  Sampling sampling;
  Speculate speculate = Speculate::automatic;
  int64_t budget = 0;            // 0: the mode's default
  bool spine = false;
  bool ignore_eos = false;
  Ranking ranking = Ranking::automatic;
};

struct Event {
  bool finished = false;
  int32_t token = -1;
  std::string text;              // whole characters
};

struct Result {
  Finish finish = Finish::none;
  int64_t prompt_tokens = 0, generated_tokens = 0;
  int64_t rounds = 0, drafted_rounds = 0, draft_nodes = 0;
  int64_t committed = 0;         // by rounds, bonus tokens counted
  double decode_seconds = 0, first_token_seconds = 0;
  std::vector<int64_t> accepted_by_depth;
  StageSeconds time;
  std::string error;
};

class Request {
 public:
  using Clock = std::chrono::steady_clock;
  explicit Request(RequestSettings settings);

  const RequestSettings& settings() const { return settings_; }
  Clock::time_point submitted() const { return submitted_; }

  // The decode thread's side.
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  void push(std::vector<Event>& events);           // moves them out
  void update(const Result& result);
  void finish(const Result& result, std::string text);   // pushes FINISHED with what was held back

  // The reader's side.
  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }
  // Up to `most` events, waiting at most timeout_ms (-1: for ever). Empty after FINISHED was handed out; Error(timeout)
  // when nothing came. The returned events stay alive until the next call.
  const std::vector<Event>& next(size_t most, int32_t timeout_ms);
  Result result() const;

 private:
  const RequestSettings settings_;
  const Clock::time_point submitted_ = Clock::now();
  Clock::time_point last_wake_{};   // decode thread only
  std::atomic<bool> cancelled_{false};
  mutable std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Event> events_;
  bool done_ = false;            // FINISHED was pushed
  Result result_;
  std::vector<Event> handed_out_;
};

}  // namespace kdt
