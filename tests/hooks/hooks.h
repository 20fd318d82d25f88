// What the test hooks share: a backend with what was uploaded to it, how arrays reach it, and the guard that stops
// exceptions.
//
// A hook returns NULL, or the message of the error (borrowed until the thread's next call). Arrays are the caller's, in
// host memory and fp32 where the backend has its activation type: Staged takes them where the backend computes.
#pragma once

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ops/ops.h"

#define KDT_HOOK extern "C" __attribute__((visibility("default")))

namespace kdt::hooks {

// An instruction set of the CPU ("": the best), or "cuda": its first device.
std::unique_ptr<Ops> make_ops(int threads, const std::string& target);

// A matrix is known by its index. One thread at a time.
struct Backend {
  std::unique_ptr<Ops> ops;
  std::vector<Matrix> matrices = {};
  std::map<std::vector<int64_t>, MatrixGroup> groups = {};
  std::map<int64_t, std::pair<Exchange, Exchange>> rounds = {};   // see kdt_hook_rounds
  int64_t n_recorded = 0;

  bool on_device() const { return std::string_view(ops->backend()) != "cpu"; }
  int64_t keep(const Matrix& matrix) {
    matrices.push_back(matrix);
    return static_cast<int64_t>(matrices.size()) - 1;
  }
  const Matrix& matrix(int64_t id) const { return matrices.at(static_cast<size_t>(id)); }
  MatrixGroup group(const int64_t* ids, int64_t n) {
    const std::vector<int64_t> key(ids, ids + n);
    if (const auto known = groups.find(key); known != groups.end()) return known->second;
    std::vector<Matrix> found;
    for (int64_t id : key) found.push_back(matrix(id));
    return groups[key] = ops->group(found);
  }
};

// The arguments of hooks, as tests/python/op_hooks.py fills them.
struct Array {
  void* data;
  int64_t bytes;
  template <class T>
  int64_t count() const { return bytes / static_cast<int64_t>(sizeof(T)); }
};
struct CountArgument {
  int64_t most;
  const int32_t* live;   // null: all
};
struct RowsArgument {
  CountArgument n;
  Array token, position, stream, parent, visible;
};

// The arrays of one call. On the CPU they stay where they are; for a device each is copied to memory of its own, between
// guard bytes that read as NaN, and back when the work is done. An array that is given twice is one array there too.
class Staged {
 public:
  explicit Staged(Backend& backend) : backend_(backend) {}

  // Null stays null. What comes through `in` must not change.
  template <class T>
  const T* in(const Array* array) { return static_cast<const T*>(place(array, kOffset<T>, false, false)); }
  template <class T>
  T* out(const Array* array) { return static_cast<T*>(place(array, kOffset<T>, false, true)); }
  const Act* act_in(const Array* array) { return place(array, kOffset<Act>, true, false); }
  Act* act_out(const Array* array) { return place(array, kOffset<Act>, true, true); }

  Count count(const CountArgument* n);
  Rows rows(const RowsArgument* rows);
  // Row i of the page tables [n_streams, width] is the stream's.
  const StreamPages* streams(const Array* page_tables, int64_t n_streams);
  // Structs that the hook has made: they must stay until run() is done.
  template <class T>
  const T* values(const std::vector<T>& made) {
    auto* host = const_cast<T*>(made.data());
    return static_cast<const T*>(place_bytes(host, made.size() * sizeof(T), kOffset<T>, false, false));
  }
  // Memory of nobody's, all NaN: an operation's scratch.
  void* work(size_t bytes) { return piece(nullptr, bytes, kOffset<Act>, false, true); }

  // Submits and waits. With a live count twice: recorded while nothing is live, then replayed with the counts as given.
  void run(const std::function<void(Ops&)>& work);

 private:
  // Where an array begins, in bytes from a multiple of 128: as aligned as a buffer is, ids as their type is, and no more
  // by luck.
  template <class T>
  static constexpr size_t kOffset = std::is_same_v<T, int32_t> ? 4 : 64;
  struct Piece {
    void* host;          // null: work
    size_t bytes;        // in the backend's memory
    bool act, written;
    size_t begin;        // where it lies in `memory`
    Buffer memory;
    std::vector<std::byte> sent;
  };

  void* place(const Array* array, size_t offset, bool act, bool written) {
    return array ? place_bytes(array->data, static_cast<size_t>(array->bytes), offset, act, written) : nullptr;
  }
  void* place_bytes(void* host, size_t bytes, size_t offset, bool act, bool written);
  void* piece(void* host, size_t bytes, size_t offset, bool act, bool written);
  void bring_back(Piece& piece);
  void set_live(bool as_given);

  Backend& backend_;
  std::vector<Piece> pieces_;
  std::vector<std::unique_ptr<std::vector<StreamPages>>> streams_;
  std::vector<int32_t> live_;          // the caller's counts, and where the backend reads them
  std::vector<Buffer> live_memory_;
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

}  // namespace kdt::hooks
