// kdtree-run bench --synthetic: one rank of a model that is not at hand, timed with made-up weights.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flags.h"
#include "options.h"

namespace kdt {

struct RehearsalFlags {
  bool synthetic = false, quick = false, routed = false;
  std::string preset;
  int32_t rank = 0, layers = 0, replays = 9, collectives = 0;
  double seconds = 0, collective_us = 7, link_gbps = 350;
  // Empty: the default, that of --quick where it is given. Of round and op nodes: none.
  std::vector<int32_t> nodes, prefixes, streams, round_nodes, op_nodes, prompts, chunks;
  std::vector<double> overlaps;
  bool no_rounds = false, no_ops = false, no_prompts = false;

  void declare(Flags& flags);
  // Throws when one of these flags stands on a command line without --synthetic.
  void check_unused(const Flags& flags) const;
  // Measures and prints; returns an exit code.
  int run(const Flags& flags, const EngineFlags& engine, bool json);

 private:
  // Throws when a flag of other benchmarks stands beside --synthetic on the command line.
  void check_others(const Flags& flags) const;

  std::vector<std::string> names_;   // of the flags but --synthetic
};

}  // namespace kdt
