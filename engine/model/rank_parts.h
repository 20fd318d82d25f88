// What one rank of several adds to the residual stream, and how the ranks put their parts together.
//
// A rank has heads, widths and vocabulary of its own and everything else whole. An operation whose inputs are a rank's own gives
// a partial, which sum() adds to those of the other ranks; columns of the vocabulary and of the drafter's feature are put side
// by side. Of a model on one rank there is nothing here: partial() is null and the operations do the whole.
#pragma once

#include "checkpoint/partition.h"
#include "ops/ops.h"

namespace kdt {

// The norm of what a sum gives, for the product that reads it next; without a weight none.
struct NextNorm {
  const float* weight = nullptr;
  float eps = 0;
  Act* out = nullptr;
};

class RankParts {
 public:
  // Of passes over up to `max_rows` rows, with logits of up to `max_logits` of them.
  RankParts(Ops& ops, RankSlice slice, int64_t max_rows, int64_t hidden, int64_t max_logits, int64_t vocab);

  const RankSlice& slice() const { return slice_; }
  // For the next sum. There are two, in turn: the other ranks may still read the last one.
  float* partial() const { return partial_[turn_].as<float>(); }
  // out (+)= every rank's partial, then the norm of the same rows. Of a model on one rank `out` is whole already.
  void sum(Count n, Act* out, bool accumulate, NextNorm norm, const int32_t* index = nullptr);
  // out [n, vocab] = h lm_headᵀ, of a matrix that has this rank's part of the vocabulary.
  void logits(Count n, const Act* h, const Matrix& lm_head, float* out);

 private:
  Ops& ops_;
  RankSlice slice_;
  int64_t hidden_, vocab_;
  Buffer partial_[2], logits_;
  int turn_ = 0;
};

}  // namespace kdt
