// Ranks as threads of one process: they read each other's memory.
#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"

namespace kdt {

// One for each of `n_ranks`, 1 to 64; in any order of destruction.
std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int n_ranks, Communicator::Deadline deadline);

}  // namespace kdt
