// A library with NCCL's names for machines without GPUs: ranks are threads of one process, "device" memory is the host's,
// and what was asked for is done while its state is asked for. FAKE_NCCL_VERSION: what it says it is.
#include <nccl.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

struct Group {
  int joined = 0;
  bool aborted = false;
  std::map<std::pair<int, int>, std::deque<std::vector<char>>> mail;   // from, to
};

std::mutex mutex;
std::map<std::string, Group> groups;   // by id
std::atomic<int> ids{0};

}  // namespace

struct ncclComm {
  struct Receive {
    int from;
    void* to;
    size_t bytes;
  };
  Group* group;
  int rank, n;
  std::deque<Receive> receives;

  void send(const void* data, size_t bytes, int to) {
    const auto* from = static_cast<const char*>(data);
    group->mail[{rank, to}].emplace_back(from, from + bytes);
  }
};

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  const char* said = std::getenv("FAKE_NCCL_VERSION");
  *version = said ? std::atoi(said) : NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};
  std::strcpy(id->internal, std::to_string(++ids).c_str());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int n, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (config->blocking != 0) return ncclInvalidUsage;
  std::lock_guard lock(mutex);
  Group& group = groups[id.internal];
  ++group.joined;
  *comm = new ncclComm{&group, rank, n, {}};
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  std::lock_guard lock(mutex);
  *state = comm->group->joined < comm->n ? ncclInProgress : ncclSuccess;
  std::deque<ncclComm::Receive> waiting;
  for (const ncclComm::Receive& receive : comm->receives) {
    auto& mail = comm->group->mail[{receive.from, comm->rank}];
    if (mail.empty()) {
      waiting.push_back(receive);
      *state = ncclInProgress;
    } else if (mail.front().size() != receive.bytes) {
      *state = ncclInvalidArgument;
    } else {
      std::memcpy(receive.to, mail.front().data(), receive.bytes);
      mail.pop_front();
    }
  }
  comm->receives = waiting;
  if (comm->group->aborted) *state = ncclRemoteError;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclInProgress; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete comm;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  {
    std::lock_guard lock(mutex);
    comm->group->aborted = true;
  }
  return ncclCommDestroy(comm);
}
const char* ncclGetErrorString(ncclResult_t code) { return code == ncclInvalidArgument ? "invalid argument" : "other"; }
const char* ncclGetLastError(ncclComm_t) { return "of the fake"; }
ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return ncclInProgress; }

ncclResult_t ncclSend(const void* data, size_t bytes, ncclDataType_t, int to, ncclComm_t comm, cudaStream_t) {
  std::lock_guard lock(mutex);
  comm->send(data, bytes, to);
  return ncclInProgress;
}

ncclResult_t ncclRecv(void* data, size_t bytes, ncclDataType_t, int from, ncclComm_t comm, cudaStream_t) {
  std::lock_guard lock(mutex);
  comm->receives.push_back({from, data, bytes});
  return ncclInProgress;
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t bytes, ncclDataType_t, int root, ncclComm_t comm,
                           cudaStream_t) {
  if (root < 0 || root >= comm->n) return ncclInvalidArgument;
  std::lock_guard lock(mutex);
  for (int r = 0; comm->rank == root && r < comm->n; ++r) comm->send(from, bytes, r);
  comm->receives.push_back({root, to, bytes});
  return ncclInProgress;
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t bytes, ncclDataType_t, ncclComm_t comm, cudaStream_t) {
  std::lock_guard lock(mutex);
  for (int r = 0; r < comm->n; ++r) {
    comm->send(from, bytes, r);
    comm->receives.push_back({r, static_cast<char*>(to) + static_cast<size_t>(r) * bytes, bytes});
  }
  return ncclInProgress;
}

}  // extern "C"
