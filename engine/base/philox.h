// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): counter-based noise.
//
// Sampling noise is a pure function of (seed, choice, position, token, purpose), so it is the same whatever was
// speculated, batched or replayed. Layout and test vectors are in docs/numerics.md.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace kdt {

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;

constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(kPhiloxM0) * counter[0];
    const uint64_t product1 = static_cast<uint64_t>(kPhiloxM1) * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(product0)};
    key[0] += kPhiloxW0;
    key[1] += kPhiloxW1;
  }
  return counter;
}

// What a random number is for: streams of different purposes never meet.
enum class NoisePurpose : uint32_t { sample = 0 };

// key = (low, high half of the seed); counter = (choice, absolute position, token id, purpose); the first output word.
constexpr uint32_t noise_bits(uint64_t seed, uint32_t choice, uint32_t position, uint32_t token,
                              NoisePurpose purpose = NoisePurpose::sample) {
  return philox4x32({choice, position, token, static_cast<uint32_t>(purpose)},
                    {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)})[0];
}

// Gumbel noise of a random word: -log(-log(u)), u = (bits + ½) / 2³², in double.
inline double gumbel(uint32_t bits) { return -std::log(-std::log((bits + 0.5) * 0x1p-32)); }

}  // namespace kdt
