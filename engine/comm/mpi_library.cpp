#include "comm/mpi_library.h"

#include <dlfcn.h>

#include <string>

#include "base/error.h"

namespace kdt {
namespace {

constexpr const char* kLibrary = "libmpi.so.40";   // of Open MPI 4 and 5

void* symbol(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (!found) fail(Status::io, std::string(kLibrary) + ": " + name, "absent", "Open MPI's function");
  return found;
}

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(symbol(library, name));
}

MpiLibrary open() {
  // Global: Open MPI opens components of its own, which look for its symbols.
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_GLOBAL);
  if (!library) fail(Status::io, kLibrary, dlerror(), "Open MPI (the distribution's openmpi-bin)");
  MpiLibrary mpi{};
  find(library, "MPI_Initialized", mpi.initialized);
  find(library, "MPI_Init_thread", mpi.init_thread);
  find(library, "MPI_Finalize", mpi.finalize);
  find(library, "MPI_Comm_rank", mpi.comm_rank);
  find(library, "MPI_Comm_size", mpi.comm_size);
  find(library, "MPI_Comm_set_errhandler", mpi.comm_set_errhandler);
  find(library, "MPI_Isend", mpi.isend);
  find(library, "MPI_Irecv", mpi.irecv);
  find(library, "MPI_Recv", mpi.recv);
  find(library, "MPI_Test", mpi.test);
  find(library, "MPI_Iprobe", mpi.iprobe);
  find(library, "MPI_Get_count", mpi.get_count);
  find(library, "MPI_Error_string", mpi.error_string);
  mpi.world = static_cast<MPI_Comm>(symbol(library, "ompi_mpi_comm_world"));
  mpi.byte = static_cast<MPI_Datatype>(symbol(library, "ompi_mpi_byte"));
  mpi.errors_return = static_cast<MPI_Errhandler>(symbol(library, "ompi_mpi_errors_return"));
  return mpi;
}

}  // namespace

const MpiLibrary& MpiLibrary::get() {
  static const MpiLibrary library = open();
  return library;
}

}  // namespace kdt
