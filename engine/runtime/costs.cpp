#include "runtime/costs.h"

#include <algorithm>
#include <chrono>

namespace kdt {
namespace {

constexpr double kRateMemory = 0.9;        // λ follows the last ten rounds or so
constexpr double kRefineRate = 0.05;       // weight of one measured draft
constexpr double kOutlier = 3.0;           // a draft that took this many times what was expected was disturbed

}  // namespace

void RoundCosts::measure(Round& round, Stream& stream, double limit) {
  StageSeconds time;
  const std::vector<int32_t> prompt(32, 1);
  const PrefillTask prefill{&stream, prompt, true};
  round.run({{}, {&prefill, 1}, {}}, time);
  const auto start = std::chrono::steady_clock::now();
  const auto out_of_time = [start, limit] { return std::chrono::steady_clock::now() - start > std::chrono::duration<double>(limit); };
  // The first pass warms the caches; the fastest of the others is least disturbed by anything else on the machine.
  const auto fastest = [](auto&& pass) {
    pass();
    return std::min(pass(), pass());
  };
  draft_.assign(static_cast<size_t>(round.max_depths()) + 1, 0.0);
  const double shallow = fastest([&] { return round.measure_draft(stream, 1); });
  const double deep = fastest([&] { return round.measure_draft(stream, round.max_depths()); });
  for (size_t d = 1; d < draft_.size(); ++d) {
    const double part = draft_.size() > 2 ? static_cast<double>(d - 1) / static_cast<double>(draft_.size() - 2) : 0.0;
    draft_[d] = shallow + part * std::max(0.0, deep - shallow);
  }
  const auto& sizes = spec::CostTable::kRows;
  // By the slope before it; a disturbed pass may have been slower than a larger one.
  const auto rise = [&](size_t i) {
    const double last = verify_.at(sizes[i - 1]) - verify_.at(sizes[i - 2]);
    return std::max(0.0, last) * static_cast<double>(sizes[i] - sizes[i - 1]) / static_cast<double>(sizes[i - 1] - sizes[i - 2]);
  };
  for (size_t i = 0; i < sizes.size(); ++i) {
    // Sizes there was no time for follow the slope of those before: refined once a tree is as large.
    const bool guess = i >= 2 && (out_of_time() || sizes[i] > round.limits().max_rows);
    const double seconds = guess ? verify_.at(sizes[i - 1]) + rise(i) : fastest([&] { return round.measure_verify(stream, sizes[i]); });
    verify_.set(sizes[i], seconds);
  }
  seconds_ = verify_.at(1);
  record_rounds(round, stream);
}

// Where work is recorded, the rounds of one stream are recorded now: the first request
// should not wait for it.
void RoundCosts::record_rounds(Round& round, Stream& stream) {
  if (!round.records()) return;
  const Stream before = stream;
  StageSeconds time;
  const spec::CutTables cut = cut_tables(1, 1, round.max_depths(), 1, 1);
  const int64_t most = std::min(spec::CostTable::kOneStream, round.limits().max_budget);
  for (int64_t rows = 1; rows <= most; rows = round.capacity(rows + 1)) {
    DecodeTask task{&stream, {}};
    task.plan.budget = rows - 1;
    task.plan.depths = std::min(rows - 1, round.max_depths());
    task.plan.calibration = rows > 1 ? 0 : -1;
    round.run({{&task, 1}, {}, &cut}, time);
    stream = before;
  }
}

double RoundCosts::draft(int64_t depths, int64_t n_streams) const {
  return draft_[static_cast<size_t>(depths)] * (1 + draft_growth_ * static_cast<double>(n_streams - 1));
}

void RoundCosts::observe_draft(int64_t depths, int64_t n_streams, double seconds) {
  if (!measured()) return;   // a context too short to measure in; fixed modes draft all the same
  const double ratio = seconds / draft(depths, n_streams);
  if (!(ratio > 0) || ratio > kOutlier) return;
  if (n_streams == 1) {
    for (double& cost : draft_) cost *= 1 + kRefineRate * (ratio - 1);
    return;
  }
  const double growth = (seconds / draft_[static_cast<size_t>(depths)] - 1) / static_cast<double>(n_streams - 1);
  const double rate = growth_seen_ ? kRefineRate : 1.0;   // before the first it is a guess
  growth_seen_ = true;
  draft_growth_ = std::clamp(draft_growth_ + rate * (growth - draft_growth_), 0.0, 1.5);
}

void RoundCosts::observe_rate(double tokens, double seconds) {
  tokens_ = kRateMemory * tokens_ + tokens;
  seconds_ = kRateMemory * seconds_ + seconds;
}

int32_t RoundCosts::calibration_of(const Sampling& sampling, bool noise_ranking) {
  return sampling.temperature <= 0 ? 0 : noise_ranking ? 2 : 1;
}

spec::CutTables RoundCosts::cut_tables(int64_t base_rows, int64_t n_roots, int64_t depths, int64_t n_drafts,
                                       int64_t n_automatic) const {
  spec::CutTables tables{};
  tables.lambda = rate();
  tables.draft_seconds = draft(depths, n_drafts) * static_cast<double>(n_automatic) / static_cast<double>(n_drafts);
  std::copy(verify_.seconds().begin(), verify_.seconds().end(), tables.verify);
  for (size_t i = 0; i < calibration_.size(); ++i) tables.calibration[i] = calibration_[i].counts();
  tables.base_rows = static_cast<int32_t>(base_rows);
  tables.n_roots = static_cast<int32_t>(n_roots);
  return tables;
}

}  // namespace kdt
