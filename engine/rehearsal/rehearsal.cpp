#include "rehearsal/rehearsal.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "base/error.h"
#include "checkpoint/partition.h"
#include "model/dflash.h"
#include "model/kimi.h"
#include "model/synthetic_weights.h"
#include "rehearsal/first_layers.h"
#include "rehearsal/median.h"
#include "rehearsal/rehearsal_ops.h"
#include "rehearsal/rehearsal_plan.h"
#include "rehearsal/routing.h"
#include "rehearsal/sample_tree.h"
#include "runtime/pages.h"
#include "runtime/round.h"

namespace kdt {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWarmUps = 2;
constexpr size_t kPatternBytes = 32 << 20;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double total(const StageSeconds& stages) { return std::accumulate(stages.seconds.begin(), stages.seconds.end(), 0.0); }

std::string gib(double bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f GiB", bytes * 0x1p-30);
  return text;
}

// Activations of the backend's own type, finite and of unit size.
std::vector<std::byte> random_activations(const Ops& ops) {
  std::vector<std::byte> pattern(kPatternBytes);
  uint32_t state = 1;
  const size_t size = ops.activation_bytes();
  for (size_t at = 0; at < pattern.size(); at += size) {
    state = state * 1664525u + 1013904223u;
    const float value = static_cast<float>(state >> 8) * 0x1p-23f - 1;
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    std::memcpy(pattern.data() + at, reinterpret_cast<const std::byte*>(&bits) + 4 - size, size);   // BF16: the upper half
  }
  return pattern;
}

}  // namespace

// One run, from the memory it takes to its figures.
class Rehearsal {
 public:
  Rehearsal(const RehearsalPlan& plan, const std::function<std::unique_ptr<Ops>()>& make_ops);
  RehearsalReport run();

 private:
  // What is measured: a pass over given trees, or a round.
  enum class Kind { step, round };
  struct Cell {
    Kind kind;
    int64_t nodes, prefix, streams;
    double overlap;
  };

  void check_memory();
  void load();
  bool in_time() {
    if (plan_.progress) ++plan_.progress->done;
    const bool yes = plan_.seconds == 0 || seconds_since(loaded_) < plan_.seconds;
    if (!yes) ++report_.left_out;
    return yes;
  }
  void set_up(const Cell& cell);
  void draw(const Cell& cell, int64_t replay);
  StageSeconds replay(const Cell& cell, bool count);
  StepFigures measure(const Cell& cell);
  StepOps measure_ops(const Cell& cell);
  double time_of(const Cell& cell, RehearsalOps::Watch how, const std::string& op);
  void add_steps(int64_t prefix, int64_t streams);
  void add_prefill();

  int64_t first_token() const { return plan_.rank * report_.model.vocab_size; }

  RehearsalPlan plan_;                   // without what is beyond the context
  ModelConfig model_;                    // of all ranks, with the layers that are wanted
  std::optional<DraftConfig> draft_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point loaded_;
  RehearsalReport report_;
  std::unique_ptr<RehearsalOps> ops_;
  std::unique_ptr<Kimi> target_;
  std::unique_ptr<DFlash> drafter_;
  std::unique_ptr<Round> round_;
  int64_t most_nodes_, n_moe_, chain_;
  Buffer table_;                         // [layers with experts][max_rows][k]
  std::vector<int32_t> drawn_;
  std::vector<Stream> streams_;          // of the cell
  std::vector<SampleTree> trees_;
  std::vector<int32_t> parent_;          // of every row of the cell, -1: a root
};

Rehearsal::Rehearsal(const RehearsalPlan& plan, const std::function<std::unique_ptr<Ops>()>& make_ops) : plan_(plan) {
  check_argument(!plan.nodes.empty() && !plan.prefixes.empty() && !plan.streams.empty() && !plan.overlaps.empty(), "rehearsal",
                 "an empty list", "nodes, prefixes, streams and overlaps");
  ModelConfig model = plan.model;
  std::optional<DraftConfig> draft = plan.draft;
  if (plan.layers > 0 && plan.layers <= model.n_layers) {
    model = first_layers(model, plan.layers);
    if (draft) draft = first_layers(*draft, plan.layers);
  }
  most_nodes_ = std::max({largest(plan.nodes), largest(plan.round_nodes), largest(plan.op_nodes)});
  check_argument(plan.prompts.empty() || !plan.chunks.empty(), "chunks", "none", "some, for the prompts");
  const int64_t block = draft ? draft->block_size : 0;
  report_.beyond_context = leave_out(plan_.prefixes, "prefixes", model.max_context - most_nodes_ - block);
  for (const int64_t length : leave_out(plan_.prompts, "prompts", model.max_context - block)) report_.beyond_context.push_back(length);
  const int64_t most_tokens = std::max(largest(plan_.prefixes) + most_nodes_, largest(plan_.prompts)) + block;
  check_plan(plan, model);
  const Partition partition = make_partition(model, draft ? &*draft : nullptr, plan.tp);   // names what tp does not divide
  model_ = model;
  report_.model = rank_config(model, plan.tp);
  if (draft) {
    // Tokens are those whose embeddings the rank has, the mask too: rows of the others are zeros.
    draft->mask_token_id = static_cast<int32_t>(first_token() + draft->mask_token_id % report_.model.vocab_size);
    draft_ = draft;
    report_.draft = rank_config(*draft, plan.tp);
  }
  report_.max_context = pages_for(most_tokens) * kPageTokens;
  report_.max_streams = largest(plan.streams);
  report_.max_rows = std::max(report_.max_streams * most_nodes_, std::min(largest(plan_.chunks), largest(plan_.prompts)));
  report_.n_pages = report_.max_streams * pages_for(most_tokens);
  report_.weight_bytes = static_cast<size_t>(partition.rank_bytes());
  n_moe_ = report_.model.n_layers - report_.model.n_dense_layers;
  chain_ = block > 1 ? block - 1 : 7;
  ops_ = std::make_unique<RehearsalOps>(make_ops());
  if (plan.collectives) ops_->emulate(*plan.collectives);
  report_.backend = ops_->backend();
  report_.instruction_set = ops_->instruction_set();
  report_.threads = ops_->threads();
}

// Before anything is loaded: what is known of it must fit.
void Rehearsal::check_memory() {
  const ModelConfig& c = report_.model;
  const int64_t rows = report_.max_rows;
  size_t page = ops_->latent_page_bytes(c.kv_lora_rank, c.qk_rope_dim) * static_cast<size_t>(c.n_layers);
  if (report_.draft)
    page += ops_->draft_page_bytes(report_.draft->n_kv_heads, report_.draft->head_dim) * report_.draft->layers.size();
  report_.page_bytes = page * static_cast<size_t>(report_.n_pages);
  const size_t buffers =
      static_cast<size_t>(rows) * (4 * static_cast<size_t>(model_.vocab_size) + 16 * ops_->activation_bytes() * static_cast<size_t>(c.hidden_size)) +
      ops_->attention_work_bytes(rows, c.n_heads, c.kv_lora_rank + c.qk_rope_dim, report_.max_context) +
      ops_->vocabulary_work_bytes(rows, model_.vocab_size, std::min(most_nodes_, model_.vocab_size)) +
      ops_->experts_scratch_bytes(rows, c.n_experts_per_token, c.n_experts, c.expert_width, c.n_shared_experts * c.expert_width,
                                  c.hidden_size);
  const double wanted = static_cast<double>(report_.weight_bytes + report_.page_bytes + buffers);
  const auto free = static_cast<double>(ops_->free_bytes());
  if (wanted > free)
    fail(Status::out_of_memory, "memory of the " + report_.backend + " backend",
         gib(wanted) + " wanted (weights " + gib(static_cast<double>(report_.weight_bytes)) + ", pages " +
             gib(static_cast<double>(report_.page_bytes)) + "), " + gib(free) + " free",
         "that much to be free: fewer layers, prefixes or streams, or more ranks");
}

void Rehearsal::load() {
  const size_t free_before = ops_->free_bytes();
  const auto start = Clock::now();
  const ModelConfig& c = report_.model;
  {
    const SyntheticWeights weights(*ops_, plan_.where);
    target_ = std::make_unique<Kimi>(*ops_, model_, weights, report_.max_rows, report_.max_context,
                                     draft_ ? draft_->target_layer_ids : std::vector<int64_t>{}, RankSlice{plan_.rank, plan_.tp});
    if (draft_)
      drafter_ = std::make_unique<DFlash>(*ops_, *draft_, weights, *target_, report_.max_rows, report_.max_context,
                                          report_.max_streams);
  }
  report_.weight_bytes = ops_->weight_bytes();
  round_ = std::make_unique<Round>(*ops_, *target_, drafter_.get(),
                                   RoundLimits{report_.max_rows, most_nodes_, report_.max_context, report_.n_pages, report_.max_streams});
  round_->fill_pages(random_activations(*ops_));
  drawn_.resize(static_cast<size_t>(std::max<int64_t>(1, n_moe_) * report_.max_rows * c.n_experts_per_token));
  table_ = ops_->allocate(drawn_.size() * sizeof(int32_t));
  report_.page_bytes = round_->cache_bytes();
  report_.free_bytes = ops_->free_bytes();
  const size_t taken = free_before > report_.free_bytes ? free_before - report_.free_bytes : 0;
  const size_t known = report_.weight_bytes + report_.page_bytes;
  report_.buffer_bytes = taken > known ? taken - known : 0;
  report_.load_seconds = seconds_since(start);
}

// Streams whose pages lie between each other's, and a tree behind each.
void Rehearsal::set_up(const Cell& cell) {
  const int64_t vocab = report_.model.vocab_size, pages = report_.n_pages / report_.max_streams;
  streams_.clear();
  trees_.clear();
  parent_.clear();
  for (int64_t s = 0; s < cell.streams; ++s) {
    Stream& stream = streams_.emplace_back();
    for (int64_t i = 0; i < pages; ++i) stream.pages.push_back(static_cast<int32_t>((pages - 1 - i) * report_.max_streams + s));
    stream.length = cell.prefix;
    const SampleTree& tree = trees_.emplace_back(cell.nodes, chain_, first_token(), vocab, s);
    stream.root = tree.token[0];
    const auto first = static_cast<int32_t>(parent_.size());
    for (const int32_t above : tree.parent) parent_.push_back(above < 0 ? -1 : first + above);
  }
}

void Rehearsal::draw(const Cell& cell, int64_t replay) {
  if (plan_.routed || n_moe_ == 0) return ops_->choose(nullptr, 0);
  const ModelConfig& c = report_.model;
  const int64_t stride = report_.max_rows * c.n_experts_per_token;
  draw_experts({n_moe_, c.n_experts, c.n_experts_per_token, cell.overlap, static_cast<uint32_t>(replay)}, parent_, stride, drawn_.data());
  ops_->copy_in(table_, 0, drawn_.data(), drawn_.size() * sizeof(int32_t));
  ops_->choose(table_.as<int32_t>(), stride);
}

StageSeconds Rehearsal::replay(const Cell& cell, bool count) {
  StageSeconds stages;
  if (cell.kind == Kind::step) {
    std::vector<GivenTree> given;
    for (size_t i = 0; i < trees_.size(); ++i) given.push_back({&streams_[i], trees_[i].view()});
    return round_->verify_given(given, count);
  }
  std::vector<Stream> streams = streams_;   // they move on
  std::vector<DecodeTask> tasks;
  for (Stream& stream : streams) {
    DecodeTask& task = tasks.emplace_back();
    task.stream = &stream;
    task.plan.budget = cell.nodes - 1;
    task.plan.depths = cell.nodes > 1 ? report_.draft->block_size - 1 : 0;
  }
  round_->run({tasks, {}, nullptr, count, true}, stages);
  return stages;
}

StepFigures Rehearsal::measure(const Cell& cell) {
  const ModelConfig& c = report_.model;
  StepFigures out{cell.nodes, cell.prefix, cell.streams, cell.overlap};
  set_up(cell);
  std::vector<double> device, wall;
  std::vector<StageSeconds> stages;
  double experts = 0;
  for (int64_t i = -kWarmUps; i < plan_.replays; ++i) {
    draw(cell, i + kWarmUps);
    replay(cell, true);
    double distinct = 0;
    for (const int32_t n : round_->distinct_experts()) distinct += n;
    const auto start = Clock::now();
    const StageSeconds of_replay = replay(cell, false);
    const double on_host = seconds_since(start);
    if (i < 0) continue;
    experts += distinct / static_cast<double>(plan_.replays);
    wall.push_back(on_host);
    device.push_back(total(of_replay));
    stages.push_back(of_replay);
  }
  out.experts = experts / static_cast<double>(std::max<int64_t>(1, n_moe_));
  out.expert_bytes = experts * ops_->expert_bytes();
  for (const OpCalls& op : ops_->calls()) {
    out.weight_bytes += op.cost.bytes;
    out.collectives += op.cost.pause;
  }
  const auto tokens = static_cast<double>(cell.prefix * cell.streams * static_cast<int64_t>(ops_->activation_bytes()));
  out.kv_bytes = tokens * static_cast<double>(c.n_layers * (c.kv_lora_rank + c.qk_rope_dim));
  if (cell.kind == Kind::round && cell.nodes > 1)
    for (const DraftLayer& layer : report_.draft->layers) {
      const double seen = layer.window > 0 ? static_cast<double>(std::min(layer.window, cell.prefix)) / static_cast<double>(cell.prefix) : 1;
      out.kv_bytes += tokens * seen * static_cast<double>(2 * report_.draft->n_kv_heads * report_.draft->head_dim);
    }
  out.median = median(device);
  out.fastest = *std::min_element(device.begin(), device.end());
  out.wall = median(wall);
  for (size_t s = 0; s < kStages; ++s) {
    std::vector<double> of_stage;
    for (const StageSeconds& one : stages) of_stage.push_back(one.seconds[s]);
    out.stages.seconds[s] = median(of_stage);
  }
  return out;
}

// Of a step in which one operation is watched: the time of its calls, or of all the step.
double Rehearsal::time_of(const Cell& cell, RehearsalOps::Watch how, const std::string& op) {
  ops_->watch(how, op);
  ops_->record(false);
  replay(cell, false);                   // makes the marks
  ops_->record(true);
  std::vector<double> seconds;
  for (int64_t i = -1; i < plan_.replays; ++i) {
    draw(cell, i + kWarmUps);            // as when the step was measured
    const StageSeconds stages = replay(cell, false);
    const bool calls = how == RehearsalOps::Watch::time || how == RehearsalOps::Watch::gaps;
    if (i >= 0) seconds.push_back(calls ? stages[RehearsalOps::kWatched] : total(stages));
  }
  ops_->watch(RehearsalOps::Watch::nothing);
  return median(seconds);
}

StepOps Rehearsal::measure_ops(const Cell& cell) {
  using Watch = RehearsalOps::Watch;
  const StepFigures step = measure(cell);
  StepOps out{cell.nodes, cell.prefix, cell.streams, 0, step.median, {}};
  const std::vector<OpCalls> calls = ops_->calls();
  for (const OpCalls& op : calls) {
    if (op.name != "route" && op.name != "latent_write") continue;   // either is in every layer or most
    out.mark_seconds = time_of(cell, Watch::gaps, op.name) / static_cast<double>(op.calls);
  }
  for (const OpCalls& op : calls) {
    double bytes = op.cost.bytes;
    if (op.name == "experts") bytes += step.expert_bytes;
    if (op.name == "mla_attention") bytes += step.kv_bytes;
    const double timed = time_of(cell, Watch::time, op.name) - static_cast<double>(op.calls) * out.mark_seconds;
    out.ops.push_back({op.name, op.calls, bytes, timed, step.median - time_of(cell, Watch::leave_out, op.name)});
  }
  return out;
}

void Rehearsal::add_steps(int64_t prefix, int64_t streams) {
  for (const int64_t nodes : plan_.nodes)
    if (in_time()) report_.steps.push_back(measure({Kind::step, nodes, prefix, streams, plan_.overlaps.front()}));
  for (const int64_t nodes : plan_.round_nodes)
    if (in_time()) report_.rounds.push_back(measure({Kind::round, nodes, prefix, streams, plan_.overlaps.front()}));
}

void Rehearsal::add_prefill() {
  for (const int64_t tokens : plan_.prompts)
    for (const int64_t chunk : plan_.chunks) {
      if (!prefills(tokens, chunk, plan_.chunks) || !in_time()) continue;
      const Cell cell{Kind::step, std::min(tokens, chunk), 0, 1, 0};
      set_up(cell);
      parent_.assign(static_cast<size_t>(cell.nodes), -1);
      draw(cell, 0);
      report_.prefill.push_back(measure_prefill(*round_, *ops_, report_.model, streams_.front(), static_cast<int32_t>(first_token()),
                                                tokens, cell.nodes, plan_.replays));
    }
}

// What says most comes first: there may not be time for all of it.
RehearsalReport Rehearsal::run() {
  check_memory();
  report_.read_bandwidth = ops_->read_bandwidth();
  load();
  loaded_ = Clock::now();
  if (plan_.progress) plan_.progress->total = measurements(plan_);
  const int64_t prefix = plan_.prefixes.front(), streams = plan_.streams.front();
  for (const int64_t n : plan_.streams)
    for (const int64_t p : plan_.prefixes) {
      add_steps(p, n);
      if (n != streams || p != prefix) continue;
      for (const int64_t nodes : plan_.op_nodes)
        if (in_time()) report_.ops.push_back(measure_ops({Kind::step, nodes, prefix, streams, plan_.overlaps.front()}));
      for (size_t i = 1; i < plan_.overlaps.size(); ++i)
        for (const int64_t nodes : plan_.nodes)
          if (nodes > 1 && in_time()) report_.steps.push_back(measure({Kind::step, nodes, prefix, streams, plan_.overlaps[i]}));
    }
  add_prefill();
  report_.total_seconds = seconds_since(start_);
  return std::move(report_);
}

RehearsalReport rehearse(const RehearsalPlan& plan, const std::function<std::unique_ptr<Ops>()>& make_ops) {
  return Rehearsal(plan, make_ops).run();
}

}  // namespace kdt
