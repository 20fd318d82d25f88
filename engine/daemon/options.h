// The flags that commands share, and what they become in the structs of kdtree.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "flags.h"
#include "kdtree.h"

namespace kdt {

// Which model, on what.
struct EngineFlags {
  std::string model;
  std::string draft;
  std::string cpu_target = "auto";
  int32_t backend = 0;      // index into kBackends
  int32_t device = 0;
  int32_t chat_format = 0;  // index into kChatFormats
  int32_t load = 0;         // mapped
  int32_t threads = 0;
  int32_t prefill_chunk = 512;
  int32_t max_context = 0;
  int32_t checksums = 1;    // 0: off
  int32_t tp = 0;           // ranks; 0: 1, or those of the launcher
  double rank_deadline = 10;
  std::string replay;       // of benchmarks


  void declare(Flags& flags);
  void declare_replay(Flags& flags);
  // --model alone: the engine has no drafter to speculate with.
  bool has_drafter() const { return model.empty() || !draft.empty(); }
  // Borrows the strings of this object.
  kdt_engine_options to_options() const;
};

// How tokens are sampled and candidates are ranked.
struct SamplingFlags {
  double temperature = 0;
  double top_p = 1;
  double min_p = 0;
  int32_t top_k = 0;
  std::optional<uint64_t> seed;
  bool spine = false;
  int32_t ranking = KDT_RANKING_AUTO;

  void declare(Flags& flags, const std::string& default_seed);
  void apply(kdt_request_options& options) const;
};

// The name of KDT_SPECULATE_*, as --speculate takes it.
const char* speculate_name(int32_t speculate);

kdt_request_options default_request_options();

}  // namespace kdt
