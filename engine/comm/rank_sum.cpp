#include "comm/rank_sum.h"

#include <algorithm>

#include "base/error.h"

namespace kdt {
namespace {

// parts: n_ranks arrays of `n`, `stride` apart.
void add_in_order(const float* parts, int64_t stride, int n_ranks, int64_t n, float* out) {
  std::copy_n(parts, n, out);
  for (int rank = 1; rank < n_ranks; ++rank) {
    const float* part = parts + rank * stride;
    for (int64_t i = 0; i < n; ++i) out[i] += part[i];
  }
}

}  // namespace

RankSum::RankSum(Communicator& comm, int64_t max_floats) : comm_(comm), max_floats_(max_floats) {
  const int64_t n_ranks = comm.size(), slice = (max_floats + n_ranks - 1) / n_ranks;
  gathered_.resize(static_cast<size_t>(std::max(std::min(max_floats, kOneShotFloats) * n_ranks, slice * n_ranks)));
  slices_.resize(static_cast<size_t>(slice * n_ranks));
}

void RankSum::operator()(float* values, int64_t n) {
  if (comm_.size() == 1) return;
  if (n <= kOneShotFloats) one_shot(values, n);
  else two_shot(values, n);
}

void RankSum::one_shot(float* values, int64_t n) {
  check_argument(n >= 0 && n <= std::min(max_floats_, kOneShotFloats), "n", std::to_string(n),
                 "at most " + std::to_string(std::min(max_floats_, kOneShotFloats)) + " floats");
  comm_.all_gather(values, static_cast<size_t>(n) * sizeof(float), gathered_.data());
  add_in_order(gathered_.data(), n, comm_.size(), n, values);
}

void RankSum::two_shot(float* values, int64_t n) {
  check_argument(n >= 0 && n <= max_floats_, "n", std::to_string(n),
                 "at most " + std::to_string(max_floats_) + " floats");
  const int n_ranks = comm_.size();
  const int64_t slice = (n + n_ranks - 1) / n_ranks;
  const size_t bytes = static_cast<size_t>(slice) * sizeof(float);
  // The last slice is filled up with zeros that nobody reads.
  std::copy_n(values, n, slices_.data());
  std::fill_n(slices_.data() + n, slice * n_ranks - n, 0.0f);
  comm_.all_to_all(slices_.data(), bytes, gathered_.data());
  float* mine = slices_.data() + comm_.rank() * slice;
  add_in_order(gathered_.data(), slice, n_ranks, slice, mine);
  comm_.all_gather(mine, bytes, gathered_.data());
  std::copy_n(gathered_.data(), n, values);
}

}  // namespace kdt
