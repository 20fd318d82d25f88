// The daemon's log: lines on stderr, as text or as JSON objects. A reader that has stopped reading costs lines, never
// time: the io thread must not wait for a full pipe.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace spdlog {
class logger;
}

namespace kdt {

// Any thread.
class ServeLog {
 public:
  using Fields = nlohmann::ordered_json;   // an object

  explicit ServeLog(bool json);
  ~ServeLog();

  // `message` is for people; `fields` go beside it in JSON alone. Text of a client is escaped before it gets here
  // (openai::one_line), and once more what would break a line.
  void info(std::string_view message, const Fields& fields = Fields::object());
  void warning(std::string_view message, const Fields& fields = Fields::object());
  void error(std::string_view message, const Fields& fields = Fields::object());

 private:
  void line(int level, std::string_view message, const Fields& fields);

  bool json_;
  std::unique_ptr<spdlog::logger> logger_;
};

}  // namespace kdt
