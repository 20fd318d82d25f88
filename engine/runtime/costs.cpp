#include "runtime/costs.h"

#include <algorithm>

#include "runtime/draft_habits.h"

namespace kdt {
namespace {

constexpr double kRateMemory = 0.9;        // λ follows the last ten rounds or so
constexpr double kRefineRate = 0.05;       // weight of one measured round
constexpr double kOutlier = 3.0;           // a draft that took this many times what was expected was disturbed
constexpr double kCrowdGuess = 0.6;        // of a draft for each further stream, in drafts of one, before any was seen
constexpr double kPadding = 0.3;           // measured on an H200: 0.2 to 0.4

// The first pass warms the caches; the fastest of the others is least disturbed by anything else on the machine.
template <class F>
double fastest(const F& pass) {
  pass();
  return std::min(pass(), pass());
}

}  // namespace

size_t ByStreams::index(int64_t streams) {
  size_t i = 0;
  while (i + 1 < kPoints && int64_t{2} << i <= streams) ++i;
  return i;
}

double ByStreams::at(int64_t streams) const {
  const size_t i = std::min(index(streams), kPoints - 2);
  const auto low = static_cast<double>(int64_t{1} << i);
  return points_[i] + (static_cast<double>(streams) - low) / low * (points_[i + 1] - points_[i]);
}

void ByStreams::follow(int64_t streams, double value, double rate) {
  const double step = rate * (value - at(streams));
  const size_t i = index(streams);
  points_[i] += step;
  if (int64_t{1} << i < streams && i + 1 < kPoints) points_[i + 1] += step;
}

void RoundCosts::measure(Round& round, Stream& stream, double limit) {
  StageSeconds time;
  const std::vector<int32_t> prompt(32, 1);
  const PrefillTask prefill{&stream, prompt, true};
  round.run({{}, {&prefill, 1}, {}}, time);
  const Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(limit));
  draft_.assign(static_cast<size_t>(round.max_depths()) + 1, 0.0);
  const double shallow = fastest([&] { return round.measure_draft(stream, 1, 1); });
  const double deep = fastest([&] { return round.measure_draft(stream, round.max_depths(), 1); });
  for (size_t d = 1; d < draft_.size(); ++d) {
    const double part = draft_.size() > 2 ? static_cast<double>(d - 1) / static_cast<double>(draft_.size() - 2) : 0.0;
    draft_[d] = shallow + part * std::max(0.0, deep - shallow);
  }
  for (int64_t n = 1; n <= 64; n *= 2) crowd_.set(n, 1 + kCrowdGuess * static_cast<double>(n - 1));
  measure_verify(round, stream, end);
  seconds_ = verify_.at(1);
  padding_ = round.records() ? kPadding : 0;
  if (round.records()) record_rounds(round, stream, end);
}

void RoundCosts::measure_verify(Round& round, const Stream& stream, Clock::time_point end) {
  const auto& sizes = spec::CostTable::kRows;
  // By the slope before it; a disturbed pass may have been slower than a larger one.
  const auto rise = [&](size_t i) {
    const double last = verify_.at(sizes[i - 1]) - verify_.at(sizes[i - 2]);
    return std::max(0.0, last) * static_cast<double>(sizes[i] - sizes[i - 1]) / static_cast<double>(sizes[i - 1] - sizes[i - 2]);
  };
  for (size_t i = 0; i < sizes.size(); ++i) {
    // Sizes there was no time for follow the slope of those before: refined once a tree is as large.
    const bool guess = i >= 2 && (Clock::now() > end || sizes[i] > round.limits().max_rows);
    verify_.set(sizes[i], guess ? verify_.at(sizes[i - 1]) + rise(i)
                                : fastest([&] { return round.measure_verify(stream, sizes[i]); }));
  }
}

// Where work is recorded, the rounds that mode auto chooses between are recorded now, as far as there is time: later each would
// hold up all streams for as long as several rounds. Powers of two first, between which costs are known.
void RoundCosts::record_rounds(Round& round, const Stream& stream, Clock::time_point end) {
  const double rest = record(round, stream, 1, 0) - verify_.at(1);   // accept and commit
  for (const int64_t rows : spec::CostTable::kRows) verify_.set(rows, verify_.at(rows) + std::max(0.0, rest));
  const auto wide = [&](int64_t n) {
    if (n > round.limits().max_streams || round.wide_streams(n) != n) return;
    int64_t last = 0;
    for (const int64_t nodes : DraftHabits::kNodes) {
      const auto room = DraftHabits::room(round, n, nodes, 0);
      if (Clock::now() > end) return;
      if (room && *room != last) record(round, stream, n, nodes);
      last = room.value_or(last);
    }
    if (n > 1) record(round, stream, n, 0);
  };
  for (int64_t n = 1; n <= 64; n *= 2) wide(n);
  for (int64_t n = 3; n <= 64; n *= 2) wide(n);
}

// Twice: the first time it is recorded. Seconds of its pass, to commit.
double RoundCosts::record(Round& round, const Stream& stream, int64_t n_streams, int64_t nodes) {
  const int64_t room = round.room(n_streams, nodes, 0);
  spec::CutTables cut = cut_tables(n_streams, n_streams, room);
  cut.lambda = 0;                       // all nodes that there is room for
  double verify_seconds = 0;
  for (int pass = 0; pass < 2; ++pass) {
    std::vector<Stream> copies(static_cast<size_t>(n_streams), stream);
    std::vector<DecodeTask> tasks;
    for (Stream& copy : copies) {
      DecodeTask& task = tasks.emplace_back(DecodeTask{&copy, {}});
      if (nodes == 0) continue;
      task.plan.budget = std::min(DraftHabits::tree_nodes(nodes), round.limits().max_budget);
      task.plan.depths = std::min(task.plan.budget, round.max_depths());
      task.plan.calibration = 0;
    }
    StageSeconds time;
    const auto start = Clock::now();
    const RoundResult result = round.run({tasks, {}, nodes > 0 ? &cut : nullptr}, time);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    verify_seconds = result.verify_seconds;
    const bool point = (n_streams & (n_streams - 1)) == 0;   // of ByStreams
    if (pass == 0 || !point) continue;
    host_.set(n_streams, seconds - result.draft_seconds - result.verify_seconds);
    if (nodes > 0) crowd_.set(n_streams, std::max(1.0, result.draft_seconds / draft_.back()));
    crowd_known_ |= nodes > 0 && n_streams > 1;
  }
  return verify_seconds;
}

double RoundCosts::draft(int64_t depths, int64_t n_streams) const {
  return n_streams == 0 ? 0 : draft_[static_cast<size_t>(depths)] * crowd_.at(n_streams);
}

spec::RoundPrices RoundCosts::prices(int64_t n_streams, int64_t depths, int64_t n_drafts, int64_t n_fixed) const {
  return {verify_.seconds().data(), padding_, draft(depths, n_drafts + n_fixed) - draft(depths, n_fixed), host(n_streams)};
}

void RoundCosts::observe_verify(int64_t rows, int64_t room, double seconds) {
  if (!measured()) return;
  const spec::RoundPrices prices{verify_.seconds().data(), padding_, 0, 0};
  const double ratio = seconds / prices.pass(static_cast<double>(rows), room);
  verify_.refine(rows, verify_.at(rows) * ratio);
  if (room != rows) verify_.refine(room, verify_.at(room) * ratio);
}

void RoundCosts::observe_draft(int64_t depths, int64_t n_streams, double seconds) {
  if (!measured()) return;   // a context too short to measure in; fixed modes draft all the same
  const double ratio = seconds / draft(depths, n_streams);
  if (!(ratio > 0) || ratio > kOutlier) return;
  if (n_streams == 1) {
    for (double& cost : draft_) cost *= 1 + kRefineRate * (ratio - 1);
    return;
  }
  const double crowd = seconds / draft_[static_cast<size_t>(depths)];
  if (crowd_known_) return crowd_.follow(n_streams, crowd, kRefineRate);
  crowd_known_ = true;
  const double growth = std::clamp((crowd - 1) / static_cast<double>(n_streams - 1), 0.0, 1.5);
  for (int64_t n = 1; n <= 64; n *= 2) crowd_.set(n, 1 + growth * static_cast<double>(n - 1));
}

void RoundCosts::observe_host(int64_t n_streams, double seconds, double round_seconds) {
  // A round that was recorded first, or a reader that held everything up, is not what the next one will take.
  host_.follow(n_streams, std::clamp(seconds, 0.0, 0.5 * round_seconds), kRefineRate);
}

void RoundCosts::observe_rate(double tokens, double seconds) {
  tokens_ = kRateMemory * tokens_ + tokens;
  seconds_ = kRateMemory * seconds_ + seconds;
}

int32_t RoundCosts::calibration_of(const Sampling& sampling, bool noise_ranking) {
  return sampling.temperature <= 0 ? 0 : noise_ranking ? 2 : 1;
}

spec::CutTables RoundCosts::cut_tables(int64_t base_rows, int64_t n_roots, int64_t room) const {
  spec::CutTables tables{};
  tables.lambda = rate();
  // The pass has its room already: a live row costs what it costs over one that is not.
  const double padding = padding_ * verify_.at(room);
  std::transform(verify_.seconds().begin(), verify_.seconds().end(), tables.verify,
                 [&](double seconds) { return padding + (1 - padding_) * seconds; });
  for (size_t i = 0; i < calibration_.size(); ++i) tables.calibration[i] = calibration_[i].counts();
  tables.base_rows = static_cast<int32_t>(base_rows);
  tables.n_roots = static_cast<int32_t>(n_roots);
  tables.most_rows = static_cast<int32_t>(room);
  return tables;
}

}  // namespace kdt
