// Calls of kdtree.h that hand out arrays.
#pragma once

#include <cstdint>
#include <string>

#include "kdtree.h"
#include "openai_error.h"

namespace kdt::openai {

// `call(data, capacity, &n)` reports the full count when the buffer, at first `guess` elements, is too small. `Buffer`
// is a string or a vector. Throws ApiError for what else goes wrong.
template <class Buffer, class Call>
Buffer collect(size_t guess, const Call& call) {
  Buffer buffer;
  buffer.resize(guess);
  int64_t n = 0;
  kdt_status status = call(buffer.data(), static_cast<int64_t>(buffer.size()), &n);
  if (status == KDT_ERR_BUFFER_TOO_SMALL) {
    buffer.resize(static_cast<size_t>(n));
    status = call(buffer.data(), n, &n);
  }
  if (status != KDT_OK) throw from_status(status, kdt_last_error());
  buffer.resize(static_cast<size_t>(n));
  return buffer;
}

}  // namespace kdt::openai
