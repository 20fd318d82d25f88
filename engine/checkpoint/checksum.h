// XXH64 (xxhash.com, seed 0) over bytes that come in pieces: what a shard's manifest holds for every tensor and file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kdt {

constexpr const char* kChecksumName = "xxh64";

class Checksum {
 public:
  void update(const void* bytes, size_t n);
  uint64_t value() const;
  std::string hex() const;   // 16 digits

 private:
  static constexpr size_t kStripe = 32;

  void consume(const std::byte* stripe);

  uint64_t lanes_[4] = {0x60ea27eeadc0b5d6, 0xc2b2ae3d27d4eb4f, 0, 0x61c8864e7a143579};
  uint64_t total_ = 0;
  std::byte held_[kStripe];   // the first total_ % kStripe bytes are not consumed yet
};

std::string checksum_of(const void* bytes, size_t n);

}  // namespace kdt
