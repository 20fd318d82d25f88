// The backend that tests of models and rounds run on: the CPU, or with KDTREE_TEST_BACKEND=cuda the first CUDA device.
#pragma once

#include <cstdlib>
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

inline std::unique_ptr<Ops> make_test_ops(int threads) {
  if (!on_cuda()) return make_cpu_ops(threads, "");
#ifdef KDT_CUDA
  return make_cuda_ops(0);
#else
  throw std::runtime_error("KDTREE_TEST_BACKEND: cuda: expected a build with the CUDA backend");
#endif
}

}  // namespace kdt::test
