#include "runtime/engine.h"

#include <algorithm>
#include <chrono>
#include <future>

#include "base/error.h"
#include "checkpoint/checkpoint.h"

namespace kdt {
namespace {

using Clock = std::chrono::steady_clock;

// When work is pending but cannot move, a reader that catches up is noticed after this.
constexpr auto kStuckPoll = std::chrono::milliseconds(2);

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Seconds in which rounds are measured at start: a tenth of what loading took, and more where rounds are recorded too.
double measure_limit(double load_seconds, bool records) { return std::clamp(load_seconds / 10, records ? 2.0 : 0.06, 5.0); }

std::vector<int32_t> stop_ids_of(const ModelConfig& config, const Tokenizer& tokenizer) {
  std::vector<int32_t> ids = config.eos_ids;
  for (const char* name : {"[EOS]", "<|im_end|>"})
    if (const auto id = tokenizer.special(name); id && std::find(ids.begin(), ids.end(), *id) == ids.end())
      ids.push_back(*id);
  return ids;
}

// INT4 weights and their scales of one expert in every layer that has them.
double expert_bytes_of(const ModelConfig& c) {
  const auto weights = static_cast<double>(3 * c.hidden_size * c.expert_width * (c.n_layers - c.n_dense_layers));
  return weights * (0.5 + 2.0 / static_cast<double>(c.quant_group_size));
}

}  // namespace

Engine::Engine(const EngineOptions& options, const OpsFactory& make_ops)
    : options_(options), configs_(load_configs(options)), tokenizer_(Tokenizer::load(options.model_path)) {
  if (tokenizer_.size() > configs_.model.vocab_size)
    kdt::fail(Status::bad_file, options.model_path + "/tiktoken.model", std::to_string(tokenizer_.size()) + " tokens",
              "at most vocab_size " + std::to_string(configs_.model.vocab_size));
  stop_ids_ = stop_ids_of(configs_.model, tokenizer_);
  check_kv_tokens();
  comm_ = options.comm;
  if (!comm_ && options.tp > 1) {
    others_ = std::make_unique<RankThreads>(options_, configs_, make_ops);
    comm_ = &others_->first();
  }
  try {
    start(make_ops);
  } catch (const std::exception& error) {
    if (comm_) comm_->fail(error.what());
    if (others_) others_->join();
    if (others_ && others_->failure()) std::rethrow_exception(others_->failure());
    throw;
  }
  thread_ = std::thread([this] { run(); });
}

void Engine::start(const OpsFactory& make_ops) {
  const auto start = Clock::now();
  rank_ = std::make_unique<EngineRank>(options_, configs_, make_ops, comm_);
  Round& round = rank_->round();
  pages_ = std::make_unique<Pages>(rank_->n_pages(), options_.prefix_cache);
  const double load_seconds = seconds_since(start);

  const auto measure_start = Clock::now();
  if (round.has_drafter() && configs_.max_context >= kPageTokens) {
    Stream stream;
    pages_->take(1, stream.pages);
    const double asked = options_.measure_seconds;
    costs_.measure(round, stream, asked > 0 ? asked : measure_limit(load_seconds, round.records()));
    pages_->give_back(stream.pages);
  }
  const double measure_seconds = seconds_since(measure_start);
  figures_.set_startup(load_seconds, measure_seconds, options_.tp);
  info_json_ = describe(load_seconds, measure_seconds);
  // Of one rank: what its backend reads.
  const double expert_bytes = expert_bytes_of(configs_.model) / static_cast<double>(options_.tp);
  const double dense_bytes = std::max(0.0, static_cast<double>(rank_->ops().weight_bytes()) -
                                               expert_bytes * static_cast<double>(configs_.model.n_experts));
  batch_ = std::make_unique<Batch>(round, costs_, *pages_, figures_, tokenizer_, stop_ids_,
                                   BatchLimits{options_.max_streams, options_.prefill_chunk, dense_bytes, expert_bytes,
                                               options_.on_clock});
}

Engine::~Engine() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    cancelled_serial_ = next_serial_;
  }
  wake_.notify_all();
  thread_.join();
}

void Engine::check_kv_tokens() const {
  check_argument(options_.kv_tokens == 0 || options_.kv_tokens >= configs_.max_context, "kv_tokens",
                 std::to_string(options_.kv_tokens),
                 "at least one context, " + std::to_string(configs_.max_context) + " tokens");
}

void Engine::check_tokens(std::span<const int32_t> ids, const char* what) const {
  check_argument(!ids.empty(), what, "empty", "at least one token");
  for (size_t i = 0; i < ids.size(); ++i)
    check_argument(ids[i] >= 0 && ids[i] < configs_.model.vocab_size, std::string(what) + "[" + std::to_string(i) + "]",
                   std::to_string(ids[i]), "a token id from 0 to " + std::to_string(configs_.model.vocab_size - 1));
}

void Engine::check_settings(const RequestSettings& s) const {
  check_tokens(s.prompt, "prompt");
  if (!s.bias_tokens.empty()) check_tokens(s.bias_tokens, "bias_tokens");
  if (!s.stop_tokens.empty()) check_tokens(s.stop_tokens, "stop_tokens");
  const auto n_prompt = static_cast<int64_t>(s.prompt.size());
  if (n_prompt + s.max_tokens > configs_.max_context)
    kdt::fail(Status::context_length, "prompt + max_tokens",
              std::to_string(n_prompt) + " + " + std::to_string(s.max_tokens) + " tokens",
              "at most " + std::to_string(configs_.max_context) + ", the context");
  const bool needs_drafter = s.speculate == Speculate::chain || s.speculate == Speculate::tree;
  check_argument(rank_->drafter() || !needs_drafter, "speculate", s.speculate == Speculate::chain ? "chain" : "tree",
                 "off or auto, since no drafter is loaded");
  check_argument(s.budget <= options_.max_budget, "budget", std::to_string(s.budget),
                 "at most max_budget " + std::to_string(options_.max_budget));
  check_argument(s.min_tokens <= s.max_tokens, "min_tokens", std::to_string(s.min_tokens),
                 "at most max_tokens " + std::to_string(s.max_tokens));
  const StopStrings stop_strings(s.stop);   // throws for what it cannot match
}

std::shared_ptr<Request> Engine::submit(RequestSettings settings) {
  check_settings(settings);
  return enqueue(std::move(settings));
}

std::shared_ptr<Request> Engine::enqueue(RequestSettings settings) {
  std::shared_ptr<Request> request;
  {
    std::lock_guard lock(mutex_);
    if (failed_) throw Error(Status::engine_failed, "engine: failed: " + failure_);
    if (draining_ || stop_)
      kdt::fail(Status::shutting_down, "engine", "draining", "an engine that takes requests");
    const Counts now = counts();
    // Those that have just come take a place within a round or two, as far as there are any.
    if (const int64_t most = options_.max_streams + options_.max_waiting; now.all() >= most)
      kdt::fail(Status::queue_full, "max_waiting", std::to_string(now.running) + " requests run and " + std::to_string(now.waiting) + " wait",
                "fewer than " + std::to_string(most) + " in all; try again later");
    request = std::make_shared<Request>(std::move(settings), next_serial_++);
    if (now.all() == 0) last_move_ = Clock::now();
    inbox_.push_back(request);
  }
  wake_.notify_one();
  return request;
}

// The figures show an end before the request itself does: who has seen one may count with the place.
Engine::Counts Engine::counts() const {
  const StateFigures state = figures_.state();
  return {state.running, state.waiting + static_cast<int64_t>(inbox_.size())};
}

void Engine::score(std::span<const int32_t> ids, float* logits) {
  check_tokens(ids, "ids");
  const auto n = static_cast<int64_t>(ids.size());
  if (n > configs_.max_context)
    kdt::fail(Status::context_length, "ids", std::to_string(n) + " tokens", "at most " + std::to_string(configs_.max_context));
  RequestSettings settings;
  settings.prompt.assign(ids.begin(), ids.end());
  settings.max_tokens = 0;
  settings.speculate = Speculate::off;
  settings.scores = logits;
  const auto request = enqueue(std::move(settings));
  while (!request->next(16, -1).empty()) {
  }
  const Result result = request->result();
  if (result.finish == Finish::cancelled) kdt::fail(Status::cancelled, "score", "cancelled", "to run to its end");
  if (result.finish == Finish::error) throw Error(Status::engine_failed, result.error);
}

void Engine::drain(int32_t timeout_ms) {
  std::unique_lock lock(mutex_);
  draining_ = true;
  const auto idle = [this] { return counts().all() == 0; };
  if (timeout_ms < 0) {
    moved_.wait(lock, idle);
  } else if (!moved_.wait_for(lock, std::chrono::milliseconds(timeout_ms), idle)) {
    throw Error(Status::timeout, "drain: " + std::to_string(counts().all()) + " requests are left after " +
                                     std::to_string(timeout_ms) + " ms");
  }
}

void Engine::cancel_all() {
  {
    std::lock_guard lock(mutex_);
    cancelled_serial_ = next_serial_;
  }
  wake_.notify_one();
}

int64_t Engine::reset_prefix_cache() {
  std::promise<int64_t> forgotten;
  {
    std::lock_guard lock(mutex_);
    if (failed_) throw Error(Status::engine_failed, "engine: failed: " + failure_);
    errands_.push_back([&] { forgotten.set_value(pages_->forget_idle()); });
  }
  wake_.notify_one();
  return forgotten.get_future().get();
}

Health Engine::health() const {
  std::lock_guard lock(mutex_);
  const Counts now = counts();
  return {failed_, draining_, now.running, now.waiting, now.all() > 0 ? seconds_since(last_move_) : 0.0};
}

std::vector<int32_t> Engine::encode_chat(std::string_view messages_json, std::string_view tools_json,
                                         std::optional<bool> thinking, bool preserve_thinking) const {
  ChatOptions options;
  options.tool_format = options_.tool_format.value_or(configs_.model.family == ModelFamily::k2_5 ? ToolFormat::typescript
                                                                                          : ToolFormat::json);
  options.thinking = thinking.value_or(!options_.bundled);
  options.preserve_thinking = preserve_thinking;
  return kdt::encode_chat(tokenizer_, render_chat(messages_json, tools_json, options));
}

bool Engine::take_inbox() {
  std::vector<std::function<void()>> errands;
  bool go_on = true;
  {
    std::lock_guard lock(mutex_);
    // From one to the other under the lock: each is counted once.
    std::vector<std::shared_ptr<Request>> requests = std::move(inbox_);
    inbox_.clear();
    for (auto& request : requests) batch_->add(std::move(request));
    errands.swap(errands_);
    go_on = !stop_ || counts().all() > 0;
  }
  for (const auto& errand : errands) errand();
  return go_on;
}

// The decode thread. After stop_ every request sees that it is cancelled, and the thread ends with the last of them.
void Engine::run() {
  for (;;) {
    bool moved = false;
    try {
      if (!take_inbox()) return stop_ranks();
      if (failed_) fail(failure_);
      uint64_t cancelled_serial = 0;
      {
        std::lock_guard lock(mutex_);
        cancelled_serial = cancelled_serial_;
      }
      moved = batch_->step(cancelled_serial);
      if (!failed_) rank_->round().keep_alive();
    } catch (const std::exception& error) {
      fail(error.what());
      moved = true;
    }
    std::unique_lock lock(mutex_);
    if (moved) last_move_ = Clock::now();
    const bool idle = counts().all() == 0;
    if (idle) moved_.notify_all();
    if (moved || !inbox_.empty() || !errands_.empty()) continue;
    const auto something = [this] { return stop_ || !inbox_.empty() || !errands_.empty(); };
    if (idle && (!comm_ || failed_)) {
      wake_.wait(lock, something);
    } else if (idle) {
      wake_.wait_for(lock, rank_->round().patience(), something);
    } else {
      wake_.wait_for(lock, kStuckPoll, something);
    }
  }
}

void Engine::fail(const std::string& error) {
  {
    std::lock_guard lock(mutex_);
    if (!failed_) failure_ = error;
    failed_ = true;
  }
  batch_->fail_all("engine: failed: " + failure_);
  if (comm_) comm_->fail(failure_);
}

// The decode thread's last act.
void Engine::stop_ranks() {
  try {
    if (!failed_) rank_->round().stop();
  } catch (const Error&) {   // nobody is left to tell
  }
}

}  // namespace kdt
