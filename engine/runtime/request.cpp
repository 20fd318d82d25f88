#include "runtime/request.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace kdt {

const char* finish_name(Finish finish) {
  constexpr std::array<const char*, kFinishes> kNames = {"none", "stop", "length", "cancelled", "error"};
  return kNames[static_cast<size_t>(finish)];
}

Request::Request(RequestSettings settings, uint64_t serial) : settings_(std::move(settings)), serial_(serial) {
  result_.prompt_tokens = static_cast<int64_t>(settings_.prompt.size());
}

Request::~Request() {
  if (descriptor_ >= 0) close(descriptor_);
}

bool Request::full() const {
  std::lock_guard lock(mutex_);
  return events_.size() >= kMaxEvents;
}

void Request::mark_readable() {
  unannounced_ = false;
  if (descriptor_ < 0 || readable_) return;
  const uint64_t one = 1;
  readable_ = write(descriptor_, &one, sizeof one) == sizeof one;
}

void Request::push(std::vector<Event>& events) {
  std::lock_guard lock(mutex_);
  for (Event& event : events) events_.push_back(std::move(event));
  events.clear();
  unannounced_ = true;
}

void Request::wake() {
  {
    std::lock_guard lock(mutex_);
    if (!unannounced_) return;
    mark_readable();
  }
  ready_.notify_one();   // not under the mutex: whoever wakes takes it at once
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
    result_.total_seconds = std::chrono::duration<double>(Clock::now() - submitted_).count();
    Event last;
    last.kind = EventKind::finished;
    last.text = std::move(text);
    events_.push_back(std::move(last));
    done_ = true;
    mark_readable();
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
  if (events_.empty() && !done_) {
    unannounced_ = false;
    uint64_t count = 0;
    if (readable_) readable_ = read(descriptor_, &count, sizeof count) != sizeof count;
  }
  return handed_out_;
}

Result Request::result() const {
  std::lock_guard lock(mutex_);
  Result result = result_;
  if (!done_) result.total_seconds = std::chrono::duration<double>(Clock::now() - submitted_).count();
  return result;
}

int Request::descriptor() {
  std::lock_guard lock(mutex_);
  if (descriptor_ < 0) {
    descriptor_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (descriptor_ < 0) fail(Status::io, "eventfd", std::strerror(errno), "a file descriptor to spare");
    if (!events_.empty() || done_) mark_readable();
  }
  return descriptor_;
}

}  // namespace kdt
