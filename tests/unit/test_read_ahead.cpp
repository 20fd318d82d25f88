// Reading ahead: the file's bytes in every order, what is given back, and files that cannot be read.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>

#include "base/error.h"
#include "checkpoint/read_ahead.h"

using namespace kdt;

namespace {

constexpr size_t kChunk = ReadAhead::kChunk;

// A file of `bytes` whose every 8 bytes hold their own place, mapped and with as much memory beside it.
struct File {
  explicit File(size_t size) : bytes(size) {
    char pattern[] = "/var/tmp/kdtree-test-XXXXXX";   // a disk's file system: O_DIRECT is asked of it
    fd = mkstemp(pattern);
    path = pattern;
    std::vector<uint64_t> words((size + 7) / 8);
    std::iota(words.begin(), words.end(), uint64_t{1});
    REQUIRE(pwrite(fd, words.data(), size, 0) == static_cast<ssize_t>(size));
    mapping = static_cast<std::byte*>(mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0));
    memory = static_cast<std::byte*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  }
  ~File() {
    munmap(mapping, bytes);
    munmap(memory, bytes);
    close(fd);
    std::filesystem::remove(path);
  }
  std::byte* place(ReadMode mode) const { return mode == ReadMode::mapped ? mapping : memory; }
  bool has(ReadMode mode, size_t begin, size_t end) const {
    return std::memcmp(place(mode) + begin, mapping + begin, end - begin) == 0;
  }

  std::string path;
  size_t bytes;
  int fd = -1;
  std::byte *mapping = nullptr, *memory = nullptr;
};

bool can_read_directly(const File& file) {
  const int fd = open(file.path.c_str(), O_RDONLY | O_DIRECT);
  if (fd >= 0) close(fd);
  return fd >= 0;
}

template <typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Ranges of uneven sizes that cover [begin, end).
std::vector<std::pair<size_t, size_t>> cut(size_t begin, size_t end, std::mt19937& random) {
  std::vector<std::pair<size_t, size_t>> out;
  while (begin < end) {
    const size_t n = std::min<size_t>(end - begin, 1 + random() % (2 * kChunk));
    out.emplace_back(begin, begin + n);
    begin += n;
  }
  return out;
}

}  // namespace

TEST_CASE("every byte is there when it is waited for, in order and out of order, and again after release") {
  const File file(5 * kChunk + 12345);
  std::mt19937 random(1);
  for (ReadMode mode : {ReadMode::mapped, ReadMode::direct}) {
    if (mode == ReadMode::direct && !can_read_directly(file)) {
      MESSAGE("no O_DIRECT on this file system");
      continue;
    }
    for (size_t begin : {size_t{0}, size_t{4096}, size_t{70001}})
      for (bool in_order : {true, false}) {
        std::memset(file.memory, 0xEE, file.bytes);
        ReadAhead reader(file.path, mode, file.place(mode), begin, file.bytes);
        auto parts = cut(begin, file.bytes, random);
        if (!in_order) std::shuffle(parts.begin(), parts.end(), random);
        for (const auto& [from, to] : parts) {
          reader.wait(from, to);
          CHECK(file.has(mode, from, to));
          reader.release(from, to);
        }
        for (const auto& [from, to] : parts) {   // released: read again
          reader.wait(from, to);
          CHECK(file.has(mode, from, to));
        }
        for (const auto& [from, to] : parts) reader.release(from, to);
        for (const auto& [from, to] : parts) reader.release(from, to);   // twice is once
      }
  }
}

TEST_CASE("a part is not taken away while a neighbour in the same chunk is still needed") {
  const File file(2 * kChunk);
  if (!can_read_directly(file)) return;
  ReadAhead reader(file.path, ReadMode::direct, file.memory, 0, file.bytes);
  reader.wait(0, kChunk);
  reader.release(0, 1000);
  reader.release(5000, kChunk);
  CHECK(file.has(ReadMode::direct, 1000, 5000));
  reader.release(900, 5000);
  CHECK(file.memory[2000] == std::byte{0});   // given back
  CHECK(message_of([&] { reader.wait(0, file.bytes); }) == "");
  CHECK(file.has(ReadMode::direct, 0, file.bytes));
}

TEST_CASE("a reader that is never used, or dropped in the middle, ends") {
  const File file(20 * kChunk);
  { ReadAhead unused(file.path, ReadMode::mapped, file.mapping, 0, file.bytes); }
  ReadAhead dropped(file.path, ReadMode::mapped, file.mapping, 0, file.bytes);
  dropped.wait(0, 1);
}

TEST_CASE("a file that shrinks is an error that names it") {
  const File file(4 * kChunk);
  if (!can_read_directly(file)) return;
  REQUIRE(ftruncate(file.fd, 3 * kChunk + 4096) == 0);
  ReadAhead reader(file.path, ReadMode::direct, file.memory, 0, file.bytes);
  const auto all = [&] { reader.wait(0, file.bytes); };
  CHECK(message_of(all).find(file.path + ": truncated since it was opened: expected ") == 0);
  CHECK(message_of(all).find(file.path) == 0);   // and stays one
  REQUIRE(ftruncate(file.fd, 4 * kChunk) == 0);   // the mapping is compared no more, and unmapped whole
}

TEST_CASE("a file that cannot be read past the page cache is an error that names it") {
  const std::string path = "/proc/self/status";
  std::byte memory{};
  CHECK(message_of([&] { ReadAhead(path, ReadMode::direct, &memory, 0, 1); }).find(path + ": ") == 0);
}
