// Which backend an engine computes on: what the host asked for, or the best there is.
#pragma once

#include <string>

#include "include/kdtree.h"
#include "runtime/engine_options.h"

namespace kdt::capi {

// A factory for the backends of these options; checks them. Error(invalid_argument, unsupported) that says what there is.
OpsFactory choose_backend(const kdt_engine_options& options);

// The devices of the CUDA backend, as JSON: {"devices": [{index, name, compute_capability, memory_bytes, free_bytes, usable,
// reason}], "error": null or why there are none}.
std::string devices_json();

}  // namespace kdt::capi
