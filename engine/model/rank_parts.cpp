#include "model/rank_parts.h"

namespace kdt {

RankParts::RankParts(Ops& ops, RankSlice slice, int64_t max_rows, int64_t hidden, int64_t max_logits, int64_t vocab)
    : ops_(ops), slice_(slice), hidden_(hidden), vocab_(vocab) {
  if (slice_.alone()) return;
  for (Buffer& partial : partial_) partial = ops.allocate_for_ranks(static_cast<size_t>(max_rows * hidden) * sizeof(float));
  logits_ = ops.allocate_for_ranks(static_cast<size_t>(max_logits * (vocab / slice.tp)) * sizeof(float));
}

void RankParts::sum(Count n, Act* out, bool accumulate, NextNorm norm, const int32_t* index) {
  const RowLayout rows{0, index};
  if (slice_.alone()) {
    if (norm.weight) ops_.rms_norm({n, hidden_, out, norm.weight, norm.eps, norm.out, rows, rows});
    return;
  }
  ops_.sum_ranks({n, hidden_, partial(), out, accumulate, rows, norm.weight, norm.eps, norm.out});
  turn_ ^= 1;
}

void RankParts::logits(Count n, const Act* h, const Matrix& lm_head, float* out) {
  if (slice_.alone()) return ops_.logits({n, h, &lm_head, out});
  ops_.logits({n, h, &lm_head, logits_.data()});
  ops_.gather_ranks({n, vocab_ / slice_.tp, sizeof(float), logits_.data(), slice_.rank, slice_.tp, out});
}

}  // namespace kdt
