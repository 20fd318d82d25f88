// The engine: a loaded model, its pages and its decode thread, which moves every request on, round by round. Of several ranks
// it is rank 0.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/batch.h"
#include "runtime/engine_options.h"
#include "runtime/engine_rank.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace kdt {

struct Health {
  bool failed = false, draining = false;
  int64_t running = 0, waiting = 0;
  double seconds_since_round = 0;        // since pending work last moved on; 0: nothing is pending
};

class Engine {
 public:
  Engine(const EngineOptions& options, const OpsFactory& make_ops);
  ~Engine();

  // Validates settings against the model and queues the request. Error(invalid_argument, context_length, queue_full,
  // shutting_down, engine_failed).
  std::shared_ptr<Request> submit(RequestSettings settings);
  // Logits [ids, vocab] of every position; takes its turn like a request. Error(cancelled) too.
  void score(std::span<const int32_t> ids, float* logits);

  // Takes nothing new from now on; waits until no request is left. Error(timeout).
  void drain(int32_t timeout_ms);
  void cancel_all();
  int64_t reset_prefix_cache();          // pages forgotten
  Health health() const;
  // Of a failed engine, else empty. Never changes once it is not.
  const std::string& failure() const { return failure_; }

  const Tokenizer& tokenizer() const { return tokenizer_; }
  std::vector<int32_t> encode_chat(std::string_view messages_json, std::string_view tools_json,
                                   std::optional<bool> thinking, bool preserve_thinking) const;
  bool thinks_by_default() const { return !options_.bundled; }   // a chat turn opens inside reasoning
  int64_t vocab_size() const { return configs_.model.vocab_size; }
  const std::string& info_json() const { return info_json_; }
  std::vector<Figure> figures() const { return figures_.read(); }

 private:
  struct Counts {
    int64_t running, waiting;            // waiting: the inbox included
    int64_t all() const { return running + waiting; }
  };
  Counts counts() const;                 // under mutex_

  void check_tokens(std::span<const int32_t> ids, const char* what) const;
  void check_settings(const RequestSettings& settings) const;
  void check_kv_tokens() const;
  void start(const OpsFactory& make_ops);
  std::shared_ptr<Request> enqueue(RequestSettings settings);
  std::string describe(double load_seconds, double measure_seconds) const;
  void run();
  bool take_inbox();                     // false: it is time to end
  void stop_ranks();
  void fail(const std::string& error);

  EngineOptions options_;
  EngineConfigs configs_;
  Tokenizer tokenizer_;
  std::vector<int32_t> stop_ids_;
  std::unique_ptr<RankThreads> others_;  // where ranks are threads of this process
  Communicator* comm_ = nullptr;         // null: one rank
  std::unique_ptr<EngineRank> rank_;     // rank 0
  std::unique_ptr<Pages> pages_;
  RoundCosts costs_;
  Figures figures_;
  std::unique_ptr<Batch> batch_;         // the decode thread's
  std::string info_json_;

  mutable std::mutex mutex_;
  std::condition_variable wake_, moved_; // for the decode thread; from it
  std::vector<std::shared_ptr<Request>> inbox_;
  std::vector<std::function<void()>> errands_;   // between two rounds
  uint64_t next_serial_ = 1, cancelled_serial_ = 0;
  std::chrono::steady_clock::time_point last_move_ = std::chrono::steady_clock::now();
  bool stop_ = false, draining_ = false;
  std::atomic<bool> failed_{false};
  std::string failure_;                  // written once, before failed_
  std::thread thread_;
};

}  // namespace kdt
