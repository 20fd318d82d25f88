#include "model/rope_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <vector>

namespace kdt {
namespace {

// The dimension whose wave turns `rotations` times within the original context.
double correction_dim(double rotations, int64_t dim, double theta, const Yarn& yarn) {
  const double original = static_cast<double>(yarn.original_context);
  return static_cast<double>(dim) * std::log(original / (rotations * 2 * std::numbers::pi)) / (2 * std::log(theta));
}

// Inverse frequencies in float, as the checkpoints' own code has them.
std::vector<float> inverse_frequencies(int64_t dim, double theta, const std::optional<Yarn>& yarn) {
  std::vector<float> frequency(static_cast<size_t>(dim / 2));
  for (int64_t i = 0; i < dim / 2; ++i)
    frequency[static_cast<size_t>(i)] =
        1.0f / std::pow(static_cast<float>(theta), static_cast<float>(2 * i) / static_cast<float>(dim));
  if (!yarn) return frequency;
  const double low = std::max(std::floor(correction_dim(yarn->beta_fast, dim, theta, *yarn)), 0.0);
  const double high =
      std::min(std::ceil(correction_dim(yarn->beta_slow, dim, theta, *yarn)), static_cast<double>(dim - 1));
  for (int64_t i = 0; i < dim / 2; ++i) {
    float& f = frequency[static_cast<size_t>(i)];
    const double position = (static_cast<double>(i) - low) / std::max(high - low, 0.001);
    const auto ramp = static_cast<float>(std::clamp(position, 0.0, 1.0));
    f = f / static_cast<float>(yarn->factor) * ramp + f * (1.0f - ramp);
  }
  return frequency;
}

}  // namespace

double yarn_mscale(double factor, double m) { return factor <= 1 ? 1.0 : 0.1 * m * std::log(factor) + 1.0; }

RopeTables::RopeTables(Ops& ops, int64_t dim, double theta, const std::optional<Yarn>& yarn, int64_t max_context)
    : dim_(dim), n_(max_context) {
  const int64_t half = dim / 2;
  const auto frequency = inverse_frequencies(dim, theta, yarn);
  const double amplitude =
      yarn ? yarn_mscale(yarn->factor, yarn->mscale) / yarn_mscale(yarn->factor, yarn->mscale_all_dim) : 1.0;
  std::vector<float> table(static_cast<size_t>(2 * n_ * half));
  for (int64_t p = 0; p < n_; ++p) {
    for (int64_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(p) * frequency[static_cast<size_t>(i)];
      table[static_cast<size_t>(p * half + i)] = std::cos(angle) * static_cast<float>(amplitude);
      table[static_cast<size_t>((n_ + p) * half + i)] = std::sin(angle) * static_cast<float>(amplitude);
    }
  }
  table_ = ops.allocate(table.size() * sizeof(float));
  ops.copy_in(table_, 0, table.data(), table.size() * sizeof(float));
}

RopeTable RopeTables::view() const {
  const float* cos = table_.as<float>();
  return {cos, cos + n_ * (dim_ / 2), dim_};
}

}  // namespace kdt
