// Brings a range of a file into memory in the order in which it will be used, with several threads, ahead of who uses it.
//
// `mapped`: the pages of a mapping are populated, so that the user does not wait for one fault after the other.
// `direct`: the file is read with O_DIRECT into memory of the same size, past the page cache: for a cold start, when
// copying every byte through the cache costs more than the cache will give back.
//
// At most kWindow bytes beyond what is released are in memory. Who needs bytes that no thread has reached reads them
// itself, so that another order is slower and never stuck.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace kdt {

enum class ReadMode { mapped, direct };

class ReadAhead {
 public:
  static constexpr size_t kChunk = 8 << 20, kWindow = size_t{1} << 30;

  // `memory` stands for the whole file and outlives this object: its mapping, or as much anonymous memory, in whole pages.
  // [begin, end) is what will be used. Reading begins with the first wait().
  ReadAhead(std::string path, ReadMode mode, std::byte* memory, size_t begin, size_t end);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // Returns when [begin, end) is in memory. Error(io) naming the file.
  void wait(size_t begin, size_t end);
  // [begin, end) is not used any more: once everything before it is released too, its memory is given back. A direct
  // one must be waited for again before it is read again.
  void release(size_t begin, size_t end);

 private:
  enum class State : uint8_t { absent, reading, present };

  void start();
  void work();
  // Of the chunk that this thread marked `reading`. Takes the lock back when it is done.
  void read(size_t chunk, std::unique_lock<std::mutex>& lock);
  void read_direct(size_t begin, size_t end) const;
  size_t first_chunk_at(size_t byte) const { return byte / kChunk; }

  std::string path_;
  ReadMode mode_;
  std::byte* memory_;
  size_t begin_, end_;
  int descriptor_ = -1;   // of a direct file

  std::mutex mutex_;
  std::condition_variable moved_;
  std::vector<State> chunks_;               // of the file, by number
  std::map<size_t, size_t> released_;       // disjoint ranges, begin -> end, that do not touch
  size_t given_back_;                       // everything used before it is released
  size_t next_;                             // the chunk that a thread takes next
  std::exception_ptr failure_;              // of a thread; the next wait() ends with it
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace kdt
