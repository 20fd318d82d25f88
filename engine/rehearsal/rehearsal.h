// One rank of a model that is not at hand: its kernels on its shapes with weights from nowhere, timed round by round, beside
// the bytes that each round must read. Nothing is summed over ranks; how long that would take may be waited for.
//
// A step is a verify pass over trees that are given, and the sampling of their nodes: recorded and replayed like a round's. A
// round is a round: draft, build, verify, sample, accept, commit. Experts are drawn anew for every replay (routing.h), and counted by
// the backend in a pass of its own that is not timed. Pages hold random numbers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/config.h"
#include "ops/ops.h"
#include "rehearsal/prefill.h"
#include "rehearsal/rehearsal_ops.h"

namespace kdt {

struct RehearsalPlan {
  std::string where;                 // of the config, for messages
  ModelConfig model;                 // of all ranks
  std::optional<DraftConfig> draft;
  int64_t tp = 1, rank = 0;
  int64_t layers = 0;                // only the first so many; 0: all
  std::vector<int64_t> nodes, prefixes, streams;   // steps: all combinations; nodes of each stream, its root included
  std::vector<double> overlaps;      // of a tree's experts; the first everywhere, the others where prefix and streams are the first
  bool routed = false;               // experts are the router's own choice
  std::vector<int64_t> round_nodes;  // rounds: with so many nodes a stream at most, for all prefixes and streams
  std::vector<int64_t> op_nodes;     // operations: of steps of so many nodes, for the first prefix and streams
  std::vector<int64_t> prompts, chunks;   // prefill: of prompts of so many tokens, in chunks of so many
  std::optional<Collectives> collectives;   // none: sums over ranks take what they take alone
  int64_t replays = 9;
  double seconds = 0;                // after loading: no measurement begins after so many; 0: no limit
  LoadProgress* progress = nullptr;  // of measurements
};

struct StepFigures {
  int64_t nodes, prefix, streams;
  double overlap;
  double experts = 0;                // distinct ones a layer, mean over layers and replays
  double expert_bytes = 0, weight_bytes = 0, kv_bytes = 0;   // read at least; weights without experts
  double median = 0, fastest = 0;    // seconds on the backend, from the submission to the last stage
  double collectives = 0;            // of it, waited for other ranks
  double wall = 0;                   // median seconds on the host, from sending to having waited
  StageSeconds stages = {};          // medians
  double bytes() const { return expert_bytes + weight_bytes + kv_bytes; }
};

struct OpFigures {
  std::string name;
  int64_t calls;                     // in a step
  double bytes;                      // read at least, all calls together
  double seconds;                    // all calls together, each between two marks, less what marks cost
  double saved;                      // by which a step without these calls is shorter
};

struct StepOps {
  int64_t nodes, prefix, streams;
  double mark_seconds;               // of one pair of marks
  double step_seconds;
  std::vector<OpFigures> ops;
};

struct RehearsalReport {
  std::string backend, instruction_set;
  int threads;
  ModelConfig model;                 // of the rank
  std::optional<DraftConfig> draft;
  int64_t max_context, max_rows, max_streams, n_pages;
  double read_bandwidth;             // bytes a second
  double load_seconds = 0, total_seconds = 0;
  size_t weight_bytes = 0, page_bytes = 0, buffer_bytes = 0, free_bytes = 0;   // free: after all of it
  std::vector<StepFigures> steps, rounds;
  std::vector<StepOps> ops;
  std::vector<PrefillFigures> prefill;
  int64_t left_out = 0;              // measurements there was no time for
  std::vector<int64_t> beyond_context;   // prefixes and prompts that are longer, and left out
};

// Errors name what is wrong with the plan, or how much memory it needs.
RehearsalReport rehearse(const RehearsalPlan& plan, const std::function<std::unique_ptr<Ops>()>& make_ops);

}  // namespace kdt
