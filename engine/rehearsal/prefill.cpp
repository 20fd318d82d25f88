#include "rehearsal/prefill.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "rehearsal/median.h"

namespace kdt {
namespace {

constexpr int64_t kReplays = 3;        // at most: they are long

struct Taken {
  double backend = 0, host = 0, watched = 0, weights = 0;
};

// Chunks of the prompt from the first on, or its last one alone.
Taken run_chunks(Round& round, RehearsalOps& ops, Stream stream, const std::vector<int32_t>& prompt, int64_t chunk, bool last_alone) {
  const auto tokens = static_cast<int64_t>(prompt.size());
  Taken taken;
  if (last_alone) stream.length = (tokens - 1) / chunk * chunk;
  while (stream.length < tokens) {
    const int64_t n = std::min(chunk, tokens - stream.length);
    PrefillTask task{&stream, std::span(prompt).subspan(static_cast<size_t>(stream.length), static_cast<size_t>(n))};
    task.sample = stream.length + n == tokens;
    StageSeconds stages;
    const auto start = std::chrono::steady_clock::now();
    round.run({{}, {&task, 1}, nullptr, false, true}, stages);
    taken.host += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    taken.backend += stages[Stage::prefill];
    taken.watched += ops.watched_seconds();
    for (const OpCalls& op : ops.calls())
      if (!op.name.starts_with("logits")) taken.weights += static_cast<double>(n) * op.cost.weights;
  }
  return taken;
}

}  // namespace

PrefillFigures measure_prefill(Round& round, RehearsalOps& ops, const ModelConfig& rank, const Stream& stream, int32_t first_token,
                               int64_t tokens, int64_t chunk, int64_t replays) {
  std::vector<int32_t> prompt;
  for (int64_t i = 0; i < tokens; ++i) prompt.push_back(first_token + static_cast<int32_t>(7919 * i % rank.vocab_size));
  run_chunks(round, ops, stream, prompt, chunk, true);   // what there is to record is recorded
  if (tokens > chunk) {
    const std::vector<int32_t> first(prompt.begin(), prompt.begin() + chunk + 1);
    run_chunks(round, ops, stream, first, chunk, false);
  }
  std::vector<double> seconds, wall;
  Taken taken;
  for (int64_t i = 0; i < std::min(replays, kReplays); ++i) {
    taken = run_chunks(round, ops, stream, prompt, chunk, false);
    seconds.push_back(taken.backend);
    wall.push_back(taken.host);
  }
  ops.watch(RehearsalOps::Watch::time, "mla_attention");
  run_chunks(round, ops, stream, prompt, chunk, true);
  const Taken watched = run_chunks(round, ops, stream, prompt, chunk, false);
  ops.watch(RehearsalOps::Watch::nothing);

  // A position sees itself and all before it: a score of kv_lora + rope, and kv_lora of values, in every head.
  const double seen = 0.5 * static_cast<double>(tokens) * static_cast<double>(tokens + 1);
  const double of_position = static_cast<double>(rank.n_layers * rank.n_heads * (2 * rank.kv_lora_rank + rank.qk_rope_dim));
  return {tokens, chunk, median(seconds), median(wall), watched.watched, 2 * (taken.weights + seen * of_position)};
}

}  // namespace kdt
