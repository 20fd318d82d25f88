// What `kdtree-run bench` measures, and the figures made of it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "client.h"

namespace kdt {

// One column of speculation settings: "off", "chain", "tree:16", "auto".
struct Mode {
  std::string name;
  int32_t speculate = KDT_SPECULATE_OFF;
  int32_t budget = 0;  // 0: the engine's default for the mode
};

// Reads off|auto|chain|tree, or one of the last three with `:N`; nothing for anything else.
std::optional<Mode> parse_mode(const std::string& text);

struct BenchPrompt {
  std::string kind;
  std::string name;
  std::vector<int32_t> ids;
};

// Sums over requests.
struct Tally {
  int64_t requests = 0;
  int64_t rounds = 0;
  int64_t drafted_rounds = 0;
  int64_t draft_nodes = 0;
  double decoded = 0;  // tokens, without the one that prefill yields
  double seconds = 0;  // of decoding
  double committed = 0;
  std::array<double, KDT_N_STAGES> stage_ms{};
  std::vector<int64_t> accepted_by_depth;

  // `replayed`: its rounds count as long as the engine says, whatever the clock does.
  void add(const Generation& generation, bool replayed);
  void add(const Tally& other);
  double tokens_per_second() const { return seconds > 0 ? decoded / seconds : 0; }
  double per_round(double sum) const { return rounds > 0 ? sum / static_cast<double>(rounds) : 0; }
};

// Best (the largest or the smallest), median, and (max - min) / median of a few values.
struct Spread {
  double best = 0;
  double median = 0;
  double spread = 0;
};
enum class Better { larger, smaller };
Spread spread_of(std::vector<double> values, Better better);

// One mode on one kind of prompt, one tally a repeat.
struct BenchRow {
  std::string kind;
  Mode mode;
  std::vector<Tally> repeats;

  Tally total() const;
  Spread tokens_per_second() const;
  // Median over repeats of this row's tokens/s over `off`'s in the same repeat.
  double ratio_to(const BenchRow& off) const;
};

struct PrefillFigures {
  int64_t tokens = 0;
  std::vector<double> first_token_ms;
};

struct BenchReport {
  std::vector<BenchRow> rows;  // kinds in order, "all" last when there are several; modes in order within each
  PrefillFigures prefill;      // no values: not measured
  std::string difference;      // empty: every mode and repeat gave the same token ids
  double seconds = 0;          // that all of it took, without loading

  const BenchRow* off_row(const std::string& kind) const;
};

// The settings of the run, for the reader of its figures.
struct BenchSettings {
  int32_t max_tokens = 0;
  int32_t repeat = 0;
  double temperature = 0;
  uint64_t seed = 0;
  bool ignore_eos = true;
  size_t n_prompts = 0;
};

std::string bench_text(const BenchReport& report, const BenchSettings& settings, const nlohmann::ordered_json& info);
nlohmann::ordered_json bench_json(const BenchReport& report, const BenchSettings& settings,
                                  const nlohmann::ordered_json& info);

}  // namespace kdt
