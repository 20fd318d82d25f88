#include "client.h"

#include <signal.h>

#include <array>
#include <nlohmann/json.hpp>

#include "failure.h"
#include "interrupt.h"
#include "load_bar.h"

namespace kdt {
namespace {

// How long a wait for events lasts before the interrupt flag is looked at again.
constexpr int32_t kPollMs = 50;

// `call(ids, capacity, &n)` is one of the functions that report the full count when the buffer is too small.
template <typename Call>
std::vector<int32_t> collect_ids(const Call& call, size_t guess) {
  std::vector<int32_t> ids(guess);
  int64_t n = 0;
  kdt_status status = call(ids.data(), static_cast<int64_t>(ids.size()), &n);
  if (status == KDT_ERR_BUFFER_TOO_SMALL) {
    ids.resize(static_cast<size_t>(n));
    status = call(ids.data(), n, &n);
  }
  check(status);
  ids.resize(static_cast<size_t>(n));
  return ids;
}

// Appends what has arrived within kPollMs to `out`; false once the request has finished.
bool take_events(kdt_request* request, Generation& out, std::string& fresh) {
  std::array<kdt_event, 64> events;
  int64_t n = 0;
  const kdt_status status = kdt_request_next(request, events.data(), events.size(), &n, kPollMs);
  if (status == KDT_ERR_TIMEOUT) return true;
  check(status);
  for (int64_t i = 0; i < n; ++i) {
    const kdt_event& event = events[static_cast<size_t>(i)];
    fresh.append(event.text, static_cast<size_t>(event.text_bytes));
    if (event.kind == KDT_EVENT_FINISHED) return false;
    out.ids.push_back(event.token_id);
  }
  return n > 0;
}

void read_result(kdt_request* request, Generation& out) {
  out.result = {};
  out.result.struct_size = sizeof(out.result);
  check(kdt_request_result(request, &out.result));
  if (out.result.n_depths > 0) {
    out.accepted_by_depth.assign(out.result.accepted_by_depth, out.result.accepted_by_depth + out.result.n_depths);
  }
  out.error = out.result.error;
  out.stop_string = out.result.stop_string;
  out.result.accepted_by_depth = nullptr;
  out.result.error = nullptr;
  out.result.stop_string = nullptr;
}

}  // namespace

void check(kdt_status status) {
  if (status != KDT_OK) throw Failure(kExitFailed, kdt_last_error());
}

void check_abi() {
  if (kdt_abi_version() != KDT_ABI_VERSION) {
    fail_run("libkdtree.so", "ABI " + std::to_string(kdt_abi_version()), "ABI " + std::to_string(KDT_ABI_VERSION));
  }
}

Engine::Engine(const kdt_engine_options& options) {
  kdt_engine* engine = nullptr;
  LoadBar bar;
  kdt_engine_options watched = options;
  watched.load_progress = bar.progress();
  check(kdt_engine_create(&watched, &engine));
  handle_.reset(engine);
}

bool is_follower() {
  int32_t rank = 0, n_ranks = 1;
  check(kdt_launched(&rank, &n_ranks));
  return rank > 0;
}

int follow(const kdt_engine_options& options) {
  // Ctrl-C reaches every process of the job: it is rank 0 that decides what becomes of it.
  signal(SIGINT, SIG_IGN);
  signal(SIGTERM, SIG_IGN);
  const Engine engine(options);
  check(kdt_engine_follow(engine.get()));
  return kExitOk;
}

std::vector<int32_t> Engine::tokenize(std::string_view text) const {
  return collect_ids(
      [&](int32_t* ids, int64_t capacity, int64_t* n) {
        return kdt_tokenize(get(), text.data(), static_cast<int64_t>(text.size()), ids, capacity, n);
      },
      text.size() / 2 + 1);
}

std::vector<int32_t> Engine::encode_chat(const std::string& messages_json, int32_t thinking) const {
  return collect_ids(
      [&](int32_t* ids, int64_t capacity, int64_t* n) {
        return kdt_chat_encode(get(), messages_json.c_str(), nullptr, thinking, 0, ids, capacity, n);
      },
      messages_json.size() / 2 + 16);
}

nlohmann::ordered_json Engine::info() const {
  const char* text = kdt_engine_info_json(get());
  nlohmann::ordered_json info = nlohmann::ordered_json::parse(text ? text : "", nullptr, false);
  if (!info.is_object()) fail_run("kdt_engine_info_json", text ? text : "", "a JSON object");
  return info;
}

Generation run_request(const Engine& engine, const kdt_request_options& options, const TextSink& sink) {
  const InterruptScope scope;
  kdt_request* raw = nullptr;
  check(kdt_request_submit(engine.get(), &options, &raw));
  const RequestHandle request(raw);
  Generation out;
  std::string fresh;
  bool listening = sink != nullptr;
  bool cancelled = false;
  for (bool running = true; running;) {
    fresh.clear();
    running = take_events(request.get(), out, fresh);
    out.text += fresh;
    const bool refused = listening && !fresh.empty() && !sink(fresh);
    if (refused) listening = false;
    if (running && !cancelled && (refused || interrupted())) {
      cancelled = true;
      check(kdt_request_cancel(request.get()));
    }
  }
  read_result(request.get(), out);
  return out;
}

std::string user_turn(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string out = R"([{"role": "user", "content": ")";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20) {
      out += "\\u00";
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
    } else {
      if (c == '"' || c == '\\') out += '\\';
      out += c;
    }
  }
  return out + "\"}]";
}

}  // namespace kdt
