// The stages of a round: one name each, from file to metric.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>

namespace kdt {

enum class Stage { prefill, draft, build, verify, sample, accept, commit, emit };
constexpr size_t kStages = 8;
constexpr std::array<const char*, kStages> kStageNames = {"prefill", "draft",  "build",  "verify",
                                                          "sample",  "accept", "commit", "emit"};

// Seconds spent by stage.
struct StageSeconds {
  std::array<double, kStages> seconds{};
  double& operator[](Stage stage) { return seconds[static_cast<size_t>(stage)]; }
  double operator[](Stage stage) const { return seconds[static_cast<size_t>(stage)]; }
};

// Adds the time from one mark to the next to the stage that ends there.
class StageClock {
 public:
  using Clock = std::chrono::steady_clock;
  explicit StageClock(StageSeconds& to) : to_(to), last_(Clock::now()) {}
  double end(Stage stage) {
    const auto now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - last_).count();
    to_[stage] += seconds;
    last_ = now;
    return seconds;
  }

 private:
  StageSeconds& to_;
  Clock::time_point last_;
};

}  // namespace kdt
