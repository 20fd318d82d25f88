// The backend that tests of models and rounds run on: the CPU, or with KDTREE_TEST_BACKEND=cuda the first CUDA device.
#pragma once

#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

#include "cpu/cpu_ops.h"
#include "cuda/cuda_ops.h"

namespace kdt::test {

inline bool on_cuda() {
  const char* backend = std::getenv("KDTREE_TEST_BACKEND");
  return backend && std::string(backend) == "cuda";
}

// Of the ranks of one model, threads of this process.
inline std::function<std::unique_ptr<Ops>(Communicator*)> make_test_ranks(int threads) {
  if (!on_cuda()) return [threads](Communicator* comm) { return make_cpu_ops(threads, "", comm); };
#ifdef KDT_CUDA
  return cuda_ops_of_ranks(0);
#else
  throw std::runtime_error("KDTREE_TEST_BACKEND: cuda: expected a build with the CUDA backend");
#endif
}

inline std::unique_ptr<Ops> make_test_ops(int threads) { return make_test_ranks(threads)(nullptr); }

}  // namespace kdt::test
