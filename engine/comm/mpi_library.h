// Open MPI's functions that mpi_comm.cpp calls, found in its library at run time and typed by its header.
#pragma once

#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

namespace kdt {

struct MpiLibrary {
  decltype(&MPI_Initialized) initialized;
  decltype(&MPI_Init_thread) init_thread;
  decltype(&MPI_Finalize) finalize;
  decltype(&MPI_Comm_rank) comm_rank;
  decltype(&MPI_Comm_size) comm_size;
  decltype(&MPI_Comm_set_errhandler) comm_set_errhandler;
  decltype(&MPI_Isend) isend;
  decltype(&MPI_Irecv) irecv;
  decltype(&MPI_Recv) recv;
  decltype(&MPI_Test) test;
  decltype(&MPI_Iprobe) iprobe;
  decltype(&MPI_Get_count) get_count;
  decltype(&MPI_Error_string) error_string;
  // Predefined objects: the header's macros are addresses inside the library, which is not linked.
  MPI_Comm world;
  MPI_Datatype byte;
  MPI_Errhandler errors_return;

  // Opened once a process. Error(io) naming the library or what it lacks.
  static const MpiLibrary& get();
};

}  // namespace kdt
