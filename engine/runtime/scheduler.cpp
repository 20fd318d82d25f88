#include "runtime/scheduler.h"

#include <algorithm>
#include <numeric>

#include "runtime/pages.h"

namespace kdt {
namespace {

// Shares `rows` draft nodes among streams: everyone what it wants, or an equal part of what is left.
void share_nodes(std::vector<Schedule::Decode>& decode, int64_t rows) {
  std::vector<size_t> order(decode.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return decode[a].budget < decode[b].budget; });
  for (size_t i = 0; i < order.size(); ++i) {
    const int64_t part = std::max<int64_t>(rows, 0) / static_cast<int64_t>(order.size() - i);
    Schedule::Decode& stream = decode[order[i]];
    stream.budget = std::min(stream.budget, part);
    rows -= stream.budget;
  }
}

}  // namespace

Schedule schedule(std::span<const RunningView> running, std::span<const WaitingView> waiting, int64_t available,
                  const SchedulerLimits& limits) {
  Schedule out;
  std::vector<size_t> by_rank(running.size());
  std::iota(by_rank.begin(), by_rank.end(), 0);
  std::sort(by_rank.begin(), by_rank.end(), [&](size_t a, size_t b) { return running[a].rank < running[b].rank; });

  // Pages for every root, the highest rank first. Those who pay: streams whose reader is behind, then the lowest ranks.
  std::vector<bool> preempted(running.size(), false);
  const auto victim = [&] {
    const auto lowest = [&](bool any) {
      return std::find_if(by_rank.rbegin(), by_rank.rend(),
                          [&](size_t i) { return !preempted[i] && (any || running[i].paused); });
    };
    const auto behind = lowest(false);
    return behind != by_rank.rend() ? *behind : *lowest(true);
  };
  for (const size_t i : by_rank) {
    const RunningView& stream = running[i];
    if (preempted[i] || stream.paused || stream.tokens_to_prefill > 0) continue;
    const int64_t more = std::max<int64_t>(0, pages_for(stream.length + 1) - stream.n_pages);
    while (more > available && !preempted[i]) {
      const size_t loser = victim();
      preempted[loser] = true;
      out.preempt.push_back(loser);
      available += running[loser].n_pages;
    }
    if (preempted[i]) continue;
    available -= more;
    out.decode.push_back({i, stream.budget, more, 0});
  }
  // Pages for drafts that reach into the next page, as long as there are any.
  for (Schedule::Decode& decode : out.decode) {
    const RunningView& stream = running[decode.stream];
    const int64_t held = stream.n_pages + decode.more_pages;
    const int64_t more = std::clamp<int64_t>(pages_for(stream.length + 1 + stream.depths) - held, 0, available);
    decode.more_pages += more;
    available -= more;
    decode.depths = std::min(stream.depths, (held + more) * kPageTokens - stream.length - 1);
    if (decode.depths <= 0) decode.budget = 0;
  }

  const auto n_decode = static_cast<int64_t>(out.decode.size());
  int64_t chunk = std::min(limits.prefill_chunk, limits.max_rows - n_decode);
  for (const size_t i : by_rank) {
    const RunningView& stream = running[i];
    if (preempted[i] || stream.paused || stream.tokens_to_prefill == 0 || chunk <= 0) continue;
    const int64_t tokens = std::min(stream.tokens_to_prefill, chunk);
    out.prefill.push_back({i, tokens});
    chunk -= tokens;
  }
  int64_t prompt_rows = 0;
  for (const Schedule::Prefill& prefill : out.prefill) prompt_rows += prefill.tokens;
  share_nodes(out.decode, limits.max_rows - n_decode - prompt_rows);

  if (!out.preempt.empty()) return out;
  auto n_running = static_cast<int64_t>(running.size());
  for (; out.n_admit < waiting.size() && n_running < limits.max_streams; ++out.n_admit, ++n_running) {
    const int64_t spare = n_running;   // a page for each that grows meanwhile
    if (waiting[out.n_admit].new_pages + spare > available) break;
    available -= waiting[out.n_admit].new_pages;
  }
  return out;
}

}  // namespace kdt
