// Where the ranks of a model meet (ops.h). What a rank gives stays until all have met once more, or have waited and met.
#pragma once

#include "ops/types.h"

namespace kdt {

// out (+)= the sum of all ranks' partials: fp32, ((p0 + p1) + p2) + …, rounded once (with the residual). Every rank gets the
// same bits. Where a backend was made for one rank of several without the others, its own partial is all there is.
struct SumRanksArgs {
  Count n;                   // the same on every rank
  int64_t width;
  float* partial;            // [n, width], of allocate_for_ranks(); may be overwritten
  Act* out;
  bool accumulate;           // out += the sum, else out = the sum
  RowLayout out_rows = {};
  // With a weight, then the norm of those rows as rms_norm gives it, to norm_out, laid out as out is.
  const float* norm_weight = nullptr;   // [width]
  float eps = 0;
  Act* norm_out = nullptr;
};

// Every rank's columns side by side: out[i][r * width + j] = part of rank r [i][j].
struct GatherRanksArgs {
  Count n;                   // the same on every rank
  int64_t width;             // of a rank's part
  size_t element_bytes;      // 2 or 4
  const void* part;          // [n, width], of allocate_for_ranks()
  int64_t rank, n_ranks;
  void* out;                 // [n, n_ranks * width]; of a backend without the other ranks their columns stay as they are
};

}  // namespace kdt
