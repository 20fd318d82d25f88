// Range checks of what clients pass, with messages that name the field.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "base/error.h"

namespace kdt::capi {

inline int64_t in_range(const char* field, int64_t value, int64_t least, int64_t most) {
  check_argument(value >= least && value <= most, field, std::to_string(value),
                 std::to_string(least) + " to " + std::to_string(most));
  return value;
}

inline double real_in_range(const char* field, double value, double least, double most, bool open_below = false) {
  const bool good = std::isfinite(value) && (open_below ? value > least : value >= least) && value <= most;
  const auto text = [](double v) {
    std::string s = std::to_string(v);
    while (s.find('.') != std::string::npos && (s.back() == '0' || s.back() == '.')) {
      const bool point = s.back() == '.';
      s.pop_back();
      if (point) break;
    }
    return s;
  };
  check_argument(good, field, text(value),
                 (open_below ? "more than " : "at least ") + text(least) + " and at most " + text(most));
  return value;
}

}  // namespace kdt::capi
