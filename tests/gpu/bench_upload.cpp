// How fast weights come from a file in the page cache to the first CUDA device, beside what limits them: reading that file, and
// copying pinned memory to the device. Tiles of experts go as they are, BF16 matrices are laid out anew there.
//
//   bench_upload [GIB [DIRECTORY]]       # writes a file of so many GiB there, and removes it
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "checkpoint/int4_tiles.h"
#include "checkpoint/read_ahead.h"
#include "cuda/cuda_ops.h"

namespace {

using namespace kdt;

constexpr size_t kPiece = 8 << 20;
constexpr int kTurns = 5, kReaders = 4;
// Of one expert and one of eight ranks of Kimi K2.6, and of its q_a and kv_a.
constexpr int64_t kOutputs = 512, kHidden = 7168, kLatents = 2112;

// A file of random bytes that has no name any more.
class CachedFile {
 public:
  CachedFile(const std::string& directory, size_t bytes) : path_(directory + "/bench_upload.XXXXXX"), bytes_(bytes) {
    descriptor_ = ::mkostemp(path_.data(), O_CLOEXEC);
    if (descriptor_ < 0) fail(Status::io, path_, "not made", "a directory to write to");
    ::unlink(path_.c_str());
    std::vector<uint64_t> words(kPiece / sizeof(uint64_t));
    uint64_t state = 1;
    for (uint64_t& word : words) word = state = state * 6364136223846793005u + 1442695040888963407u;
    for (size_t at = 0; at < bytes; at += kPiece)
      if (::write(descriptor_, words.data(), kPiece) != static_cast<ssize_t>(kPiece))
        fail(Status::io, path_, "not written", "that much room");
    memory_ = static_cast<std::byte*>(::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, descriptor_, 0));
    if (memory_ == MAP_FAILED) fail(Status::io, path_, "not mapped", "a file that can be mapped");
  }
  ~CachedFile() {
    ::munmap(memory_, bytes_);
    ::close(descriptor_);
  }
  std::byte* memory() const { return memory_; }
  size_t bytes() const { return bytes_; }
  std::string link() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

  void read(int n_threads) const {
    std::vector<std::thread> threads;
    for (int t = 0; t < n_threads; ++t)
      threads.emplace_back([&, t] {
        std::vector<std::byte> to(kPiece);
        for (size_t at = static_cast<size_t>(t) * kPiece; at < bytes_; at += static_cast<size_t>(n_threads) * kPiece)
          if (::pread(descriptor_, to.data(), kPiece, static_cast<off_t>(at)) < 0) std::abort();
      });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  std::string path_;
  size_t bytes_;
  int descriptor_;
  std::byte* memory_;
};

// GB/s: the median of some turns, the least and the most.
template <class F>
double rate(const char* what, size_t bytes, const F& f) {
  std::vector<double> rates;
  for (int i = 0; i < kTurns; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    f();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    rates.push_back(static_cast<double>(bytes) * 1e-9 / taken.count());
  }
  std::sort(rates.begin(), rates.end());
  std::printf("%-44s %6.1f GB/s (%.1f to %.1f)\n", what, rates[kTurns / 2], rates.front(), rates.back());
  std::fflush(stdout);
  return rates[kTurns / 2];
}

// Pieces of the file one after the other, as a loader takes them; all of them on the device at the end.
template <class Upload>
void load(Ops& ops, const CachedFile& file, size_t piece, const Upload& upload) {
  ReadAhead ahead(file.link(), ReadMode::mapped, file.memory(), 0, file.bytes());
  for (size_t at = 0; at + piece <= file.bytes(); at += piece) {
    ahead.wait(at, at + piece);
    upload(file.memory() + at);
    ahead.release(at, at + piece);
  }
  ops.submit(nullptr, [] {});
  ops.wait();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const size_t bytes = static_cast<size_t>(argc > 1 ? std::atoi(argv[1]) : 4) << 30;
    const CachedFile file(argc > 2 ? argv[2] : ".", bytes);
    const double read_one = rate("reading the file, one thread", bytes, [&] { file.read(1); });
    const double read = rate("reading the file, four threads", bytes, [&] { file.read(kReaders); });
    double copy = 0;
    {
      const auto ops = make_cuda_ops(0);
      const Exchange pinned = ops->exchange(kPiece);
      copy = rate("pinned memory to the device, 8 MiB each", bytes, [&] {
        ops->submit(nullptr, [] {});
        for (size_t at = 0; at < bytes; at += kPiece) ops->send(pinned, kPiece);
        ops->wait();
      });
    }
    // A backend a turn, since weights live as long as it; its making and its end are not timed by these.
    const auto loads = [&](const char* what, size_t piece, const auto& upload) {
      std::vector<std::unique_ptr<Ops>> backends;
      for (int i = 0; i < kTurns; ++i) backends.push_back(make_cuda_ops(0));
      size_t turn = 0;
      return rate(what, bytes / piece * piece, [&] {
        load(*backends[turn], file, piece, [&](const std::byte* from) { upload(*backends[turn], from); });
        ++turn;
      });
    };
    constexpr size_t kTiles = kOutputs * kHidden / 2, kScales = kOutputs * kHidden / kTileGroup * 2;
    const double tiles = loads("tiles of experts to the device", kTiles + kScales, [](Ops& ops, const std::byte* from) {
      ops.upload_tiles({from, from + kTiles, kOutputs, kHidden});
    });
    const double dense = loads("BF16 matrices to the device", 2 * kLatents * kHidden, [](Ops& ops, const std::byte* from) {
      const MatrixSource source[] = {{from, kLatents, kHidden}};
      ops.upload_matrix(source);
    });
    const double slower = std::min(std::max(read_one, read), copy);
    std::printf("of the slower of reading and copying: tiles %.0f%%, BF16 %.0f%%\n", 100 * tiles / slower, 100 * dense / slower);
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
