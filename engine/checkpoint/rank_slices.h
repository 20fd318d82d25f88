// What one rank loads: its shard; or, of a checkpoint that nobody sharded, the same tensors made in memory.
#pragma once

#include <optional>
#include <string>

#include "checkpoint/checkpoint.h"

namespace kdt {

// A checkpoint is cut in memory up to this size: it is read once by every rank, and held twice while it loads.
constexpr int64_t kMostSlicedBytes = int64_t{8} << 30;

struct RankCheckpoints {
  Checkpoint target;
  std::optional<Checkpoint> draft;
};

// `draft` empty: none. Both are opened before either is read: progress is of all there is to load.
RankCheckpoints open_rank(const std::string& model, const std::string& draft, const LoadOptions& options);

}  // namespace kdt
