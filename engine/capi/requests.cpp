// The C ABI of one generation: options, submit, events, result.
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>

#include "base/stage.h"
#include "capi/arguments.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "include/kdtree.h"
#include "runtime/engine.h"

using kdt::check_argument;
using kdt::capi::copy_options;
using kdt::capi::guarded;

// Keeps what it needs of the engine alive by itself: handles may be destroyed in any order.
struct kdt_request {
  std::shared_ptr<kdt::Request> request;
  std::vector<int64_t> accepted_by_depth;   // borrowed by kdt_result, as the strings
  std::string error, stop_string;
};

namespace kdt::capi {
namespace {

Request& request_of(kdt_request* handle) {
  check_argument(handle != nullptr && handle->request != nullptr, "request", "NULL", "a request");
  return *handle->request;
}

// Defaults that are not zero.
kdt_request_options default_request_options() {
  kdt_request_options defaults{};
  defaults.max_tokens = 128;
  defaults.top_p = 1;
  defaults.repetition_penalty = 1;
  defaults.logprobs = -1;
  defaults.prompt_logprobs = -1;
  return defaults;
}

// `n` elements at `from`, at most `most`.
template <class T>
std::vector<T> copied(const char* field, const T* from, int64_t n, int64_t least, int64_t most) {
  in_range((std::string("n_") + field).c_str(), n, least, most);
  check_argument(n == 0 || from != nullptr, field, "NULL", "an array of " + std::to_string(n));
  return n == 0 ? std::vector<T>() : std::vector<T>(from, from + n);
}

void read_penalties(const kdt_request_options& o, RequestSettings& s) {
  s.repetition_penalty = static_cast<float>(real_in_range("repetition_penalty", o.repetition_penalty, 0.0, 10.0, true));
  s.presence_penalty = static_cast<float>(real_in_range("presence_penalty", o.presence_penalty, -2.0, 2.0));
  s.frequency_penalty = static_cast<float>(real_in_range("frequency_penalty", o.frequency_penalty, -2.0, 2.0));
  s.bias_tokens = copied("bias_tokens", o.bias_tokens, o.n_bias, 0, 1024);
  s.bias_values = copied("bias_values", o.bias_values, o.n_bias, 0, 1024);
  for (size_t i = 0; i < s.bias_values.size(); ++i)
    real_in_range(("bias_values[" + std::to_string(i) + "]").c_str(), static_cast<double>(s.bias_values[i]), -100.0, 100.0);
  std::vector<int32_t> sorted = s.bias_tokens;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) fail(Status::invalid_argument, "bias_tokens", std::to_string(*twice) + " twice", "each token once");
}

void read_stops(const kdt_request_options& o, RequestSettings& s) {
  const auto strings = copied("stop", o.stop, o.n_stop, 0, static_cast<int64_t>(kMaxStopStrings));
  for (size_t i = 0; i < strings.size(); ++i) {
    check_argument(strings[i] != nullptr, "stop[" + std::to_string(i) + "]", "NULL", "a string");
    s.stop.emplace_back(strings[i], strnlen(strings[i], kMaxStopBytes + 1));
  }
  s.stop_tokens = copied("stop_tokens", o.stop_tokens, o.n_stop_tokens, 0, 256);
}

RequestSettings settings_of(const kdt_request_options& o) {
  RequestSettings s;
  s.prompt = copied("prompt", o.prompt, o.n_prompt, 1, INT32_MAX);
  s.prompt_logprobs = in_range("prompt_logprobs", o.prompt_logprobs, -1, 20);
  s.logprobs = in_range("logprobs", o.logprobs, -1, 20);
  s.max_tokens = in_range("max_tokens", o.max_tokens, s.prompt_logprobs >= 0 ? 0 : 1, INT32_MAX);
  s.min_tokens = in_range("min_tokens", o.min_tokens, 0, INT32_MAX);
  s.sampling.temperature = real_in_range("temperature", o.temperature, 0.0, 100.0);
  s.sampling.top_p = real_in_range("top_p", o.top_p, 0.0, 1.0, true);
  s.sampling.min_p = real_in_range("min_p", o.min_p, 0.0, 1.0);
  s.sampling.top_k = static_cast<int32_t>(in_range("top_k", o.top_k, 0, INT32_MAX));
  s.sampling.choice = o.choice;
  if (o.has_seed) {
    s.sampling.seed = o.seed;
  } else {
    std::random_device random;
    s.sampling.seed = (static_cast<uint64_t>(random()) << 32) | random();
  }
  read_penalties(o, s);
  read_stops(o, s);
  s.speculate = static_cast<Speculate>(in_range("speculate", o.speculate, KDT_SPECULATE_AUTO, KDT_SPECULATE_TREE));
  s.budget = in_range("budget", o.budget, 0, 1024);
  s.spine = o.spine != 0;
  s.ignore_eos = o.ignore_eos != 0;
  s.skip_special_tokens = o.skip_special_tokens != 0;
  s.ranking = static_cast<Ranking>(in_range("ranking", o.ranking, KDT_RANKING_AUTO, KDT_RANKING_NOISE));
  s.priority = o.priority;
  s.timeout = std::chrono::milliseconds(in_range("timeout_ms", o.timeout_ms, 0, INT32_MAX));
  return s;
}

}  // namespace
}  // namespace kdt::capi

namespace capi = kdt::capi;

extern "C" {

kdt_status kdt_request_options_init(kdt_request_options* options, uint32_t struct_size) {
  return guarded([&] {
    check_argument(options != nullptr, "options", "NULL", "a struct");
    check_argument(struct_size >= sizeof(uint32_t) && struct_size <= 4096, "struct_size", std::to_string(struct_size),
                   "sizeof(kdt_request_options)");
    const kdt_request_options defaults = capi::default_request_options();
    std::memset(options, 0, struct_size);
    std::memcpy(options, &defaults, std::min<size_t>(struct_size, sizeof defaults));
    options->struct_size = struct_size;
  });
}

kdt_status kdt_request_submit(kdt_engine* engine, const kdt_request_options* options, kdt_request** out) {
  return guarded([&] {
    check_argument(out != nullptr, "out", "NULL", "a place for the request");
    *out = nullptr;
    kdt_request_options known = capi::default_request_options();
    copy_options(options, known);
    auto handle = std::make_unique<kdt_request>();
    handle->request = capi::engine_of(engine).submit(capi::settings_of(known));
    *out = handle.release();
  });
}

kdt_status kdt_request_next(kdt_request* request, kdt_event* events, int64_t capacity, int64_t* n, int32_t timeout_ms) {
  return guarded([&] {
    check_argument(n != nullptr, "n", "NULL", "a place for the count");
    *n = 0;
    check_argument(events != nullptr, "events", "NULL", "an array of events");
    capi::in_range("capacity", capacity, 1, int64_t{1} << 30);
    capi::in_range("timeout_ms", timeout_ms, -1, INT32_MAX);
    for (const kdt::Event& event : capi::request_of(request).next(static_cast<size_t>(capacity), timeout_ms)) {
      constexpr int32_t kKinds[] = {KDT_EVENT_TOKEN, KDT_EVENT_FINISHED, KDT_EVENT_PROMPT_TOKEN};
      events[(*n)++] = {kKinds[static_cast<size_t>(event.kind)], event.token, event.text.c_str(),
                        static_cast<int64_t>(event.text.size()), event.logprob,
                        static_cast<int32_t>(event.top_tokens.size()), event.top_tokens.data(), event.top_logprobs.data()};
    }
  });
}

kdt_status kdt_request_fd(kdt_request* request, int32_t* fd) {
  return guarded([&] {
    check_argument(fd != nullptr, "fd", "NULL", "a place for the descriptor");
    *fd = -1;
    *fd = capi::request_of(request).descriptor();
  });
}

kdt_status kdt_request_cancel(kdt_request* request) {
  return guarded([&] { capi::request_of(request).cancel(); });
}

void kdt_request_destroy(kdt_request* request) {
  if (request && request->request) request->request->cancel();
  delete request;
}

kdt_status kdt_request_result(kdt_request* request, kdt_result* result) {
  return guarded([&] {
    check_argument(result != nullptr, "result", "NULL", "a struct");
    const kdt::Request& r = capi::request_of(request);
    const kdt::Result from = r.result();
    request->accepted_by_depth = from.accepted_by_depth;
    request->error = from.error;
    request->stop_string = from.stop_string;
    kdt_result known{};
    known.struct_size = result->struct_size;
    known.finish_reason = static_cast<int32_t>(from.finish);
    known.prompt_tokens = from.prompt_tokens;
    known.generated_tokens = from.generated_tokens;
    known.rounds = from.rounds;
    known.drafted_rounds = from.drafted_rounds;
    known.draft_nodes = from.draft_nodes;
    const auto rounds = static_cast<double>(from.rounds);
    known.tokens_per_round = from.rounds > 0 ? static_cast<double>(from.committed) / rounds : 0;
    // The first token is prefill's: what decoding yielded is the rest.
    if (from.decode_seconds > 0)
      known.tokens_per_second = static_cast<double>(from.generated_tokens - 1) / from.decode_seconds;
    known.first_token_ms = from.first_token_seconds * 1e3;
    known.seed = r.settings().sampling.seed;
    known.n_depths = static_cast<int64_t>(from.accepted_by_depth.size());
    known.accepted_by_depth = request->accepted_by_depth.data();
    for (size_t i = 0; i < kdt::kStages; ++i) known.timings_ms[i] = from.time.seconds[i] * 1e3;
    known.error = request->error.c_str();
    known.cached_tokens = from.cached_tokens;
    known.preemptions = from.preemptions;
    known.queue_ms = from.queue_seconds * 1e3;
    known.total_ms = from.total_seconds * 1e3;
    known.stop_token = from.stop_token;
    known.stop_string = request->stop_string.c_str();
    check_argument(result->struct_size >= sizeof(uint32_t), "struct_size", std::to_string(result->struct_size),
                   "sizeof(kdt_result)");
    std::memcpy(result, &known, std::min<size_t>(result->struct_size, sizeof known));
  });
}

}  // extern "C"
