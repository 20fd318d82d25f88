// How a command ends when it does not end well: one line on stderr and an exit code.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace kdt {

enum ExitCode : int { kExitOk = 0, kExitFailed = 1, kExitUsage = 2, kExitInterrupted = 130 };

// The message reads `<field or file>: <value>: expected <what>`; main prints it behind "error: ".
class Failure : public std::runtime_error {
 public:
  Failure(int exit_code, const std::string& message) : std::runtime_error(message), exit_code_(exit_code) {}
  int exit_code() const noexcept { return exit_code_; }

 private:
  int exit_code_;
};

// A flag or its value cannot be understood: exit code 2.
[[noreturn]] void fail_usage(std::string_view field, std::string_view value, std::string_view expected);
// An input or the run failed: exit code 1.
[[noreturn]] void fail_run(std::string_view field, std::string_view value, std::string_view expected);

// `error: <message>` on stderr. What is not UTF-8 in it (a path, an argument) is printed as question marks.
void print_error(std::string_view message);
// The same with `warning: `.
void print_warning(std::string_view message);

}  // namespace kdt
