// Where ranks meet, on the CPU.
#include <algorithm>
#include <cstring>

#include "cpu/cpu_backend.h"

namespace kdt::cpu {

void CpuOps::sum_ranks(const SumRanksArgs& args) {
  const int64_t n = args.n.now(), stride = args.out_rows.stride > 0 ? args.out_rows.stride : args.width;
  auto* out = static_cast<float*>(args.out);
  for (int64_t i = 0; i < n; ++i) {
    const float* from = args.partial + i * args.width;
    float* to = out + (args.out_rows.index ? args.out_rows.index[i] : i) * stride;
    for (int64_t d = 0; d < args.width; ++d) to[d] = args.accumulate ? to[d] + from[d] : from[d];
  }
}

void CpuOps::gather_ranks(const GatherRanksArgs& args) {
  const size_t row = static_cast<size_t>(args.width) * args.element_bytes;
  for (int64_t i = 0; i < args.n.now(); ++i)
    std::memcpy(static_cast<std::byte*>(args.out) + static_cast<size_t>(i * args.n_ranks + args.rank) * row,
                static_cast<const std::byte*>(args.part) + static_cast<size_t>(i) * row, row);
}

}  // namespace kdt::cpu
