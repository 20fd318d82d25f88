// The CUDA backend, as the rest of the engine sees it: no CUDA header is needed to use it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "ops/ops.h"

namespace kdt {

struct CudaDevice {
  int index;
  std::string name;
  int major, minor;              // compute capability
  int64_t memory_bytes, free_bytes;
  std::string unusable;          // why this build cannot use it; empty: it can
};

// Every device of the driver. Error(unsupported) that says what is missing when there is no driver or no device.
std::vector<CudaDevice> cuda_devices();

// Error(unsupported, out_of_memory) naming the device and what to do about it.
std::unique_ptr<Ops> make_cuda_ops(int device);

// How partials become sums (ranks.cu): with the same bits, by other ways over the links. `measured`: what was faster at start, by
// size. `automatic`: that, where every rank has a device of its own; one shot where any share one.
enum class RankSums { automatic, measured, one_shot, two_shots };

// Makes the backends of one model's ranks, threads of this process: each calls it with its communicator, which outlives what it
// gets. Rank r has the r-th device from `first_device` on, round and round: several ranks may share one. Null: the only rank.
// Error(unsupported) too where devices cannot read each other's memory.
std::function<std::unique_ptr<Ops>(Communicator*)> cuda_ops_of_ranks(int first_device, RankSums sums = RankSums::automatic);

}  // namespace kdt
