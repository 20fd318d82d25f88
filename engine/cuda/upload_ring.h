// Weights on their way to the device. The driver copies from memory that is not pinned through a small buffer of its own with
// one thread, and its caller waits; here several threads fill pinned slots, and copies and kernels of one slot run while others
// are filled:
//
//   mapped file or any memory -- threads --> pinned slot -- copy stream --> where it belongs, or staging -- kernel --> there
//
// One thread calls; order of pieces does not matter, and whoever works on the device's own stream later finds all of them there.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "base/thread_pool.h"
#include "ops/ops.h"

namespace kdt::cuda {

class UploadRing {
 public:
  static constexpr size_t kSlotBytes = 8 << 20;

  // `after` is the stream of the device that works with what is uploaded. Takes kSlots * kSlotBytes of pinned memory, and as much
  // of the device's. Error(out_of_memory).
  UploadRing(Ops& ops, cudaStream_t after);
  ~UploadRing();
  UploadRing(const UploadRing&) = delete;
  UploadRing& operator=(const UploadRing&) = delete;

  // `from` is the caller's again on return; `to` is the device's.
  void copy(const std::byte* from, size_t bytes, void* to);

  // Rows of row_bytes (at most kSlotBytes), `pitch` apart, to staging on the device, some at a time and dense; for each lot
  // lay(staged, first row, rows, stream) queues what brings them to their place.
  template <class Lay>
  void stage(const std::byte* from, size_t rows, size_t row_bytes, size_t pitch, const Lay& lay) {
    const size_t most = kSlotBytes / row_bytes;
    for (size_t row = 0; row < rows; row += most) {
      const size_t n = rows - row < most ? rows - row : most;
      Slot& slot = next();
      fill(slot, from + row * pitch, n, row_bytes, pitch);
      to_device(slot, n * row_bytes, slot.memory.device());
      lay(slot.memory.device(), row, n, slot.stream);
      done(slot);
    }
  }

 private:
  struct Slot {
    Exchange memory;
    cudaStream_t stream;          // of kStreams, in turn
    cudaEvent_t done = nullptr;   // what was queued with it last has run
  };
  Slot& next();                   // free to be filled
  void fill(Slot& slot, const std::byte* from, size_t rows, size_t row_bytes, size_t pitch);
  void to_device(const Slot& slot, size_t bytes, void* to);
  void done(const Slot& slot);
  void release();

  cudaStream_t after_;
  ThreadPool threads_;
  std::vector<cudaStream_t> streams_;
  std::vector<Slot> slots_;
  size_t turn_ = 0;
};

}  // namespace kdt::cuda
