// The middle one of measurements; of an even number of them the slower of the two.
#pragma once

#include <algorithm>
#include <vector>

namespace kdt {

// At least one value.
inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace kdt
