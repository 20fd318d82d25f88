#include "runtime/request.h"

#include <algorithm>
#include <array>

#include "base/error.h"

namespace kdt {

namespace {

// Waking the reader takes a CPU from the decode threads: rounds shorter than this share a wake-up, which the next round or
// the end brings at the latest. Nobody reads faster.
constexpr auto kWakeInterval = std::chrono::milliseconds(5);

}  // namespace

const char* finish_name(Finish finish) {
  constexpr std::array<const char*, 5> kNames = {"none", "stop", "length", "cancelled", "error"};
  return kNames[static_cast<size_t>(finish)];
}

Request::Request(RequestSettings settings) : settings_(std::move(settings)) {
  result_.prompt_tokens = static_cast<int64_t>(settings_.prompt.size());
}

void Request::push(std::vector<Event>& events) {
  {
    std::lock_guard lock(mutex_);
    for (Event& event : events) events_.push_back(std::move(event));
  }
  events.clear();
  const auto now = Clock::now();
  if (now - last_wake_ < kWakeInterval) return;
  last_wake_ = now;
  ready_.notify_one();
}

void Request::update(const Result& result) {
  std::lock_guard lock(mutex_);
  result_ = result;
}

void Request::finish(const Result& result, std::string text) {
  {
    std::lock_guard lock(mutex_);
    if (done_) return;
    result_ = result;
    events_.push_back({true, -1, std::move(text)});
    done_ = true;
  }
  ready_.notify_one();
}

const std::vector<Event>& Request::next(size_t most, int32_t timeout_ms) {
  std::unique_lock lock(mutex_);
  handed_out_.clear();
  const auto something = [this] { return !events_.empty() || done_; };
  if (timeout_ms < 0) {
    ready_.wait(lock, something);
  } else if (!ready_.wait_for(lock, std::chrono::milliseconds(timeout_ms), something)) {
    throw Error(Status::timeout, "request: no event within " + std::to_string(timeout_ms) + " ms");
  }
  for (; !events_.empty() && handed_out_.size() < most; events_.pop_front())
    handed_out_.push_back(std::move(events_.front()));
  return handed_out_;
}

Result Request::result() const {
  std::lock_guard lock(mutex_);
  return result_;
}

}  // namespace kdt
