// The largest values a config may have. Generous for any model of the family, and small enough that a product of three
// sizes, which is the most any buffer multiplies, stays inside 63 bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kdt {

constexpr const char* kConfigName = "config.json";
constexpr const char* kGenerationConfigName = "generation_config.json";
constexpr size_t kMaxConfigBytes = 16'000'000;

constexpr int64_t kMaxVocab = 4'000'000;
constexpr int64_t kMaxWidth = 65'536;
constexpr int64_t kMaxMlpWidth = int64_t{1} << 20;
constexpr int64_t kMaxLayers = 1'024;
constexpr int64_t kMaxHeads = 1'024;
constexpr int64_t kMaxHeadDim = 1'024;
constexpr int64_t kMaxExperts = 65'536;
constexpr int64_t kMaxSharedExperts = 64;
constexpr int64_t kMaxContext = int64_t{1} << 24;
constexpr double kMinEps = 1e-12, kMaxEps = 0.1;

}  // namespace kdt
