#include "checkpoint/checksum.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

namespace kdt {
namespace {

constexpr uint64_t kP1 = 0x9e3779b185ebca87, kP2 = 0xc2b2ae3d27d4eb4f, kP3 = 0x165667b19e3779f9,
                   kP4 = 0x85ebca77c2b2ae63, kP5 = 0x27d4eb2f165667c5;

template <class T>
uint64_t little(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);   // x86-64 is little-endian, as XXH64 reads
  return value;
}

uint64_t round_of(uint64_t lane, uint64_t input) { return std::rotl(lane + input * kP2, 31) * kP1; }

}  // namespace

void Checksum::consume(const std::byte* stripe) {
  for (size_t i = 0; i < 4; ++i) lanes_[i] = round_of(lanes_[i], little<uint64_t>(stripe + 8 * i));
}

void Checksum::update(const void* bytes, size_t n) {
  const auto* from = static_cast<const std::byte*>(bytes);
  const size_t held = total_ % kStripe;
  total_ += n;
  if (held > 0) {
    const size_t taken = std::min(kStripe - held, n);
    if (taken > 0) std::memcpy(held_ + held, from, taken);
    if (held + taken < kStripe) return;
    consume(held_);
    from += taken;
    n -= taken;
  }
  for (; n >= kStripe; n -= kStripe, from += kStripe) consume(from);
  if (n > 0) std::memcpy(held_, from, n);
}

uint64_t Checksum::value() const {
  uint64_t hash = kP5;
  if (total_ >= kStripe) {
    hash = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) + std::rotl(lanes_[3], 18);
    for (uint64_t lane : lanes_) hash = (hash ^ round_of(0, lane)) * kP1 + kP4;
  }
  hash += total_;
  const std::byte* from = held_;
  size_t n = total_ % kStripe;
  for (; n >= 8; n -= 8, from += 8) hash = std::rotl(hash ^ round_of(0, little<uint64_t>(from)), 27) * kP1 + kP4;
  for (; n >= 4; n -= 4, from += 4) hash = std::rotl(hash ^ little<uint32_t>(from) * kP1, 23) * kP2 + kP3;
  for (; n > 0; --n, ++from) hash = std::rotl(hash ^ little<uint8_t>(from) * kP5, 11) * kP1;
  hash = (hash ^ hash >> 33) * kP2;
  hash = (hash ^ hash >> 29) * kP3;
  return hash ^ hash >> 32;
}

std::string Checksum::hex() const {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value()));
  return text;
}

std::string checksum_of(const void* bytes, size_t n) {
  Checksum checksum;
  checksum.update(bytes, n);
  return checksum.hex();
}

}  // namespace kdt
