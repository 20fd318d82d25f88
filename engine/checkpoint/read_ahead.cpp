#include "checkpoint/read_ahead.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace kdt {
namespace {

// Threads that wait for a disk, not for a core: enough requests in flight for a few NVMe drives.
constexpr int kMappedThreads = 4, kDirectThreads = 8;
constexpr size_t kPage = 4096;

// Pages of a mapping come into memory and into the page table. Without MADV_POPULATE_READ (Linux 5.14) they are touched.
void populate(std::byte* begin, std::byte* end) {
  if (madvise(begin, static_cast<size_t>(end - begin), MADV_POPULATE_READ) == 0) return;
  for (const volatile std::byte* page = begin; page < end; page += kPage) static_cast<void>(*page);
}

}  // namespace

ReadAhead::ReadAhead(std::string path, ReadMode mode, std::byte* memory, size_t begin, size_t end)
    : path_(std::move(path)), mode_(mode), memory_(memory), begin_(begin), end_(end),
      chunks_((end + kChunk - 1) / kChunk, State::absent), given_back_(begin), next_(first_chunk_at(begin)) {
  if (mode_ == ReadMode::mapped) return;
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  if (descriptor_ < 0) fail(Status::io, path_, std::strerror(errno), "a file that can be read past the page cache");
}

ReadAhead::~ReadAhead() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  moved_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  if (descriptor_ >= 0) ::close(descriptor_);
}

void ReadAhead::start() {
  const int n_threads = mode_ == ReadMode::mapped ? kMappedThreads : kDirectThreads;
  for (int i = 0; i < n_threads; ++i) threads_.emplace_back([this] { work(); });
}

void ReadAhead::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    moved_.wait(lock, [&] {
      while (next_ < chunks_.size() && chunks_[next_] != State::absent) ++next_;
      return stop_ || failure_ || next_ == chunks_.size() || next_ * kChunk < given_back_ + kWindow;
    });
    if (stop_ || failure_ || next_ == chunks_.size()) return;
    read(next_++, lock);
  }
}

void ReadAhead::read(size_t chunk, std::unique_lock<std::mutex>& lock) {
  chunks_[chunk] = State::reading;
  lock.unlock();
  std::exception_ptr failure;
  try {
    // Whole pages: the first may hold the end of the file's header.
    const size_t begin = std::max(chunk * kChunk, begin_ / kPage * kPage), end = std::min((chunk + 1) * kChunk, end_);
    if (mode_ == ReadMode::mapped) populate(memory_ + begin, memory_ + end);
    else read_direct(begin, end);
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  chunks_[chunk] = failure ? State::absent : State::present;
  if (!failure_) failure_ = failure;
  moved_.notify_all();
}

void ReadAhead::read_direct(size_t begin, size_t end) const {
  while (begin < end) {
    // The last page of the file is read whole and ends where the file does.
    const size_t whole = (end - begin + kPage - 1) / kPage * kPage;
    const ssize_t n = ::pread(descriptor_, memory_ + begin, whole, static_cast<off_t>(begin));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(Status::io, path_, std::strerror(errno), "a file that can be read past the page cache");
    if (n == 0)
      fail(Status::bad_file, path_, "truncated since it was opened", std::to_string(end - begin) + " bytes more");
    begin += static_cast<size_t>(n);
    if (begin < end && begin % kPage != 0)
      fail(Status::io, path_, "a read that ended inside a page", "whole pages of " + std::to_string(kPage));
  }
}

void ReadAhead::wait(size_t begin, size_t end) {
  std::unique_lock lock(mutex_);
  if (threads_.empty()) start();
  for (size_t chunk = first_chunk_at(begin); chunk * kChunk < end; ++chunk) {
    moved_.wait(lock, [&] { return chunks_[chunk] != State::reading || failure_; });
    if (!failure_ && chunks_[chunk] == State::absent) read(chunk, lock);
    if (failure_) std::rethrow_exception(failure_);
  }
}

void ReadAhead::release(size_t begin, size_t end) {
  std::lock_guard lock(mutex_);
  auto place = released_.upper_bound(begin);
  if (place != released_.begin() && std::prev(place)->second >= begin) {
    --place;
    begin = place->first;
  }
  while (place != released_.end() && place->first <= end) {
    end = std::max(end, place->second);
    place = released_.erase(place);
  }
  released_[begin] = end;
  const auto [first, last] = *released_.begin();
  if (first > begin_ || last <= given_back_) return;
  // Chunks that lie wholly in it; the last one also when it ends with what is used.
  size_t chunk = given_back_ / kChunk;
  for (; chunk < chunks_.size() && std::min((chunk + 1) * kChunk, end_) <= last; ++chunk) {
    if (chunks_[chunk] == State::reading) continue;   // late and of no use: its pages stay
    const size_t from = std::max(chunk * kChunk, (begin_ + kPage - 1) / kPage * kPage);
    const size_t to = std::min((chunk + 1) * kChunk, end_ / kPage * kPage);
    if (from < to) madvise(memory_ + from, to - from, MADV_DONTNEED);
    chunks_[chunk] = State::absent;
  }
  given_back_ = last;
  next_ = std::max(next_, last / kChunk);
  moved_.notify_all();
}

}  // namespace kdt
