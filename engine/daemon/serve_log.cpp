#include "serve_log.h"

#include <poll.h>
#include <spdlog/logger.h>
#include <spdlog/sinks/base_sink.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

#include "openai_error.h"

namespace kdt {
namespace {

// Up to PIPE_BUF bytes a pipe that polls writable takes at once, and whole.
constexpr size_t kLongestLine = 4000;

bool write_now(std::string_view text) {
  pollfd writable = {STDERR_FILENO, POLLOUT, 0};
  if (poll(&writable, 1, 0) != 1 || !(writable.revents & POLLOUT)) return false;
  while (!text.empty()) {
    const ssize_t n = ::write(STDERR_FILENO, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    text.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

class StderrSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit StderrSink(bool json) : json_(json) {}

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    if (n_lost_ > 0) {
      const std::string lost = std::to_string(n_lost_) + " log lines were lost: nobody read them";
      if (write_now(json_ ? R"({"level":"warning","message":")" + lost + "\"}\n" : lost + "\n")) n_lost_ = 0;
    }
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    if (n_lost_ > 0 || !write_now({line.data(), line.size()})) ++n_lost_;
  }
  void flush_() override {}

 private:
  bool json_;
  int64_t n_lost_ = 0;
};

const char* level_name(int level) {
  return level == spdlog::level::err ? "error" : level == spdlog::level::warn ? "warning" : "info";
}

}  // namespace

ServeLog::ServeLog(bool json)
    : json_(json), logger_(std::make_unique<spdlog::logger>("kdtree", std::make_shared<StderrSink>(json))) {
  // JSON lines carry their level and time themselves.
  logger_->set_pattern(json ? "%v" : "%^%l%$ %Y-%m-%d %H:%M:%S.%e %v");
}

ServeLog::~ServeLog() = default;

void ServeLog::info(std::string_view message, const Fields& fields) { line(spdlog::level::info, message, fields); }
void ServeLog::warning(std::string_view message, const Fields& fields) { line(spdlog::level::warn, message, fields); }
void ServeLog::error(std::string_view message, const Fields& fields) { line(spdlog::level::err, message, fields); }

void ServeLog::line(int level, std::string_view message, const Fields& fields) {
  const auto severity = static_cast<spdlog::level::level_enum>(level);
  const std::string text = openai::one_line(message, kLongestLine / 2);
  if (!json_) {
    logger_->log(severity, "{}", text);
    return;
  }
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  Fields object = {
      {"time", std::chrono::duration<double>(now).count()}, {"level", level_name(level)}, {"message", text}};
  object.update(fields);
  const std::string dumped = object.dump(-1, ' ', false, Fields::error_handler_t::replace);
  logger_->log(severity, "{}", dumped.size() <= kLongestLine ? dumped : object["message"].dump());
}

}  // namespace kdt
