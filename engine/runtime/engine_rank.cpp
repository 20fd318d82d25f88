#include "runtime/engine_rank.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "checkpoint/checksum.h"
#include "checkpoint/partition.h"
#include "checkpoint/rank_slices.h"
#include "comm/thread_comm.h"
#include "model/weights.h"
#include "runtime/pages.h"

namespace kdt {
namespace {

// Ranks read hundreds of gigabytes at rates of their own: until all are there they wait for each other this long.
constexpr std::chrono::minutes kLoadDeadline{60};

// Every rank has the same `mine`, or those that do not are named, on all ranks alike.
void demand_same(Communicator& comm, const std::string& what, const std::string& mine) {
  constexpr size_t kMost = 256;
  std::vector<char> all(kMost * static_cast<size_t>(comm.size())), own(kMost);
  mine.copy(own.data(), kMost - 1);
  comm.all_gather(own.data(), kMost, all.data());
  for (int rank = 1; rank < comm.size(); ++rank) {
    const char* theirs = all.data() + static_cast<size_t>(rank) * kMost;
    if (std::strcmp(theirs, all.data()) != 0)
      fail(Status::unsupported, "rank " + std::to_string(rank) + ": " + what, theirs,
           std::string(all.data()) + ", as rank 0 has");
  }
}

std::string file_sum(const std::string& path) {
  const std::string text = file_exists(path) ? read_text_file(path, size_t{1} << 26) : "";
  return checksum_of(text.data(), text.size());
}

}  // namespace

EngineConfigs load_configs(const EngineOptions& options) {
  EngineConfigs out{load_model_config(options.model_path), std::nullopt, options.max_context};
  if (!options.draft_path.empty()) {
    out.draft = load_draft_config(options.draft_path);
    check_draft_fits(*out.draft, out.model, options.draft_path);
  }
  if (out.max_context == 0) out.max_context = out.model.max_context;
  check_argument(out.max_context <= out.model.max_context, "max_context", std::to_string(out.max_context),
                 "at most the model's " + std::to_string(out.model.max_context));
  // INT4 tiles too: one rank needs none.
  if (options.tp > 1) make_partition(out.model, out.draft ? &*out.draft : nullptr, options.tp);
  return out;
}

EngineRank::EngineRank(const EngineOptions& options, const EngineConfigs& configs, const OpsFactory& make_ops,
                       Communicator* comm)
    : comm_(comm), ops_(make_ops(comm)) {
  LoadOptions load = options.load;
  if (comm) {
    load.rank = comm->rank();
    load.tp = comm->size();
    comm->set_deadline(kLoadDeadline);
    compare(options, configs);
  }
  const int64_t max_rows = std::max(options.prefill_chunk + options.max_streams + options.max_budget,
                                    spec::CostTable::kOneStream);
  const RankCheckpoints checkpoints = open_rank(options.model_path, options.draft_path, load);
  target_bytes_ = checkpoints.target.bytes();
  target_ = std::make_unique<Kimi>(*ops_, configs.model, WeightReader(checkpoints.target, *ops_), max_rows, configs.max_context,
                                   configs.draft ? configs.draft->target_layer_ids : std::vector<int64_t>{},
                                   RankSlice{load.rank, load.tp});
  if (configs.draft) {
    draft_bytes_ = checkpoints.draft->bytes();
    drafter_ = std::make_unique<DFlash>(*ops_, *configs.draft, WeightReader(*checkpoints.draft, *ops_), *target_, max_rows,
                                        configs.max_context, options.max_streams);
  }
  n_pages_ = choose_pages(options, configs);
  const RoundLimits limits{max_rows, options.max_budget, configs.max_context, n_pages_, options.max_streams};
  round_ = std::make_unique<Round>(*ops_, *target_, drafter_.get(), limits, comm);
  if (!comm) return;
  comm->barrier();
  comm->set_deadline(options.rank_deadline);
}

// What would make ranks go apart later, where it could not be told why.
void EngineRank::compare(const EngineOptions& o, const EngineConfigs& configs) const {
  demand_same(*comm_, "backend", std::string(ops_->backend()) + " " + ops_->instruction_set());
  demand_same(*comm_, "config.json of the model", file_sum(o.model_path + "/config.json"));
  demand_same(*comm_, "drafter", o.draft_path.empty() ? "none" : "one");
  std::string text;
  const std::pair<const char*, int64_t> settings[] = {
      {"max_context", configs.max_context}, {"prefill_chunk", o.prefill_chunk}, {"max_budget", o.max_budget},
      {"max_streams", o.max_streams}, {"kv_tokens", o.kv_tokens}};
  for (const auto& [name, value] : settings) text += std::string(text.empty() ? "" : " ") + name + " " + std::to_string(value);
  demand_same(*comm_, "options", text);
}

// One context at least; by default one for every stream, unless that is more than a rank's backend can spare.
int64_t EngineRank::choose_pages(const EngineOptions& options, const EngineConfigs& configs) const {
  const ModelConfig& c = configs.model;
  size_t page_bytes = ops_->latent_page_bytes(c.kv_lora_rank, c.qk_rope_dim) * static_cast<size_t>(c.n_layers);
  if (drafter_) {
    const DraftConfig& d = drafter_->rank_config();
    page_bytes += ops_->draft_page_bytes(d.n_kv_heads, d.head_dim) * d.layers.size();
  }
  if (options.kv_tokens > 0) {
    const auto most = static_cast<int64_t>(ops_->free_bytes() / page_bytes);
    check_argument(pages_for(options.kv_tokens) <= most, "kv_tokens", std::to_string(options.kv_tokens),
                   "at most " + std::to_string(most * kPageTokens) + ", which fill the memory that is free");
    return pages_for(options.kv_tokens);
  }
  const int64_t least = pages_for(configs.max_context);
  const auto affordable = static_cast<int64_t>(ops_->spare_bytes() / page_bytes);
  const int64_t mine = std::max(least, std::min(least * options.max_streams, affordable));
  if (!comm_) return mine;
  std::vector<int64_t> all(static_cast<size_t>(comm_->size()));
  comm_->all_gather(&mine, sizeof mine, all.data());
  return *std::min_element(all.begin(), all.end());
}

RankThreads::RankThreads(const EngineOptions& options, const EngineConfigs& configs, const OpsFactory& make_ops)
    : comms_(make_thread_communicators(static_cast<int>(options.tp), kLoadDeadline)) {
  for (size_t rank = 1; rank < comms_.size(); ++rank)
    threads_.emplace_back([this, &comm = *comms_[rank], options, configs, make_ops] { run(options, configs, make_ops, comm); });
}

void RankThreads::join() {
  for (std::thread& thread : threads_)
    if (thread.joinable()) thread.join();
}

void RankThreads::run(const EngineOptions& options, const EngineConfigs& configs, const OpsFactory& make_ops,
                      Communicator& comm) {
  try {
    EngineRank(options, configs, make_ops, &comm).round().follow();
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const Error*>(&error);
    if (!known || known->status() != Status::engine_failed) {   // such an error may be another rank's
      std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
    comm.fail(error.what());
  }
}

Follower::Follower(const EngineOptions& options, const OpsFactory& make_ops) : comm_(*options.comm) {
  rank_ = std::make_unique<EngineRank>(options, load_configs(options), make_ops, &comm_);
  info_json_ = nlohmann::ordered_json{{"rank", comm_.rank()}, {"tp", comm_.size()}}.dump();
}

void Follower::follow() {
  try {
    rank_->round().follow();
  } catch (const std::exception& error) {
    comm_.fail(error.what());
    throw;
  }
}

}  // namespace kdt
