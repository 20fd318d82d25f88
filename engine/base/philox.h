// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): counter-based noise.
//
// Sampling noise is a pure function of (seed, choice, position, token, purpose), so it is the same whatever was
// speculated, batched or replayed. Layout and test vectors are in docs/numerics.md.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "base/host_device.h"

namespace kdt {

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;

struct PhiloxWords {
  uint32_t c0, c1, c2, c3;
};

KDT_HOST_DEVICE constexpr PhiloxWords philox_words(PhiloxWords c, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(kPhiloxM0) * c.c0;
    const uint64_t product1 = static_cast<uint64_t>(kPhiloxM1) * c.c2;
    c = {static_cast<uint32_t>(product1 >> 32) ^ c.c1 ^ key0, static_cast<uint32_t>(product1),
         static_cast<uint32_t>(product0 >> 32) ^ c.c3 ^ key1, static_cast<uint32_t>(product0)};
    key0 += kPhiloxW0;
    key1 += kPhiloxW1;
  }
  return c;
}

constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  const PhiloxWords c = philox_words({counter[0], counter[1], counter[2], counter[3]}, key[0], key[1]);
  return {c.c0, c.c1, c.c2, c.c3};
}

// What a random number is for: streams of different purposes never meet.
enum class NoisePurpose : uint32_t { sample = 0 };

// key = (low, high half of the seed); counter = (choice, absolute position, token id, purpose); the first output word.
KDT_HOST_DEVICE constexpr uint32_t noise_bits(uint64_t seed, uint32_t choice, uint32_t position, uint32_t token,
                                              NoisePurpose purpose = NoisePurpose::sample) {
  return philox_words({choice, position, token, static_cast<uint32_t>(purpose)}, static_cast<uint32_t>(seed),
                      static_cast<uint32_t>(seed >> 32))
      .c0;
}

// Gumbel noise of a random word: -log(-log(u)), u = (bits + ½) / 2³², in double.
KDT_HOST_DEVICE inline double gumbel(uint32_t bits) { return -std::log(-std::log((bits + 0.5) * 0x1p-32)); }

}  // namespace kdt
