// One rank of an engine: its backend, its part of the models and its rounds. Rank 0 is the engine's own; the others are threads
// of its process or processes of a launcher, and follow its rounds.
#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "checkpoint/config.h"
#include "model/dflash.h"
#include "model/kimi.h"
#include "runtime/engine_options.h"
#include "runtime/round.h"

namespace kdt {

// What is known before a weight is read.
struct EngineConfigs {
  ModelConfig model;
  std::optional<DraftConfig> draft;
  int64_t max_context;
};

// Error naming the file, or the option that does not fit it.
EngineConfigs load_configs(const EngineOptions& options);

class EngineRank {
 public:
  // Loads this rank's part. With a communicator a collective call: ranks that were given different things are named.
  EngineRank(const EngineOptions& options, const EngineConfigs& configs, const OpsFactory& make_ops, Communicator* comm);

  Ops& ops() { return *ops_; }
  Round& round() { return *round_; }
  const Kimi& target() const { return *target_; }
  const DFlash* drafter() const { return drafter_.get(); }
  int64_t n_pages() const { return n_pages_; }
  size_t target_bytes() const { return target_bytes_; }   // of what this rank loaded
  size_t draft_bytes() const { return draft_bytes_; }

 private:
  void compare(const EngineOptions& options, const EngineConfigs& configs) const;
  int64_t choose_pages(const EngineOptions& options, const EngineConfigs& configs) const;

  Communicator* comm_;
  std::unique_ptr<Ops> ops_;
  std::unique_ptr<Kimi> target_;
  std::unique_ptr<DFlash> drafter_;
  std::unique_ptr<Round> round_;
  int64_t n_pages_ = 0;
  size_t target_bytes_ = 0, draft_bytes_ = 0;
};

// Ranks other than 0 as threads.
class RankThreads {
 public:
  RankThreads(const EngineOptions& options, const EngineConfigs& configs, const OpsFactory& make_ops);
  // Waits for them: rank 0 has stopped its rounds, or failed.
  ~RankThreads() { join(); }

  Communicator& first() { return *comms_.front(); }
  void join();
  // What ended a rank that failed by itself, before anything else did; after join().
  std::exception_ptr failure() const { return failure_; }

 private:
  void run(const EngineOptions& options, const EngineConfigs& configs, const OpsFactory& make_ops, Communicator& comm);

  std::vector<std::unique_ptr<Communicator>> comms_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::exception_ptr failure_;
};

// A rank other than 0 as a process: options.comm is there.
class Follower {
 public:
  Follower(const EngineOptions& options, const OpsFactory& make_ops);
  // Until rank 0 stops. Error(engine_failed) naming the rank that failed.
  void follow();
  int rank() const { return comm_.rank(); }
  const std::string& info_json() const { return info_json_; }

 private:
  Communicator& comm_;
  std::unique_ptr<EngineRank> rank_;
  std::string info_json_;
};

}  // namespace kdt
