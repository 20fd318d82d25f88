#include "comm/nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "base/error.h"

namespace kdt {
namespace {

constexpr const char* kLibrary = "libnccl.so.2";
constexpr const char* kVariable = "KDTREE_NCCL";

std::string name_of(const std::string& given) {
  if (!given.empty()) return given;
  const char* variable = std::getenv(kVariable);
  return variable && *variable != '\0' ? variable : kLibrary;
}

template <class Function>
void find(void* library, const std::string& name, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  if (!function) fail(Status::io, name + ": " + symbol, "absent", "NCCL's function");
}

}  // namespace

std::string nccl_version_text(int code) {
  // Two digits of the minor version since 2.9.
  const int major = code < 10000 ? code / 1000 : code / 10000;
  const int minor = code < 10000 ? code / 100 % 10 : code / 100 % 100;
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(code % 100);
}

NcclLibrary NcclLibrary::open(const std::string& given) {
  const std::string name = name_of(given);
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* why = dlerror();
    fail(Status::io, name, why ? why : "not opened",
         std::string("NCCL: PyPI's nvidia-nccl-cu13, with ") + kVariable + " naming its lib/libnccl.so.2, or the distribution's");
  }
  NcclLibrary nccl{};
  find(library, name, "ncclGetVersion", nccl.get_version);
  int version = 0;
  if (nccl.get_version(&version) != ncclSuccess || version < kOldest)
    fail(Status::unsupported, name, "NCCL " + nccl_version_text(version), nccl_version_text(kOldest) + " or newer");
  find(library, name, "ncclGetUniqueId", nccl.get_unique_id);
  find(library, name, "ncclCommInitRankConfig", nccl.comm_init_rank_config);
  find(library, name, "ncclCommGetAsyncError", nccl.comm_get_async_error);
  find(library, name, "ncclCommFinalize", nccl.comm_finalize);
  find(library, name, "ncclCommDestroy", nccl.comm_destroy);
  find(library, name, "ncclCommAbort", nccl.comm_abort);
  find(library, name, "ncclGetErrorString", nccl.get_error_string);
  find(library, name, "ncclGetLastError", nccl.get_last_error);
  find(library, name, "ncclGroupStart", nccl.group_start);
  find(library, name, "ncclGroupEnd", nccl.group_end);
  find(library, name, "ncclBroadcast", nccl.broadcast);
  find(library, name, "ncclAllGather", nccl.all_gather);
  find(library, name, "ncclSend", nccl.send);
  find(library, name, "ncclRecv", nccl.recv);
  return nccl;
}

}  // namespace kdt
