// Rounds of one stream, for tests that look at one at a time.
#pragma once

#include <span>

#include "runtime/round.h"

namespace kdt::test {

// Commits up to max_rows prompt tokens; see PrefillTask.
inline void prefill(Round& round, Stream& stream, std::span<const int32_t> tokens, bool sample, float* logits,
                    StageSeconds& time) {
  PrefillTask task{&stream, tokens};
  task.sample = sample;
  task.logits = logits;
  round.run({{}, {&task, 1}, {}}, time);
}

// Commits the root and what the target agrees with. Valid until the next round.
inline DecodeResult decode(Round& round, Stream& stream, const DecodePlan& plan, StageSeconds& time) {
  const DecodeTask task{&stream, plan};
  return round.run({{&task, 1}, {}, {}}, time).decode[0];
}

}  // namespace kdt::test
