// The handle that several files of the C ABI look into.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "base/error.h"
#include "comm/communicator.h"
#include "include/kdtree.h"
#include "runtime/engine.h"

struct kdt_engine {
  kdt::OpsFactory backend;   // keeps what engines alive together have in common
  std::unique_ptr<kdt::Communicator> comm;   // where ranks are processes
  std::unique_ptr<kdt::Engine> engine;       // of rank 0
  std::unique_ptr<kdt::Follower> follower;   // of the others

  // A series name that lives as long as the handle.
  const char* name_of(const std::string& series) {
    std::lock_guard lock(names_mutex);
    return names.insert(series).first->c_str();
  }
  std::mutex names_mutex;
  std::set<std::string> names;
};

struct kdt_load_progress {
  kdt::LoadProgress progress;
};

namespace kdt::capi {

inline Engine& engine_of(kdt_engine* handle) {
  check_argument(handle != nullptr, "engine", "NULL", "an engine");
  if (handle->follower)
    fail(Status::unsupported, "engine", "rank " + std::to_string(handle->follower->rank()), "rank 0, which alone takes requests");
  return *handle->engine;
}

}  // namespace kdt::capi
