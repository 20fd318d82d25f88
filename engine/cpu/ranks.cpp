// Where ranks meet, on the CPU: bytes move through the communicator and are added here.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/error.h"
#include "cpu/cpu_backend.h"

namespace kdt::cpu {
namespace {

// Of one meeting: partials and parts that are longer take several. Bits do not depend on it.
constexpr int64_t kSumFloats = 1 << 20;
constexpr size_t kGatherBytes = 4 << 20;

}  // namespace

RankMeeting::RankMeeting(Communicator& comm)
    : comm(comm), sum(comm, kSumFloats), gathered(static_cast<size_t>(comm.size()) * kGatherBytes) {}

void CpuOps::sum_ranks(const SumRanksArgs& args) {
  const int64_t n = args.n.now(), total = n * args.width;
  if (ranks_)
    for (int64_t at = 0; at < total; at += kSumFloats)
      ranks_->sum(args.partial + at, std::min(kSumFloats, total - at));
  const int64_t stride = args.out_rows.stride > 0 ? args.out_rows.stride : args.width;
  auto* out = static_cast<float*>(args.out);
  for (int64_t i = 0; i < n; ++i) {
    const float* from = args.partial + i * args.width;
    float* to = out + (args.out_rows.index ? args.out_rows.index[i] : i) * stride;
    for (int64_t d = 0; d < args.width; ++d) to[d] = args.accumulate ? to[d] + from[d] : from[d];
  }
  if (args.norm_weight)
    rms_norm({args.n, args.width, args.out, args.norm_weight, args.eps, args.norm_out, args.out_rows, args.out_rows});
}

void CpuOps::gather_ranks(const GatherRanksArgs& args) {
  const int64_t n = args.n.now();
  const size_t row = static_cast<size_t>(args.width) * args.element_bytes;
  const auto* part = static_cast<const std::byte*>(args.part);
  auto* out = static_cast<std::byte*>(args.out);
  const auto place = [&](const std::byte* from, int64_t i, int64_t rank) {
    std::memcpy(out + static_cast<size_t>(i * args.n_ranks + rank) * row, from, row);
  };
  if (!ranks_) {
    for (int64_t i = 0; i < n; ++i) place(part + static_cast<size_t>(i) * row, i, args.rank);
    return;
  }
  if (row > kGatherBytes)
    fail(Status::unsupported, "a rank's part of a row", std::to_string(row) + " bytes",
         "at most " + std::to_string(kGatherBytes));
  const auto most = std::max<int64_t>(1, static_cast<int64_t>(kGatherBytes / row));
  for (int64_t first = 0; first < n; first += most) {
    const int64_t rows = std::min(most, n - first);
    const size_t bytes = static_cast<size_t>(rows) * row;
    ranks_->comm.all_gather(part + static_cast<size_t>(first) * row, bytes, ranks_->gathered.data());
    for (int64_t rank = 0; rank < args.n_ranks; ++rank)
      for (int64_t i = 0; i < rows; ++i)
        place(ranks_->gathered.data() + static_cast<size_t>(rank) * bytes + static_cast<size_t>(i) * row, first + i, rank);
  }
}

// As a device would: whoever submitted the work waits.
void CpuOps::pause(double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (Clock::now() < end) {}
}

}  // namespace kdt::cpu
