// One way to declare a flag: its value's form, its default and its environment mirror are all in --help, and a bad
// value is reported as `<flag or variable>: <value>: expected <what>`, whichever version of CLI11 parses it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// Its header is as much to compile as all of this program's code: flags.cpp and main.cpp alone include it.
namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace kdt {

// How a value is shown in --help and read. `set` returns false for a value it does not take.
struct ValueForm {
  std::string label;     // "N"
  std::string expected;  // "an integer from 1 to 256"
  std::function<bool(const std::string&)> set;
};

constexpr int64_t kMaxInt32 = INT32_MAX;

// `target` must outlive the parse.
ValueForm integer_form(int32_t& target, int64_t low, int64_t high = kMaxInt32);
ValueForm integer_form(int64_t& target, int64_t low, int64_t high);
// Any 64-bit integer; a negative one is its two's complement, as in HTTP requests.
ValueForm seed_form(std::optional<uint64_t>& target);
// From `low` to `high`; `above_low`: without `low` itself.
ValueForm number_form(double& target, double low, double high, bool above_low = false);
// An empty text is mostly an unset variable of a shell: refused unless it means something.
ValueForm text_form(std::string& target, std::string label, bool may_be_empty = false);
ValueForm choice_form(int32_t& target, std::vector<std::pair<std::string, int32_t>> choices);
ValueForm list_form(std::vector<std::string>& target, std::string label);

// Items between commas, without empty ones.
std::vector<std::string> split_list(const std::string& text);
// The whole text as a decimal integer within the range.
std::optional<int64_t> parse_integer(const std::string& text, int64_t low, int64_t high);

// A command of the program, and its flags.
class Flags {
 public:
  Flags(CLI::App& program, const std::string& name, const std::string& description);

  void value(const std::string& name, ValueForm form, const std::string& default_text, const std::string& description);
  // On with the name alone or with `on`; `off` after it, or in the environment, is off.
  void toggle(const std::string& name, bool& target, const std::string& description);
  // Whether the command line names this command.
  bool chosen() const;
  // Whether the flag has a value, from the command line or the environment.
  bool given(const std::string& name) const;
  // Whether the flag stands on the command line (not only in the environment).
  bool on_command_line(const std::string& name) const;
  // All that do, each with its dashes.
  std::vector<std::string> on_command_line() const;
  // What a message calls the flag: its name, or the variable its value came from.
  std::string source(const std::string& name) const;

 private:
  CLI::Option* declare(const std::string& name, const ValueForm& form, const std::string& default_text,
                       const std::string& description);

  CLI::App& command_;
};

// Parses the command line into the commands of `app`. Returns true when --help or --version was asked for and printed;
// throws Failure (exit code 2) for anything that is not understood.
bool parse_command_line(CLI::App& app, const std::vector<std::string>& arguments);

// The message of the engine, `<field>: …`, with the flag or variable of the chosen command that set the field in its place.
std::string with_flag_name(const CLI::App& app, const std::string& message);

// A line about each KDTREE_* variable of the environment that no command knows, with the name that was probably meant.
std::vector<std::string> unknown_variables(const CLI::App& app);

}  // namespace kdt
