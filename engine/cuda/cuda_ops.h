// The CUDA backend, as the rest of the engine sees it: no CUDA header is needed to use it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

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

}  // namespace kdt
