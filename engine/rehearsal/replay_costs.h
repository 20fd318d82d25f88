// What rounds take elsewhere, from the report of a rehearsal there (docs/rehearsal.md).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace kdt {

// A curve through measured points, straight between them and beyond the last two.
class CostCurve {
 public:
  void add(double at, double seconds);   // the first of equal places counts
  double operator()(double at) const;
  bool empty() const { return points_.empty(); }

 private:
  std::vector<std::pair<double, double>> points_;   // ascending
};

struct ReplayCosts {
  CostCurve verify;    // a pass and its sampling, by rows
  CostCurve draft;     // with the build, by streams
  CostCurve finish;    // accept and commit, by streams
};

// Of the report's first prefix and overlap. Errors name the file and the field.
ReplayCosts load_replay_costs(const std::string& path);

}  // namespace kdt
