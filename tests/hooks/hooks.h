// What the test hooks share: a backend with what was uploaded to it, and the guard that stops exceptions.
//
// A hook returns NULL, or the message of the error (borrowed until the thread's next call). Arrays are the caller's.
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "cpu/cpu_ops.h"

#define KDT_HOOK extern "C" __attribute__((visibility("default")))

namespace kdt::hooks {

// A matrix is known by its index. One thread at a time.
struct Backend {
  std::unique_ptr<Ops> ops;
  std::vector<Matrix> matrices;

  int64_t keep(const Matrix& matrix) {
    matrices.push_back(matrix);
    return static_cast<int64_t>(matrices.size()) - 1;
  }
  const Matrix& matrix(int64_t id) const { return matrices.at(static_cast<size_t>(id)); }
  std::vector<Matrix> matrices_of(const int64_t* ids, int64_t n) const {
    std::vector<Matrix> found;
    for (int64_t i = 0; i < n; ++i) found.push_back(matrix(ids[i]));
    return found;
  }
};

template <class F>
const char* guarded(F&& f) {
  thread_local std::string message;
  try {
    f();
    return nullptr;
  } catch (const std::exception& e) {
    message = e.what();
    return message.c_str();
  }
}

// Row i of the page tables [n_streams, width] is the stream's.
inline std::vector<StreamPages> streams_of(const int32_t* page_tables, int64_t n_streams, int64_t width) {
  std::vector<StreamPages> streams;
  for (int64_t i = 0; i < n_streams; ++i) streams.push_back({page_tables + i * width});
  return streams;
}

}  // namespace kdt::hooks
