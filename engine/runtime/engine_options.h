// What an engine is made from.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/checkpoint.h"
#include "comm/communicator.h"
#include "ops/ops.h"
#include "text/chat.h"

namespace kdt {

struct EngineOptions {
  std::string model_path, draft_path;    // draft_path empty: no drafter
  bool bundled = false;                  // the model shipped with the engine: thinking defaults to off
  int64_t max_context = 0;               // 0: the model's
  int64_t prefill_chunk = 512;
  int64_t max_budget = 1024;
  int64_t max_streams = 64;
  int64_t max_waiting = 1024;
  int64_t kv_tokens = 0;                 // 0: a context for every stream, within a quarter of the memory
  bool prefix_cache = true;
  std::optional<ToolFormat> tool_format; // unset: by the checkpoint's family
  LoadOptions load;
  double measure_seconds = 0;            // to measure what rounds cost in; 0: little beside the loading
  bool on_clock = true;                  // false: the backend's rounds say what they take elsewhere
  // Tensor-parallel ranks: threads of this process, or, with a communicator (which outlives the engine), processes of which
  // this one is comm->rank(). An engine is rank 0; the others are Followers.
  int64_t tp = 1;
  Communicator* comm = nullptr;
  Communicator::Deadline rank_deadline{10000};   // of one meeting of ranks in a round
};

// Makes the backend of one rank, which meets the others through the communicator (null: there are none). Called on the rank's
// own thread. The C ABI decides which backend.
using OpsFactory = std::function<std::unique_ptr<Ops>(Communicator*)>;

}  // namespace kdt
