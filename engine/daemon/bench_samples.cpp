#include "bench_samples.h"

#include <algorithm>

#include "flags.h"

namespace kdt {

std::optional<Mode> parse_mode(const std::string& text) {
  const size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  Mode mode{text, KDT_SPECULATE_OFF, 0};
  if (name == "auto") {
    mode.speculate = KDT_SPECULATE_AUTO;
  } else if (name == "chain") {
    mode.speculate = KDT_SPECULATE_CHAIN;
  } else if (name == "tree") {
    mode.speculate = KDT_SPECULATE_TREE;
  } else if (name != "off") {
    return std::nullopt;
  }
  if (colon == std::string::npos) return mode;
  const std::optional<int64_t> budget = parse_integer(text.substr(colon + 1), 1, 1024);
  if (!budget || name == "off") return std::nullopt;
  mode.budget = static_cast<int32_t>(*budget);
  return mode;
}

namespace {

double seconds_of_rounds(const kdt_result& result) {
  double ms = 0;
  for (int stage = KDT_STAGE_DRAFT; stage <= KDT_STAGE_COMMIT; ++stage) ms += result.timings_ms[stage];
  return ms * 1e-3;
}

}  // namespace

void Tally::add(const Generation& generation, bool replayed) {
  const kdt_result& result = generation.result;
  const double n_decoded = static_cast<double>(std::max<int64_t>(0, result.generated_tokens - 1));
  ++requests;
  rounds += result.rounds;
  drafted_rounds += result.drafted_rounds;
  draft_nodes += result.draft_nodes;
  if (result.tokens_per_second > 0) {
    decoded += n_decoded;
    seconds += replayed ? seconds_of_rounds(result) : n_decoded / result.tokens_per_second;
  }
  committed += result.tokens_per_round * static_cast<double>(result.rounds);
  for (size_t i = 0; i < stage_ms.size(); ++i) stage_ms[i] += result.timings_ms[i];
  const std::vector<int64_t>& depths = generation.accepted_by_depth;
  accepted_by_depth.resize(std::max(accepted_by_depth.size(), depths.size()));
  for (size_t i = 0; i < depths.size(); ++i) accepted_by_depth[i] += depths[i];
}

void Tally::add(const Tally& other) {
  requests += other.requests;
  rounds += other.rounds;
  drafted_rounds += other.drafted_rounds;
  draft_nodes += other.draft_nodes;
  decoded += other.decoded;
  seconds += other.seconds;
  committed += other.committed;
  for (size_t i = 0; i < stage_ms.size(); ++i) stage_ms[i] += other.stage_ms[i];
  accepted_by_depth.resize(std::max(accepted_by_depth.size(), other.accepted_by_depth.size()));
  for (size_t i = 0; i < other.accepted_by_depth.size(); ++i) accepted_by_depth[i] += other.accepted_by_depth[i];
}

Spread spread_of(std::vector<double> values, Better better) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  const double median = values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
  const double range = values.back() - values.front();
  return {better == Better::larger ? values.back() : values.front(), median, median > 0 ? range / median : 0};
}

Tally BenchRow::total() const {
  Tally sum;
  for (const Tally& repeat : repeats) sum.add(repeat);
  return sum;
}

Spread BenchRow::tokens_per_second() const {
  std::vector<double> values;
  for (const Tally& repeat : repeats) values.push_back(repeat.tokens_per_second());
  return spread_of(values, Better::larger);
}

double BenchRow::ratio_to(const BenchRow& off) const {
  std::vector<double> ratios;
  for (size_t i = 0; i < repeats.size() && i < off.repeats.size(); ++i) {
    const double base = off.repeats[i].tokens_per_second();
    if (base > 0) ratios.push_back(repeats[i].tokens_per_second() / base);
  }
  return spread_of(ratios, Better::larger).median;
}

const BenchRow* BenchReport::off_row(const std::string& kind) const {
  for (const BenchRow& row : rows) {
    if (row.kind == kind && row.mode.speculate == KDT_SPECULATE_OFF) return &row;
  }
  return nullptr;
}

}  // namespace kdt
