// The sum of what the ranks hold: fp32, ((p0 + p1) + p2) + …, on every rank, whichever way the bytes travel.
//
// Short rows go to everybody (one step, n - 1 times the bytes); long ones are summed in slices, one a rank, and the slices
// are gathered (two steps). Both add in the order of ranks, so they give the same bits.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/communicator.h"

namespace kdt {

class RankSum {
 public:
  static constexpr int64_t kOneShotFloats = 16384;

  // Of at most `max_floats`; memory is taken here.
  RankSum(Communicator& comm, int64_t max_floats);

  // `values` [n] becomes the sum over ranks. A collective call.
  void operator()(float* values, int64_t n);
  // The two ways, for their test.
  void one_shot(float* values, int64_t n);
  void two_shot(float* values, int64_t n);

 private:
  Communicator& comm_;
  int64_t max_floats_;
  std::vector<float> gathered_, slices_;
};

}  // namespace kdt
