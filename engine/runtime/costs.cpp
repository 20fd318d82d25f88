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
constexpr int64_t kFirstNodes = 3;         // of a stream, in the drafting rounds that are recorded first

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
  for (int64_t n = 1; n <= 64; n *= 2) crowd_.set(n, 1 + kCrowdGuess * static_cast<double>(n - 1));
  std::array<double, spec::CostTable::kEntries> seconds{};   // by kRows; 0: not measured
  if (round.records()) {
    padding_ = kPadding;
    record_rounds(round, stream, end, seconds);
  } else {
    measure_passes(round, stream, end, seconds);
  }
  // Sizes there was no time for follow the slope of those before, until a pass is as large; a disturbed one may have been slower
  // than a larger one.
  const auto& sizes = spec::CostTable::kRows;
  for (size_t i = 0; i < sizes.size(); ++i) {
    guessed_[i] = seconds[i] == 0;
    if (seconds[i] == 0 && i == 1) seconds[i] = seconds[0];
    if (seconds[i] == 0)
      seconds[i] = seconds[i - 1] + std::max(0.0, seconds[i - 1] - seconds[i - 2]) * static_cast<double>(sizes[i] - sizes[i - 1]) /
                                        static_cast<double>(sizes[i - 1] - sizes[i - 2]);
    verify_.set(sizes[i], seconds[i]);
  }
  seconds_ = verify_.at(1);
}

void RoundCosts::measure_passes(Round& round, const Stream& stream, Clock::time_point end, std::span<double> seconds) {
  const double shallow = fastest([&] { return round.measure_draft(stream, 1, 1); });
  const double deep = fastest([&] { return round.measure_draft(stream, round.max_depths(), 1); });
  for (size_t d = 1; d < draft_.size(); ++d) {
    const double part = draft_.size() > 2 ? static_cast<double>(d - 1) / static_cast<double>(draft_.size() - 2) : 0.0;
    draft_[d] = shallow + part * std::max(0.0, deep - shallow);
  }
  const auto& sizes = spec::CostTable::kRows;
  for (size_t i = 0; i < sizes.size() && sizes[i] <= round.limits().max_rows && (i < 2 || Clock::now() < end); ++i)
    seconds[i] = fastest([&] { return round.measure_verify(stream, sizes[i]); });
}

// Where work is recorded, what is measured are the rounds that mode auto chooses between, as far as there is time: those of few
// nodes for any number of streams first.
void RoundCosts::record_rounds(Round& round, const Stream& stream, Clock::time_point end, std::span<double> seconds) {
  const int64_t most = round.limits().max_streams;
  const auto record = [&](int64_t n, int64_t nodes) {
    const int64_t tree = nodes > 0 ? DraftHabits::tree_nodes(nodes) : 0;
    const auto room = nodes > 0 ? DraftHabits::room(round, n, nodes, 0) : round.room(n, 0, 0);
    if (!room || round.recorded(n, tree, *room)) return;
    const double pass = run(round, stream, n, tree, *room, true).pass;
    const auto at = std::find(spec::CostTable::kRows.begin(), spec::CostTable::kRows.end(), *room);
    if (at == spec::CostTable::kRows.end()) return;
    double& known = seconds[static_cast<size_t>(at - spec::CostTable::kRows.begin())];
    known = known > 0 ? std::min(known, pass) : pass;
  };
  record(1, 0);
  const int64_t room = round.room(1, kFirstNodes, 0), tree = DraftHabits::tree_nodes(kFirstNodes);
  const Times slow = run(round, stream, 1, tree, room, false), quick = run(round, stream, 1, tree, room, true);
  unrecorded_ = std::max(0.0, slow.wall - quick.wall);
  for (const int64_t nodes : {int64_t{0}, kFirstNodes, int64_t{1}, int64_t{7}, int64_t{5}, int64_t{2}, int64_t{11}, int64_t{15}})
    for (int64_t power = 1; power <= 64; power *= 2)
      for (const int64_t n : {power, std::max<int64_t>(1, power / 2 * 3)})
        if (Clock::now() < end) record(std::min(n, most), nodes);
  for (const int64_t nodes : DraftHabits::kNodes)
    if (Clock::now() < end) record(1, nodes);
}

// Times of the second of two rounds: with `record` the first one is recorded.
RoundCosts::Times RoundCosts::run(Round& round, const Stream& stream, int64_t n_streams, int64_t tree_nodes, int64_t room, bool record) {
  spec::CutTables cut = cut_tables(n_streams, n_streams, room);
  cut.lambda = 0;                       // all nodes that there is room for
  RoundResult result;
  double wall = 0;
  for (int pass = 0; pass < 2; ++pass) {
    std::vector<Stream> copies(static_cast<size_t>(n_streams), stream);
    std::vector<DecodeTask> tasks;
    for (Stream& copy : copies) {
      DecodeTask& task = tasks.emplace_back(DecodeTask{&copy, {}});
      if (tree_nodes == 0) continue;
      task.plan.budget = std::min(tree_nodes, round.limits().max_budget);
      task.plan.depths = std::min(task.plan.budget, round.max_depths());
      task.plan.calibration = 0;
    }
    StageSeconds time;
    const auto start = Clock::now();
    result = round.run({tasks, {}, tree_nodes > 0 ? &cut : nullptr, false, record}, time);
    wall = std::chrono::duration<double>(Clock::now() - start).count();
  }
  if (record && (n_streams & (n_streams - 1)) == 0) {   // a point of ByStreams
    host_.set(n_streams, wall - result.draft_seconds - result.verify_seconds);
    if (tree_nodes == DraftHabits::tree_nodes(kFirstNodes)) {
      if (n_streams == 1) std::fill(draft_.begin() + 1, draft_.end(), result.draft_seconds);
      crowd_.set(n_streams, std::max(1.0, result.draft_seconds / draft_.back()));
      crowd_known_ |= n_streams > 1;
    }
  }
  return {result.verify_seconds, wall};
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
