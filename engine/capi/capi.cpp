// The C ABI (include/kdtree.h) over the runtime. extern "C" lives in this folder and nowhere else.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>

#include "base/stage.h"
#include "capi/arguments.h"
#include "capi/backend.h"
#include "capi/bundled.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "comm/mpi_comm.h"
#include "cpu/cpu_ops.h"
#include "include/kdtree.h"
#include "rehearsal/replay_ops.h"
#include "runtime/engine.h"

using kdt::Status;
using kdt::check_argument;
using kdt::capi::copy_options;
using kdt::capi::guarded;
using kdt::capi::hand_out;

namespace kdt::capi {

std::string& last_error() {
  thread_local std::string message;
  return message;
}

namespace {

std::optional<ToolFormat> tool_format(const char* name) {
  const std::string_view format = name ? name : "auto";
  if (format == "auto") return std::nullopt;
  if (format == "json") return ToolFormat::json;
  if (format == "typescript") return ToolFormat::typescript;
  fail(Status::invalid_argument, "chat_format", format, "auto, json or typescript");
}

EngineOptions engine_options(const kdt_engine_options& o) {
  EngineOptions options;
  if (o.model_path) {
    check_argument(*o.model_path != 0, "model_path", "empty", "a checkpoint directory");
    options.model_path = o.model_path;
    options.draft_path = o.draft_path ? o.draft_path : "";
  } else {
    const BundledPaths bundled = bundled_paths();
    options.model_path = bundled.model;
    options.draft_path = o.draft_path ? o.draft_path : bundled.draft;
    options.bundled = true;
  }
  options.max_context = in_range("max_context", o.max_context, 0, INT32_MAX);
  options.prefill_chunk = in_range("prefill_chunk", o.prefill_chunk, 0, 4096);
  if (options.prefill_chunk == 0) options.prefill_chunk = 512;
  options.max_budget = in_range("max_budget", o.max_budget, 0, 1024);
  if (options.max_budget == 0) options.max_budget = 1024;
  options.max_streams = in_range("max_streams", o.max_streams, 0, 64);
  if (options.max_streams == 0) options.max_streams = 64;
  options.max_waiting = in_range("max_waiting", o.max_waiting, 0, 65536);
  if (options.max_waiting == 0) options.max_waiting = 1024;
  options.kv_tokens = in_range("kv_tokens", o.kv_tokens, 0, int64_t{1} << 40);
  options.prefix_cache = o.no_prefix_cache == 0;
  options.tool_format = tool_format(o.chat_format);
  options.load.mode = o.load_direct == 0 ? ReadMode::mapped : ReadMode::direct;
  options.load.checksums = o.no_checksums == 0;
  if (o.load_progress) options.load.progress = &o.load_progress->progress;
  options.tp = std::max<int64_t>(1, in_range("tp", o.tp, 0, 64));
  const int64_t deadline = in_range("rank_deadline_ms", o.rank_deadline_ms, 0, INT32_MAX);
  if (deadline > 0) options.rank_deadline = Communicator::Deadline(deadline);
  return options;
}

constexpr double kReplayMeasureSeconds = 5;   // a pass of 512 rows on a CPU, too

// Rounds count as long as those of the report.
OpsFactory replayed(const OpsFactory& make, const char* path) {
  return [make, costs = load_replay_costs(path)](Communicator* comm) {
    std::unique_ptr<Ops> real = make(comm);
    check_argument(!comm && std::string_view(real->backend()) == "cpu", "replay_path",
                   comm ? "with ranks" : std::string("on backend ") + real->backend(), "one rank of the CPU backend");
    return std::make_unique<ReplayOps>(std::move(real), costs);
  };
}

struct Launched {
  int32_t rank = 0, n_ranks = 1;
};

Launched launched() {
  if (!under_mpi_launcher()) return {};
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  return {rank ? std::atoi(rank) : 0, std::max(1, std::atoi(std::getenv("OMPI_COMM_WORLD_SIZE")))};
}

// Rank 0 is an engine, every other rank follows one.
void create(const kdt_engine_options& o, kdt_engine& handle) {
  handle.backend = choose_backend(o);
  EngineOptions options = engine_options(o);
  if (o.replay_path) {
    handle.backend = replayed(handle.backend, o.replay_path);
    options.measure_seconds = kReplayMeasureSeconds;
    options.on_clock = false;
  }
  const Launched here = o.launched ? launched() : Launched{};
  if (here.n_ranks > 1) {
    check_argument(o.tp == 0 || o.tp == here.n_ranks, "tp", std::to_string(o.tp),
                   std::to_string(here.n_ranks) + ", the ranks of the launcher");
    options.tp = here.n_ranks;
    handle.comm = make_mpi_communicator(options.rank_deadline);
    options.comm = handle.comm.get();
  }
  try {
    if (here.rank == 0) handle.engine = std::make_unique<Engine>(options, handle.backend);
    else handle.follower = std::make_unique<Follower>(options, handle.backend);
  } catch (const std::exception& error) {
    if (handle.comm) handle.comm->fail(error.what());   // the others wait for this rank to load
    throw;
  }
}

}  // namespace
}  // namespace kdt::capi

namespace capi = kdt::capi;

extern "C" {

int32_t kdt_abi_version(void) { return KDT_ABI_VERSION; }

const char* kdt_version(void) { return KDT_VERSION; }

const char* kdt_status_name(kdt_status status) {
  switch (status) {
    case KDT_OK: return "KDT_OK";
    case KDT_ERR_INVALID_ARGUMENT: return "KDT_ERR_INVALID_ARGUMENT";
    case KDT_ERR_BAD_FILE: return "KDT_ERR_BAD_FILE";
    case KDT_ERR_IO: return "KDT_ERR_IO";
    case KDT_ERR_OUT_OF_MEMORY: return "KDT_ERR_OUT_OF_MEMORY";
    case KDT_ERR_CONTEXT_LENGTH: return "KDT_ERR_CONTEXT_LENGTH";
    case KDT_ERR_UNSUPPORTED: return "KDT_ERR_UNSUPPORTED";
    case KDT_ERR_CANCELLED: return "KDT_ERR_CANCELLED";
    case KDT_ERR_TIMEOUT: return "KDT_ERR_TIMEOUT";
    case KDT_ERR_BUFFER_TOO_SMALL: return "KDT_ERR_BUFFER_TOO_SMALL";
    case KDT_ERR_ENGINE_FAILED: return "KDT_ERR_ENGINE_FAILED";
    case KDT_ERR_INTERNAL: return "KDT_ERR_INTERNAL";
    case KDT_ERR_QUEUE_FULL: return "KDT_ERR_QUEUE_FULL";
    case KDT_ERR_SHUTTING_DOWN: return "KDT_ERR_SHUTTING_DOWN";
    default: return "KDT_ERR_UNKNOWN";
  }
}

const char* kdt_last_error(void) { return capi::last_error().c_str(); }

kdt_status kdt_engine_options_init(kdt_engine_options* options, uint32_t struct_size) {
  return guarded([&] {
    check_argument(options != nullptr, "options", "NULL", "a struct");
    check_argument(struct_size >= sizeof(uint32_t) && struct_size <= 4096, "struct_size", std::to_string(struct_size),
                   "sizeof(kdt_engine_options)");
    std::memset(options, 0, struct_size);
    options->struct_size = struct_size;
  });
}

kdt_status kdt_engine_create(const kdt_engine_options* options, kdt_engine** out) {
  return guarded([&] {
    check_argument(out != nullptr, "out", "NULL", "a place for the engine");
    *out = nullptr;
    kdt_engine_options known{};
    copy_options(options, known);
    auto handle = std::make_unique<kdt_engine>();
    capi::create(known, *handle);
    *out = handle.release();
  });
}

void kdt_engine_destroy(kdt_engine* engine) { delete engine; }

const char* kdt_engine_info_json(kdt_engine* engine) {
  if (!engine) return "{}";
  return engine->engine ? engine->engine->info_json().c_str() : engine->follower->info_json().c_str();
}

kdt_status kdt_launched(int32_t* rank, int32_t* n_ranks) {
  return guarded([&] {
    check_argument(rank != nullptr && n_ranks != nullptr, "rank", "NULL", "places for the two numbers");
    const capi::Launched here = capi::launched();
    *rank = here.rank;
    *n_ranks = here.n_ranks;
  });
}

kdt_status kdt_engine_follow(kdt_engine* engine) {
  return guarded([&] {
    check_argument(engine != nullptr && engine->follower != nullptr, "engine", engine ? "rank 0" : "NULL",
                   "an engine of another rank");
    engine->follower->follow();
  });
}

const char* kdt_cpu_targets(void) {
  static const std::string names = [] {
    std::string joined;
    for (const std::string& name : kdt::cpu_targets()) joined += (joined.empty() ? "" : " ") + name;
    return joined;
  }();
  return names.c_str();
}

const char* kdt_devices_json(void) {
  thread_local std::string json;
  const kdt_status status = guarded([&] { json = capi::devices_json(); });
  return status == KDT_OK ? json.c_str() : "{\"devices\": [], \"error\": \"out of memory\"}";
}

kdt_status kdt_tokenize(kdt_engine* engine, const char* text, int64_t text_bytes, int32_t* ids, int64_t capacity, int64_t* n) {
  return guarded([&] {
    check_argument(text != nullptr || text_bytes == 0, "text", "NULL", "UTF-8 text");
    capi::in_range("text_bytes", text_bytes, 0, int64_t{1} << 40);
    const auto tokens = capi::engine_of(engine).tokenizer().encode({text, static_cast<size_t>(text_bytes)});
    hand_out(tokens.data(), tokens.size(), ids, capacity, n);
  });
}

kdt_status kdt_detokenize(kdt_engine* engine, const int32_t* ids, int64_t n_ids, char* bytes, int64_t capacity, int64_t* n) {
  return guarded([&] {
    check_argument(ids != nullptr || n_ids == 0, "ids", "NULL", "token ids");
    capi::in_range("n_ids", n_ids, 0, int64_t{1} << 40);
    const std::string text = capi::engine_of(engine).tokenizer().decode({ids, static_cast<size_t>(n_ids)});
    hand_out(text.data(), text.size(), bytes, capacity, n);
  });
}

kdt_status kdt_chat_encode(kdt_engine* engine, const char* messages_json, const char* tools_json, int32_t thinking,
                           int32_t preserve_thinking, int32_t* ids, int64_t capacity, int64_t* n) {
  return guarded([&] {
    check_argument(messages_json != nullptr, "messages", "NULL", "a JSON array of messages");
    capi::in_range("thinking", thinking, KDT_THINKING_DEFAULT, KDT_THINKING_ON);
    const auto tokens = capi::engine_of(engine).encode_chat(
        messages_json, tools_json ? tools_json : "",
        thinking == KDT_THINKING_DEFAULT ? std::nullopt : std::optional<bool>(thinking == KDT_THINKING_ON),
        preserve_thinking != 0);
    hand_out(tokens.data(), tokens.size(), ids, capacity, n);
  });
}

const char* kdt_finish_name(int32_t finish_reason) {
  return finish_reason >= KDT_FINISH_NONE && finish_reason <= KDT_FINISH_ERROR
             ? kdt::finish_name(static_cast<kdt::Finish>(finish_reason))
             : "unknown";
}

const char* kdt_stage_name(int32_t stage) {
  return stage >= 0 && stage < KDT_N_STAGES ? kdt::kStageNames[static_cast<size_t>(stage)] : "unknown";
}

kdt_status kdt_engine_score(kdt_engine* engine, const int32_t* ids, int64_t n_ids, float* logits, int64_t capacity, int64_t* n) {
  return guarded([&] {
    check_argument(n != nullptr, "n", "NULL", "a place for the count");
    check_argument(ids != nullptr, "ids", "NULL", "token ids");
    capi::in_range("n_ids", n_ids, 1, INT32_MAX);
    *n = n_ids * capi::engine_of(engine).vocab_size();
    if (*n > capacity) kdt::fail(Status::buffer_too_small, "capacity", std::to_string(capacity), "at least " + std::to_string(*n));
    check_argument(logits != nullptr, "logits", "NULL", "float [n_ids, vocab]");
    capi::engine_of(engine).score({ids, static_cast<size_t>(n_ids)}, logits);
  });
}

}  // extern "C"
