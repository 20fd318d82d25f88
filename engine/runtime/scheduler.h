// What the next round does: a pure function of who waits, who runs and how many pages there are.
//
// Rank is priority, then the order of submission. The rules:
//   - Every decoding stream takes part in every round: its root is verified, with as many draft nodes as its mode wants and the
//     pass holds. When there is no page for its next token, streams whose reader is behind lose theirs, then those of the
//     lowest rank, itself last; they are recomputed later.
//   - Prompts share one chunk a round, by rank: however long they are, decoding streams wait for one chunk at most.
//   - Waiting requests are admitted strictly by rank, when a place and the pages for all of their tokens so far and one page
//     for each stream that grows are there. The head is never overtaken.
// So the stream of the highest rank always moves on, and everything ends.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kdt {

struct Rank {
  int32_t priority;
  uint64_t serial;
  auto operator<=>(const Rank&) const = default;
};

struct RunningView {
  Rank rank;
  int64_t tokens_to_prefill;   // 0: decoding
  int64_t length;              // tokens whose KV is in pages
  int64_t n_pages;             // held
  int64_t budget, depths;      // draft nodes and depths this stream may use
  bool paused;                 // its reader is behind
};

struct WaitingView {
  Rank rank;
  int64_t new_pages;           // to be admitted: those for its tokens and the next one, without what streams share
};

struct SchedulerLimits {
  int64_t max_streams, prefill_chunk, max_rows;
};

struct Schedule {
  struct Decode {
    size_t stream;             // index of running
    int64_t budget;            // draft nodes at most
    int64_t more_pages;        // to be taken before the round
    int64_t depths;            // positions behind the root that pages reach
  };
  struct Prefill {
    size_t stream;
    int64_t tokens;
  };
  std::vector<size_t> preempt; // indices of running, not among the others
  std::vector<Decode> decode;
  std::vector<Prefill> prefill;
  size_t n_admit = 0;          // of waiting, from its front; they join the next round
};

// `running` in any order; `waiting` by rank. `available`: pages free or idle.
Schedule schedule(std::span<const RunningView> running, std::span<const WaitingView> waiting, int64_t available,
                  const SchedulerLimits& limits);

}  // namespace kdt
