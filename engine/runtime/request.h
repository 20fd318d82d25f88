// A submitted generation: its settings, its bounded event queue and its result. Shared by the decode thread and one reader.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/stage.h"
#include "ops/types.h"

namespace kdt {

enum class Speculate { automatic, off, chain, tree };
enum class Ranking { automatic, plain, noise };
enum class Finish { none, stop, length, cancelled, error };
constexpr size_t kFinishes = 5;
const char* finish_name(Finish finish);

// Validated settings of one request.
struct RequestSettings {
  std::vector<int32_t> prompt;
  int64_t max_tokens = 128;
  int64_t min_tokens = 0;
  Sampling sampling;
  float repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  std::vector<int32_t> bias_tokens;
  std::vector<float> bias_values;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_tokens;   // beside the model's own
  int64_t logprobs = -1;              // -1: none; else how many of the top beside the token's own
  int64_t prompt_logprobs = -1;
  Speculate speculate = Speculate::automatic;
  int64_t budget = 0;                 // 0: the mode's default
  bool spine = false;
  bool ignore_eos = false;
  bool skip_special_tokens = false;   // they have no text
  Ranking ranking = Ranking::automatic;
  int32_t priority = 0;               // lower first
  std::chrono::milliseconds timeout{0};   // from submit; 0: none
  float* scores = nullptr;            // not null: no generation, the logits [prompt, vocab] go here
};

enum class EventKind { token, finished, prompt_token };

struct Event {
  EventKind kind = EventKind::token;
  int32_t token = -1;
  std::string text;                   // whole characters
  float logprob = std::numeric_limits<float>::quiet_NaN();
  std::vector<int32_t> top_tokens;
  std::vector<float> top_logprobs;
};

struct Result {
  Finish finish = Finish::none;
  int64_t prompt_tokens = 0, cached_tokens = 0, generated_tokens = 0;
  int64_t rounds = 0, drafted_rounds = 0, draft_nodes = 0;
  int64_t committed = 0;              // by rounds, bonus tokens counted
  int64_t preemptions = 0;
  double queue_seconds = 0, first_token_seconds = 0, decode_seconds = 0, total_seconds = 0;
  std::vector<int64_t> accepted_by_depth;
  StageSeconds time;                  // of the rounds it took part in
  int32_t stop_token = -1;
  std::string stop_string;
  std::string error;
};

class Request {
 public:
  using Clock = std::chrono::steady_clock;
  // Events that may wait for their reader before the stream is left out of rounds.
  static constexpr size_t kMaxEvents = 4096;

  Request(RequestSettings settings, uint64_t serial);
  ~Request();
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  const RequestSettings& settings() const { return settings_; }
  uint64_t serial() const { return serial_; }        // in the order submitted
  Clock::time_point submitted() const { return submitted_; }

  // The decode thread's side.
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  bool late(Clock::time_point now) const { return settings_.timeout.count() > 0 && now >= submitted_ + settings_.timeout; }
  bool full() const;
  void push(std::vector<Event>& events);             // moves them out; a reader that sleeps is not woken
  void wake();                                       // what was pushed is noticed now
  void update(const Result& result);
  void finish(const Result& result, std::string text);   // pushes FINISHED with what was held back

  // The reader's side.
  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }
  // Up to `most` events, waiting at most timeout_ms (-1: for ever). Empty after FINISHED was handed out; Error(timeout)
  // when nothing came. The returned events stay alive until the next call.
  const std::vector<Event>& next(size_t most, int32_t timeout_ms);
  Result result() const;
  // Polls readable while next() would not wait. Owned by the request.
  int descriptor();

 private:
  void mark_readable();                              // under mutex_

  const RequestSettings settings_;
  const uint64_t serial_;
  const Clock::time_point submitted_ = Clock::now();
  std::atomic<bool> cancelled_{false};
  mutable std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Event> events_;
  bool unannounced_ = false;     // events came after the reader was last woken
  int descriptor_ = -1;          // an eventfd, once asked for
  bool readable_ = false;        // its state
  bool done_ = false;            // FINISHED was pushed
  Result result_;
  std::vector<Event> handed_out_;
};

}  // namespace kdt
