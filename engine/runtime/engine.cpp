#include "runtime/engine.h"

#include <algorithm>
#include <chrono>
#include <future>

#include "base/error.h"
#include "checkpoint/checkpoint.h"
#include "runtime/emit.h"

namespace kdt {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::vector<int32_t> stop_ids_of(const ModelConfig& config, const Tokenizer& tokenizer) {
  std::vector<int32_t> ids = config.eos_ids;
  for (const char* name : {"[EOS]", "<|im_end|>"})
    if (const auto id = tokenizer.special(name); id && std::find(ids.begin(), ids.end(), *id) == ids.end())
      ids.push_back(*id);
  return ids;
}

}  // namespace

Engine::Engine(const EngineOptions& options, const OpsFactory& make_ops)
    : options_(options), config_(load_model_config(options.model_path)),
      tokenizer_(Tokenizer::load(options.model_path)) {
  const auto start = Clock::now();
  if (tokenizer_.size() > config_.vocab_size)
    fail(Status::bad_file, options.model_path + "/tiktoken.model", std::to_string(tokenizer_.size()) + " tokens",
         "at most vocab_size " + std::to_string(config_.vocab_size));
  if (!options.draft_path.empty()) {
    draft_config_ = load_draft_config(options.draft_path);
    check_draft_fits(*draft_config_, config_, options.draft_path);
  }
  max_context_ = options.max_context > 0 ? options.max_context : config_.max_context;
  check_argument(max_context_ <= config_.max_context, "max_context", std::to_string(max_context_),
                 "at most the model's " + std::to_string(config_.max_context));
  stop_ids_ = stop_ids_of(config_, tokenizer_);

  ops_ = make_ops();
  const int64_t max_rows = std::max({options.prefill_chunk, options.max_budget + 1, spec::CostTable::kRows.back()});
  const Checkpoint checkpoint = Checkpoint::open(options.model_path);
  target_bytes_ = checkpoint.bytes();
  target_ = std::make_unique<Kimi>(*ops_, config_, checkpoint, max_rows, max_context_,
                                   draft_config_ ? draft_config_->target_layer_ids : std::vector<int64_t>{});
  if (draft_config_) {
    const Checkpoint draft = Checkpoint::open_draft(options.draft_path);
    draft_bytes_ = draft.bytes();
    drafter_ = std::make_unique<DFlash>(*ops_, *draft_config_, draft, *target_, max_rows, max_context_);
  }
  const int64_t n_pages = pages_for(max_context_);
  round_ = std::make_unique<Round>(*ops_, *target_, drafter_.get(),
                                   RoundLimits{max_rows, options.max_budget, max_context_, n_pages});
  pages_ = std::make_unique<PagePool>(n_pages);
  const double load_seconds = seconds_since(start);

  const auto measure_start = Clock::now();
  Stream stream;
  if (drafter_ && max_context_ >= kPageTokens) {
    stream.pages = pages_->take(1);
    costs_.measure(*round_, stream);
    pages_->give_back(stream.pages);
  }
  info_json_ = describe(load_seconds, seconds_since(measure_start));
  thread_ = std::thread([this] { run(); });
}

Engine::~Engine() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    if (running_) running_->cancel();
  }
  wake_.notify_all();
  thread_.join();
}

void Engine::check_tokens(std::span<const int32_t> ids, const char* what) const {
  check_argument(!ids.empty(), what, "empty", "at least one token");
  for (size_t i = 0; i < ids.size(); ++i)
    check_argument(ids[i] >= 0 && ids[i] < config_.vocab_size, std::string(what) + "[" + std::to_string(i) + "]",
                   std::to_string(ids[i]), "a token id from 0 to " + std::to_string(config_.vocab_size - 1));
}

std::shared_ptr<Request> Engine::submit(RequestSettings settings) {
  check_tokens(settings.prompt, "prompt");
  const auto n_prompt = static_cast<int64_t>(settings.prompt.size());
  if (n_prompt + settings.max_tokens > max_context_)
    fail(Status::context_length, "prompt + max_tokens",
         std::to_string(n_prompt) + " + " + std::to_string(settings.max_tokens) + " tokens",
         "at most " + std::to_string(max_context_) + ", the context");
  const bool needs_drafter = settings.speculate == Speculate::chain || settings.speculate == Speculate::tree;
  check_argument(drafter_ || !needs_drafter, "speculate", settings.speculate == Speculate::chain ? "chain" : "tree",
                 "off or auto, since no drafter is loaded");
  check_argument(settings.budget <= options_.max_budget, "budget", std::to_string(settings.budget),
                 "at most max_budget " + std::to_string(options_.max_budget));
  auto request = std::make_shared<Request>(std::move(settings));
  enqueue([this, request] { run_request(*request); });
  return request;
}

void Engine::score(std::span<const int32_t> ids, float* logits) {
  check_tokens(ids, "ids");
  const auto n = static_cast<int64_t>(ids.size());
  if (n > max_context_)
    fail(Status::context_length, "ids", std::to_string(n) + " tokens", "at most " + std::to_string(max_context_));
  std::promise<void> done;
  enqueue([&] {
    Stream stream;
    try {
      stream.pages = pages_->take(pages_for(n));
      StageSeconds time;
      for (int64_t at = 0; at < n; at += options_.prefill_chunk) {
        const auto chunk = static_cast<size_t>(std::min(options_.prefill_chunk, n - at));
        round_->prefill(stream, ids.subspan(static_cast<size_t>(at), chunk), false, logits + at * config_.vocab_size, time);
      }
      pages_->give_back(stream.pages);
      done.set_value();
    } catch (...) {
      pages_->give_back(stream.pages);
      done.set_exception(std::current_exception());
    }
  });
  done.get_future().get();
}

std::vector<int32_t> Engine::encode_chat(std::string_view messages_json, std::string_view tools_json,
                                         std::optional<bool> thinking) const {
  ChatOptions options;
  options.tool_format = options_.tool_format.value_or(config_.family == ModelFamily::k2_5 ? ToolFormat::typescript
                                                                                          : ToolFormat::json);
  options.thinking = thinking.value_or(!options_.bundled);
  return kdt::encode_chat(tokenizer_, render_chat(messages_json, tools_json, options));
}

void Engine::enqueue(Job job) {
  {
    std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw Error(Status::engine_failed, "engine: failed: " + failure_);
    jobs_.push_back(std::move(job));
  }
  wake_.notify_one();
}

// The decode thread. After stop_, jobs left over still run: requests see that they are cancelled and finish at once.
void Engine::run() {
  for (;;) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    job();
  }
}

void Engine::run_request(Request& request) {
  Result result = request.result();
  Stream stream;
  std::string held_back;
  {
    std::lock_guard lock(mutex_);
    running_ = &request;
    if (stop_) request.cancel();
    if (!failure_.empty()) result.error = "engine: failed: " + failure_;
  }
  if (!result.error.empty()) {
    result.finish = Finish::error;
  } else {
    try {
      result.finish = generate(request, stream, result, held_back);
    } catch (const std::exception& error) {
      result.finish = Finish::error;
      result.error = error.what();
      std::lock_guard lock(mutex_);
      failure_ = result.error;
    }
  }
  pages_->give_back(stream.pages);
  {
    std::lock_guard lock(mutex_);
    running_ = nullptr;
  }
  count(result);
  request.finish(result, std::move(held_back));
}

Finish Engine::generate(Request& request, Stream& stream, Result& result, std::string& held_back) {
  const RequestSettings& settings = request.settings();
  const auto n_prompt = static_cast<int64_t>(settings.prompt.size());
  stream.sampling = settings.sampling;
  // A draft may run past max_tokens, though never past the context.
  const int64_t most = std::min(max_context_, n_prompt + settings.max_tokens + round_->max_depths());
  stream.pages = pages_->take(pages_for(most));
  Emitter emitter(request, tokenizer_, stop_ids_);
  const std::span<const int32_t> prompt = settings.prompt;
  for (int64_t at = 0; at < n_prompt; at += options_.prefill_chunk) {
    if (request.cancelled()) return Finish::cancelled;
    const auto chunk = static_cast<size_t>(std::min(options_.prefill_chunk, n_prompt - at));
    const bool last = at + static_cast<int64_t>(chunk) == n_prompt;
    round_->prefill(stream, prompt.subspan(static_cast<size_t>(at), chunk), last, nullptr, result.time);
  }
  const auto decode_start = Clock::now();
  result.first_token_seconds = std::chrono::duration<double>(decode_start - request.submitted()).count();
  Finish finish = emitter.push({&stream.root, 1});
  result.generated_tokens = emitter.emitted();
  Controller controller(costs_, settings, *round_);
  while (finish == Finish::none) {
    if (request.cancelled()) {
      finish = Finish::cancelled;
      break;
    }
    const DecodePlan plan = controller.plan(settings.max_tokens - emitter.emitted(), most - 1 - stream.length);
    const DecodeResult decoded = round_->decode(stream, plan, result.time);
    controller.observe(decoded);
    StageClock clock(result.time);
    ++result.rounds;
    result.drafted_rounds += decoded.draft_seconds > 0;
    result.draft_nodes += decoded.tree.n_nodes;
    result.committed += static_cast<int64_t>(decoded.tokens.size());
    const size_t accepted = decoded.path.size() - 1;
    if (result.accepted_by_depth.size() < accepted) result.accepted_by_depth.resize(accepted);
    for (size_t depth = 0; depth < accepted; ++depth) ++result.accepted_by_depth[depth];
    finish = emitter.push(decoded.tokens);
    result.generated_tokens = emitter.emitted();
    clock.end(Stage::emit);
    result.decode_seconds = seconds_since(decode_start);
    request.update(result);
  }
  held_back = emitter.flush();
  return finish;
}

void Engine::count(const Result& result) {
  std::lock_guard lock(mutex_);
  totals_.requests += 1;
  totals_.prompt_tokens += static_cast<double>(result.prompt_tokens);
  totals_.generated_tokens += static_cast<double>(result.generated_tokens);
  totals_.rounds += static_cast<double>(result.rounds);
  totals_.drafted_rounds += static_cast<double>(result.drafted_rounds);
  totals_.draft_nodes += static_cast<double>(result.draft_nodes);
  totals_.committed += static_cast<double>(result.committed);
  totals_.finished[static_cast<size_t>(result.finish)] += 1;
  for (size_t i = 0; i < kStages; ++i) totals_.time.seconds[i] += result.time.seconds[i];
}

}  // namespace kdt
