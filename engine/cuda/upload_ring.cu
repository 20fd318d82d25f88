#include "cuda/upload_ring.h"

#include <algorithm>
#include <cstring>

#include "cuda/cuda_backend.h"

namespace kdt::cuda {
namespace {

constexpr size_t kSlots = 8, kStreams = 2;
constexpr int kMostThreads = 4;              // of one rank: about what one copy engine takes
constexpr size_t kSharePiece = 128 << 10;    // less than this is not worth another thread

}  // namespace

UploadRing::UploadRing(Ops& ops, cudaStream_t after)
    : after_(after), threads_(std::min(kMostThreads, ThreadPool::available_cpus())) {
  try {
    for (size_t i = 0; i < kStreams; ++i)
      check(cudaStreamCreateWithFlags(&streams_.emplace_back(), cudaStreamNonBlocking), "cudaStreamCreate");
    for (size_t i = 0; i < kSlots; ++i) {
      Slot& slot = slots_.emplace_back(Slot{ops.exchange(kSlotBytes), streams_[i % kStreams]});
      check(cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming), "cudaEventCreate");
    }
    check(cudaStreamSynchronize(after_), "upload");   // staging is zeroed there
  } catch (...) {
    release();
    throw;
  }
}

UploadRing::~UploadRing() { release(); }

void UploadRing::release() {
  for (cudaStream_t stream : streams_)
    if (stream) {
      cudaStreamSynchronize(stream);
      cudaStreamDestroy(stream);
    }
  for (const Slot& slot : slots_)
    if (slot.done) cudaEventDestroy(slot.done);
}

UploadRing::Slot& UploadRing::next() {
  Slot& slot = slots_[turn_++ % kSlots];
  check(cudaEventSynchronize(slot.done), "upload");
  return slot;
}

// Shares are bytes of the dense result, in whole cache lines.
void UploadRing::fill(Slot& slot, const std::byte* from, size_t rows, size_t row_bytes, size_t pitch) {
  constexpr size_t kLine = 64;
  const size_t bytes = rows * row_bytes;
  const auto copy_share = [&](size_t begin, size_t end) {
    if (pitch == row_bytes) {
      std::memcpy(slot.memory.host() + begin, from + begin, end - begin);
      return;
    }
    for (size_t at = begin; at < end;) {
      const size_t row = at / row_bytes, column = at % row_bytes, n = std::min(row_bytes - column, end - at);
      std::memcpy(slot.memory.host() + at, from + row * pitch + column, n);
      at += n;
    }
  };
  if (bytes <= kSharePiece) return copy_share(0, bytes);
  threads_.run([&](int t) {
    const auto share = threads_.share(static_cast<int64_t>((bytes + kLine - 1) / kLine), t);
    copy_share(static_cast<size_t>(share.begin) * kLine, std::min(static_cast<size_t>(share.end) * kLine, bytes));
  });
}

void UploadRing::to_device(const Slot& slot, size_t bytes, void* to) {
  check(cudaMemcpyAsync(to, slot.memory.host(), bytes, cudaMemcpyHostToDevice, slot.stream), "upload");
}

void UploadRing::done(const Slot& slot) {
  check(cudaEventRecord(slot.done, slot.stream), "cudaEventRecord");
  check(cudaStreamWaitEvent(after_, slot.done), "cudaStreamWaitEvent");
}

void UploadRing::copy(const std::byte* from, size_t bytes, void* to) {
  for (size_t at = 0; at < bytes; at += kSlotBytes) {
    const size_t n = std::min(kSlotBytes, bytes - at);
    Slot& slot = next();
    fill(slot, from + at, 1, n, n);
    to_device(slot, n, static_cast<std::byte*>(to) + at);
    done(slot);
  }
}

}  // namespace kdt::cuda
