#include "load_bar.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <string_view>

#include "client.h"
#include "output.h"
#include "table.h"

namespace kdt {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kFirst = std::chrono::milliseconds(500), kBetween = std::chrono::milliseconds(100);
constexpr int64_t kCells = 30;
constexpr std::string_view kClear = "\r\033[K";   // to the start of the line, and nothing behind it

// "loading [#####     ] 1.2 of 7.7 GB, 0.61 GB/s, 11 s left", "measured [##        ] 7 of 58, 40 s left"
std::string line_of(const char* verb, LoadBar::Unit unit, int64_t done, int64_t total, double seconds) {
  const double rate = static_cast<double>(done) / seconds;
  const auto cells = static_cast<size_t>(done * kCells / total);
  std::string line = std::string(kClear) + verb + " [" + std::string(cells, '#') + std::string(kCells - cells, ' ') + "] ";
  const bool large = total >= 1'000'000'000;
  const double each = large ? 1e9 : 1e6;
  const std::string name = large ? "GB" : "MB";
  if (unit == LoadBar::Unit::bytes)
    line += fixed(static_cast<double>(done) / each, 1) + " of " + fixed(static_cast<double>(total) / each, 1) + " " + name + ", " +
            fixed(rate / each, 2) + " " + name + "/s";
  else
    line += std::to_string(done) + " of " + std::to_string(total);
  if (done > 0) line += ", " + fixed(static_cast<double>(total - done) / rate, 0) + " s left";
  return line;
}

// A terminal that takes nothing is no reason to stop loading.
void put(std::string_view text) { static_cast<void>(!::write(STDERR_FILENO, text.data(), text.size())); }

}  // namespace

LoadBar::LoadBar(const char* verb, Unit unit) : verb_(verb), unit_(unit) {
  if (!stderr_is_terminal()) return;
  kdt_load_progress* progress = nullptr;
  check(kdt_load_progress_create(&progress));
  progress_.reset(progress);
  thread_ = std::thread([this] { draw(); });
}

LoadBar::~LoadBar() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    end_ = true;
  }
  ended_.notify_all();
  thread_.join();
}

// Small models are there before the first line would be.
void LoadBar::draw() {
  const auto start = Clock::now();
  bool drawn = false;
  std::unique_lock lock(mutex_);
  for (auto pause = kFirst; !ended_.wait_for(lock, pause, [this] { return end_; }); pause = kBetween) {
    int64_t done = 0, total = 0;
    if (kdt_load_progress_read(progress_.get(), &done, &total) != KDT_OK || total <= 0) continue;
    const std::chrono::duration<double> passed = Clock::now() - start;
    put(line_of(verb_, unit_, std::clamp<int64_t>(done, 0, total), total, passed.count()));
    drawn = true;
  }
  if (drawn) put(kClear);
}

}  // namespace kdt
