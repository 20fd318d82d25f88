// Ranks as processes that a standard launcher started: `mpirun -n 4 …`. Open MPI's library is opened when it is needed, so
// that an engine without it runs.
#pragma once

#include <cstdlib>
#include <memory>

#include "comm/communicator.h"

namespace kdt {

// Whether Open MPI's launcher started this process.
inline bool under_mpi_launcher() { return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr; }

// Of this process, among all that were launched with it; once a process. Error(unsupported) when the engine was built
// without MPI, Error(io) when its library is not there. Its destruction is a collective call that ends MPI, unless a rank has
// failed or does not come: a process that ends without makes the launcher end the others.
std::unique_ptr<Communicator> make_mpi_communicator(Communicator::Deadline deadline);

}  // namespace kdt
