// Where exceptions stop: every entry point runs inside guarded(), which turns them into a status and a message.
#pragma once

#include <algorithm>
#include <exception>
#include <new>
#include <string>

#include "base/error.h"
#include "include/kdtree.h"

namespace kdt::capi {

std::string& last_error();   // of this thread

template <class F>
kdt_status guarded(F&& f) noexcept {
  try {
    last_error().clear();
    f();
    return KDT_OK;
  } catch (const Error& error) {
    last_error() = error.what();
    return static_cast<kdt_status>(error.status());
  } catch (const std::bad_alloc&) {
    last_error() = "memory: exhausted: expected more free memory";
    return KDT_ERR_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    last_error() = error.what();
  } catch (...) {
    last_error() = "unknown exception";
  }
  return KDT_ERR_INTERNAL;
}

// Copies a client's options over the defaults already in `to`: the smaller of the two sizes; an unknown tail must be zero.
template <class Options>
void copy_options(const Options* from, Options& to) {
  check_argument(from != nullptr, "options", "NULL", "a struct set up by its _init function");
  const uint32_t given = from->struct_size;
  // ABI 1 is the first: no shorter struct was ever published.
  check_argument(given >= sizeof(Options) && given <= 4096, "struct_size", std::to_string(given),
                 std::to_string(sizeof(Options)) + ", as the _init function sets it");
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  for (size_t i = sizeof(Options); i < given; ++i)
    check_argument(bytes[i] == 0, "options", "a field this version does not know", "zero there");
  std::copy_n(bytes, std::min<size_t>(given, sizeof(Options)), reinterpret_cast<unsigned char*>(&to));
}

// Hands `count` elements to the caller's array, by the rules of kdtree.h.
template <class T, class U>
void hand_out(const T* from, size_t count, U* to, int64_t capacity, int64_t* n) {
  check_argument(n != nullptr, "n", "NULL", "a place for the count");
  *n = static_cast<int64_t>(count);
  if (*n > capacity)
    fail(Status::buffer_too_small, "capacity", std::to_string(capacity), "at least " + std::to_string(count));
  check_argument(to != nullptr || count == 0, "buffer", "NULL", "an array of the capacity given");
  std::copy_n(from, count, to);
}

}  // namespace kdt::capi
