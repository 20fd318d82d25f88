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

// Seconds from one lap to the next.
class StageTimer {
 public:
  using Clock = std::chrono::steady_clock;
  void restart() { last_ = Clock::now(); }
  double lap() {
    const auto now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - last_).count();
    last_ = now;
    return seconds;
  }

 private:
  Clock::time_point last_ = Clock::now();
};

}  // namespace kdt
