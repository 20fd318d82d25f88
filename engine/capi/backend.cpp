#include "capi/backend.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/thread_pool.h"
#include "capi/arguments.h"
#include "cpu/cpu_ops.h"
#include "cuda/cuda_ops.h"

namespace kdt::capi {
namespace {

struct Devices {
  std::vector<CudaDevice> all;
  std::string error;    // why there are none
};

Devices find_devices() {
#ifdef KDT_CUDA
  try {
    return {cuda_devices(), ""};
  } catch (const Error& error) {
    return {{}, error.what()};
  }
#else
  return {{}, "backend: cuda: not in this build: expected tools/setup without --cpu (or pip install) where there is "
              "an nvcc"};
#endif
}

// Kernels are chosen for the whole process: engines that live at the same time use one instruction set. No name means
// that of the others, or the best.
std::shared_ptr<const std::string> share_cpu_target(const char* name) {
  static std::mutex mutex;
  static std::weak_ptr<const std::string> in_use;
  std::lock_guard lock(mutex);
  std::shared_ptr<const std::string> target = in_use.lock();
  if (target) {
    check_argument(!name || *target == name, "cpu_target", name ? name : "",
                   *target + ", which another engine of this process uses");
    return target;
  }
  in_use = target = std::make_shared<const std::string>(name ? name : cpu_targets().front());
  return target;
}

// Threads of one rank: those of its process, or, where nothing was said, the CPUs it may use. Ranks of a process share them,
// and so do processes on one machine that their launcher has not bound to CPUs of their own.
int rank_threads(int threads, const Communicator* comm, bool launched) {
  const int all = threads > 0 ? threads : ThreadPool::available_cpus();
  const char* local = launched ? std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE") : nullptr;
  if (!local) return std::max(1, all / (comm ? comm->size() : 1));
  const bool unbound = threads == 0 && all >= sysconf(_SC_NPROCESSORS_ONLN);
  return std::max(1, all / (unbound ? std::max(1, std::atoi(local)) : 1));
}

// The CPU backend with its hold on the process's instruction set.
OpsFactory cpu_backend(const kdt_engine_options& o) {
  const auto threads = static_cast<int>(in_range("threads", o.threads, 0, 256));
  return [threads, launched = o.launched != 0, target = share_cpu_target(o.cpu_target)](Communicator* comm) {
    return make_cpu_ops(rank_threads(threads, comm, launched), *target, comm);
  };
}

OpsFactory cuda_backend([[maybe_unused]] int device) {
#ifdef KDT_CUDA
  return cuda_ops_of_ranks(device);
#else
  throw Error(Status::unsupported, find_devices().error);
#endif
}

}  // namespace

OpsFactory choose_backend(const kdt_engine_options& o) {
  const std::string_view name = o.backend ? o.backend : "auto";
  const auto device = static_cast<int>(in_range("device", o.device, 0, 1023));
  if (name == "cpu") return cpu_backend(o);
  check_argument(name == "cuda" || name == "auto", "backend", std::string(name), "auto, cpu or cuda");
  const Devices devices = find_devices();
  const auto found = std::find_if(devices.all.begin(), devices.all.end(), [&](const auto& d) { return d.index == device; });
  if (name == "auto")
    return found != devices.all.end() && found->unusable.empty() ? cuda_backend(device) : cpu_backend(o);
  if (!devices.error.empty()) throw Error(Status::unsupported, devices.error);
  check_argument(found != devices.all.end(), "device", std::to_string(device),
                 "the index of one of the " + std::to_string(devices.all.size()) + " devices there are");
  if (!found->unusable.empty()) fail(Status::unsupported, "device " + std::to_string(device), found->name, found->unusable);
  return cuda_backend(device);
}

std::string devices_json() {
  const Devices devices = find_devices();
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const CudaDevice& d : devices.all)
    list.push_back({{"index", d.index},
                    {"name", d.name},
                    {"compute_capability", std::to_string(d.major) + "." + std::to_string(d.minor)},
                    {"memory_bytes", d.memory_bytes},
                    {"free_bytes", d.free_bytes},
                    {"usable", d.unusable.empty()},
                    {"reason", d.unusable.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(d.unusable)}});
  const nlohmann::ordered_json error =
      devices.error.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(devices.error);
  return nlohmann::ordered_json{{"devices", list}, {"error", error}}.dump(-1, ' ', false,
                                                                         nlohmann::json::error_handler_t::replace);
}

}  // namespace kdt::capi
