// In place of mpi_comm.cpp where Open MPI's headers were not there to build with.
#include "base/error.h"
#include "comm/mpi_comm.h"

namespace kdt {

std::unique_ptr<Communicator> make_mpi_communicator(Communicator::Deadline) {
  fail(Status::unsupported, "MPI", "not built in", "an engine built where libopenmpi-dev is installed");
}

}  // namespace kdt
