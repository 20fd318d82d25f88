// NCCL's functions that nccl_comm.cpp calls, found in its library at run time and typed by its header.
#pragma once

#include <nccl.h>

#include <string>

namespace kdt {

struct NcclLibrary {
  decltype(&ncclGetVersion) get_version;
  decltype(&ncclGetUniqueId) get_unique_id;
  decltype(&ncclCommInitRankConfig) comm_init_rank_config;
  decltype(&ncclCommGetAsyncError) comm_get_async_error;
  decltype(&ncclCommFinalize) comm_finalize;
  decltype(&ncclCommDestroy) comm_destroy;
  decltype(&ncclCommAbort) comm_abort;
  decltype(&ncclGetErrorString) get_error_string;
  decltype(&ncclGetLastError) get_last_error;
  decltype(&ncclGroupStart) group_start;
  decltype(&ncclGroupEnd) group_end;
  decltype(&ncclBroadcast) broadcast;
  decltype(&ncclAllGather) all_gather;
  decltype(&ncclSend) send;
  decltype(&ncclRecv) recv;

  // `name` as of make_nccl_communicator. A library stays loaded. Error(io) naming the library or what it lacks,
  // Error(unsupported) for one older than kOldest.
  static NcclLibrary open(const std::string& name);
  static constexpr int kOldest = NCCL_VERSION(2, 18, 1);   // calls that do not block, and their errors
};

// "2.18.1"
std::string nccl_version_text(int code);

}  // namespace kdt
