// The engine: a loaded model, its pages and its decode thread, which runs requests in the order submitted.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/config.h"
#include "model/dflash.h"
#include "model/kimi.h"
#include "ops/ops.h"
#include "runtime/controller.h"
#include "runtime/pages.h"
#include "runtime/request.h"
#include "runtime/round.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace kdt {

struct EngineOptions {
  std::string model_path, draft_path;    // draft_path empty: no drafter
  bool bundled = false;                  // the model shipped with the engine: thinking defaults to off
  int64_t max_context = 0;               // 0: the model's
  int64_t prefill_chunk = 512;
  int64_t max_budget = 1024;
  std::optional<ToolFormat> tool_format; // unset: by the checkpoint's family
};

// Makes the backend; the C ABI decides which.
using OpsFactory = std::function<std::unique_ptr<Ops>()>;

struct Figure {
  const char* name;
  double value;
};

class Engine {
 public:
  Engine(const EngineOptions& options, const OpsFactory& make_ops);
  ~Engine();

  // Validates settings against the model and queues the request. Error(invalid_argument, context_length, engine_failed).
  std::shared_ptr<Request> submit(RequestSettings settings);
  // Logits [ids, vocab] of every position; waits for its turn in the queue.
  void score(std::span<const int32_t> ids, float* logits);

  const Tokenizer& tokenizer() const { return tokenizer_; }
  std::vector<int32_t> encode_chat(std::string_view messages_json, std::string_view tools_json,
                                   std::optional<bool> thinking) const;
  int64_t vocab_size() const { return config_.vocab_size; }
  const std::string& info_json() const { return info_json_; }
  std::vector<Figure> figures() const;

 private:
  using Job = std::function<void()>;

  void check_tokens(std::span<const int32_t> ids, const char* what) const;
  std::string describe(double load_seconds, double measure_seconds) const;
  void enqueue(Job job);
  void run();
  void run_request(Request& request);
  Finish generate(Request& request, Stream& stream, Result& result, std::string& held_back);
  void count(const Result& result);

  EngineOptions options_;
  std::unique_ptr<Ops> ops_;
  ModelConfig config_;
  std::optional<DraftConfig> draft_config_;
  Tokenizer tokenizer_;
  std::vector<int32_t> stop_ids_;
  size_t target_bytes_ = 0, draft_bytes_ = 0;   // of the checkpoints
  int64_t max_context_;
  std::unique_ptr<Kimi> target_;
  std::unique_ptr<DFlash> drafter_;
  std::unique_ptr<Round> round_;
  std::unique_ptr<PagePool> pages_;
  RoundCosts costs_;
  std::string info_json_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> jobs_;
  Request* running_ = nullptr;
  bool stop_ = false;
  std::string failure_;                         // not empty: the engine takes no more work
  struct Totals {
    double requests = 0, prompt_tokens = 0, generated_tokens = 0, rounds = 0, drafted_rounds = 0, draft_nodes = 0,
           committed = 0;
    std::array<double, 5> finished{};           // by Finish
    StageSeconds time;
  } totals_;
  std::thread thread_;
};

}  // namespace kdt
