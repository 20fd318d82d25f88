// The front of a round: what the host tells it. Nothing here waits for the backend.
#include <algorithm>

#include "runtime/round.h"

namespace kdt {
namespace {

// 1, 2, 3, 4, 6, 8, 12, 16 …
int64_t coarse(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return n <= power / 4 * 3 ? power / 4 * 3 : power;
}

// A chain needs the best candidate alone; no node of a tree has a rank past its budget.
int64_t candidates_of(const DecodePlan& plan) { return plan.spine && plan.budget <= plan.depths ? 1 : plan.budget; }

size_t bytes_of(const Stream& stream) {
  size_t words = stream.pages.size();
  if (stream.adjust)
    words += static_cast<size_t>(2 * stream.adjust->n_seen + 2 * stream.adjust->n_bias + stream.adjust->n_banned);
  return words * sizeof(int32_t);
}

}  // namespace

Round::Shape Round::lay_plan(const RoundPlan& plan) {
  Shape shape;
  lay_streams(plan, shape);
  lay_draft(plan.decode, shape);
  lay_prompts(plan, shape);
  shape.count_experts = plan.count_experts;
  // Recorded rounds have it in any case, so that those of fixed modes are the same: with no tree to cut it does nothing.
  shape.cut = shape.drafts > 0 && (plan.cut || records());
  if (shape.cut && plan.cut) {
    *in_.cut.host = *plan.cut;
    // The cut keeps to this, whatever the trees' own size.
    const int64_t rows = std::min<int64_t>(shape.rows, plan.cut->most_rows);
    shape.logits -= shape.rows - rows;
    shape.rows = shape.kept = rows;
  }
  fit(shape);
  return shape;
}

// Counts become capacities.
void Round::fit(Shape& shape) const {
  if (records()) widen(shape);
  for (int64_t* count : {&shape.drafts, &shape.streams, &shape.rows, &shape.kept}) *count = ops_.capacity(*count);
  shape.rows = std::min(shape.rows, limits_.max_rows);
  shape.kept = std::min(shape.kept, limits_.max_rows);
  shape.drafts = std::min(shape.drafts, limits_.max_streams);
  shape.streams = std::min(shape.streams, limits_.max_streams);
  shape.logits = std::min(shape.scored + ops_.capacity(shape.logits - shape.scored), limits_.max_rows);
  if (shape.candidates > 1) shape.candidates = std::min(ops_.capacity(shape.candidates), max_candidates_);
}

bool Round::recorded(int64_t streams, int64_t tree_nodes, int64_t room) const {
  Shape shape;
  shape.streams = streams;
  shape.drafts = tree_nodes > 0 ? streams : 0;
  shape.depths = tree_nodes > 0 ? max_depths() : 0;
  shape.candidates = tree_nodes;
  shape.cut = tree_nodes > 0;
  shape.rows = shape.logits = shape.kept = room;
  fit(shape);
  return is_recorded(shape.key(Work::round));
}

int64_t Round::wide_streams(int64_t streams) const { return records() && streams > 1 ? coarse(streams) : streams; }

int64_t Round::room(int64_t streams, int64_t nodes, int64_t other_rows) const {
  if (!records()) return std::min(streams * (nodes + 1) + other_rows, limits_.max_rows);
  const int64_t wide = wide_streams(streams), rows = wide * (nodes + 1) + other_rows;
  return std::min(ops_.capacity(wide > 1 ? coarse(rows) : rows), limits_.max_rows);
}

// Streams come and go, and their trees grow and shrink: rounds of several get few shapes, since recording one takes as long
// as some rounds. What is too much costs next to nothing: only live rows are worked on.
void Round::widen(Shape& shape) const {
  constexpr int64_t kFewest = 16;   // candidates: most trees need no more
  if (shape.candidates > 1) shape.candidates = std::max(kFewest, coarse(shape.candidates));
  if (shape.streams < 2) return;
  shape.streams = coarse(shape.streams);
  if (shape.drafts > 0) shape.drafts = shape.streams;
  shape.rows = coarse(shape.rows);
  shape.kept = coarse(shape.kept);
  shape.logits = shape.scored + coarse(shape.logits - shape.scored);
}

void Round::lay_streams(const RoundPlan& plan, Shape& shape) {
  const auto each = [&](const auto& f) {
    for (const DecodeTask& task : plan.decode) f(*task.stream);
    for (const PrefillTask& task : plan.prefill) f(*task.stream);
  };
  size_t bytes = 0;
  each([&](const Stream& stream) { bytes += bytes_of(stream); });
  lists_.begin(bytes);
  int64_t n = 0;
  each([&](const Stream& stream) {
    in_.pages[n] = {lists_.add(std::span<const int32_t>(stream.pages))};
    in_.sampling[n] = stream.sampling;
    LogitAdjust& adjust = in_.adjust[n++] = stream.adjust ? *stream.adjust : LogitAdjust{};
    shape.adjust |= adjust.changes();
    const auto copy = [&](auto*& list, int64_t size) { list = lists_.add(std::span(list, static_cast<size_t>(size))); };
    copy(adjust.seen, adjust.n_seen);
    copy(adjust.seen_count, adjust.n_seen);
    copy(adjust.bias_token, adjust.n_bias);
    copy(adjust.bias, adjust.n_bias);
    copy(adjust.banned, adjust.n_banned);
  });

  int64_t first = 0;
  for (size_t i = 0; i < plan.decode.size(); ++i) {
    const DecodeTask& task = plan.decode[i];
    const auto at = static_cast<int32_t>(first), budget = static_cast<int32_t>(task.plan.budget);
    in_.plan[static_cast<int64_t>(i)] = {task.stream->root,
                                         static_cast<int32_t>(task.stream->length),
                                         at,
                                         budget,
                                         -1,
                                         static_cast<int32_t>(task.plan.depths),
                                         task.plan.spine,
                                         task.plan.calibration,
                                         task.n_top >= 0};
    shape.n_top = std::max(shape.n_top, task.n_top);
    first += task.plan.budget + 1;
  }
  shape.streams = static_cast<int64_t>(plan.decode.size());
  shape.all_streams = n;
  shape.rows = shape.logits = shape.kept = first;
  *in_.counts.host = {static_cast<int32_t>(plan.decode.size()), 0, 0, 0};
}

void Round::lay_draft(std::span<const DecodeTask> tasks, Shape& shape) {
  int64_t n = 0;
  for (size_t i = 0; i < tasks.size(); ++i) {
    const DecodePlan& plan = tasks[i].plan;
    if (plan.budget <= 0) continue;
    const Stream& stream = *tasks[i].stream;
    in_.plan[static_cast<int64_t>(i)].draft = static_cast<int32_t>(n);
    in_.draft_pages[n] = in_.pages[static_cast<int64_t>(i)];
    in_.draft_sampling[n] = stream.sampling;
    if (!plan.noise_ranking) in_.draft_sampling[n].temperature = 0;
    in_.block_start[n++] = static_cast<int32_t>(stream.length);
    shape.depths = std::max(shape.depths, plan.depths);
    shape.candidates = std::max(shape.candidates, std::min(candidates_of(plan), max_candidates_));
  }
  shape.drafts = n;
  *in_.n_drafts.host = static_cast<int32_t>(n);
  *in_.n_block_rows.host = *in_.n_candidate_rows.host = 0;
  if (n == 0) return;
  if (records()) shape.depths = max_depths();   // a draft that is less deep takes as long, near enough
  const DraftConfig& config = drafter_->config();
  *in_.n_block_rows.host = static_cast<int32_t>(n * config.block_size);
  *in_.n_candidate_rows.host = static_cast<int32_t>(n * shape.depths);
  int64_t draft = 0;
  for (const DecodeTask& task : tasks) {
    if (task.plan.budget <= 0) continue;
    int32_t* block = in_.block_token.host + draft * config.block_size;
    std::fill_n(block, config.block_size, config.mask_token_id);
    block[0] = task.stream->root;
    for (int64_t d = 0; d < shape.depths; ++d) {
      const int64_t at = draft * shape.depths + d;
      in_.candidate_row[at] = static_cast<int32_t>(draft * config.block_size + 1 + d);
      in_.candidate_position[at] = in_.block_start[draft] + 1 + static_cast<int32_t>(d);
    }
    ++draft;
  }
}

void Round::lay_prompts(const RoundPlan& plan, Shape& shape) {
  RoundCounts& counts = *in_.counts.host;
  int32_t row = 0;
  for (size_t i = 0; i < plan.prefill.size(); ++i) {
    const PrefillTask& task = plan.prefill[i];
    for (size_t t = 0; t < task.tokens.size(); ++t, ++row) {
      in_.token[row] = task.tokens[t];
      in_.position[row] = in_.kept_position[row] = static_cast<int32_t>(task.stream->length + static_cast<int64_t>(t));
      in_.stream[row] = in_.kept_stream[row] = static_cast<int32_t>(plan.decode.size() + i);
      in_.parent[row] = -1;
      in_.visible[row] = in_.position[row] + 1;
      in_.kept_row[row] = row;
      const bool sampled = task.sample && t + 1 == task.tokens.size();
      if (sampled || !(task.logits || task.prompt_n_top >= 0)) continue;
      in_.scored_row[counts.n_scored] = counts.n_scored;
      in_.scored_token[counts.n_scored] = t < task.next.size() ? task.next[t] : -1;
      in_.logits_row[counts.n_scored++] = row;
    }
    shape.n_top = std::max({shape.n_top, task.prompt_n_top, task.sample ? task.n_top : -1});
  }
  counts.n_prompt = row;
  int32_t end = 0;   // of the task's rows
  for (const PrefillTask& task : plan.prefill) {
    end += static_cast<int32_t>(task.tokens.size());
    if (!task.sample) continue;
    const int32_t at = counts.n_scored + counts.n_prompt_samples;
    in_.logits_row[at] = end - 1;
    in_.scored_row[at] = at;
    in_.scored_token[at] = task.n_top >= 0 ? 0 : -1;
    in_.sample_token[counts.n_prompt_samples] = in_.token[end - 1];
    in_.sample_position[counts.n_prompt_samples] = in_.position[end - 1];
    in_.sample_stream[counts.n_prompt_samples] = in_.stream[end - 1];
    in_.sample_parent[counts.n_prompt_samples++] = -1;
  }
  shape.scored = counts.n_scored;
  shape.rows += counts.n_prompt;
  shape.kept += counts.n_prompt;
  shape.logits += counts.n_scored + counts.n_prompt_samples;
}

void Round::send() {
  lists_.send();
  ops_.send(in_.arrays.memory(), in_.arrays.bytes());
}

}  // namespace kdt
