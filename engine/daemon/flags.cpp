#include "flags.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <string_view>

#include "failure.h"
#include "nearest.h"
#include "output.h"

extern char** environ;

namespace kdt {
namespace {

std::string environment_name(const std::string& flag) {
  std::string name = "KDTREE_";
  for (const char c : flag.substr(2)) {
    name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return name;
}

template <typename T>
std::optional<T> parse_whole(const std::string& text) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (text.empty() || error != std::errc() || stop != end) return std::nullopt;
  return value;
}

template <typename T>
ValueForm whole_form(T& target, int64_t low, int64_t high) {
  const std::string upper = high == INT64_MAX ? " up" : " to " + std::to_string(high);
  const std::string range = "an integer from " + std::to_string(low) + upper;
  return {"N", range, [&target, low, high](const std::string& text) {
            const std::optional<int64_t> value = parse_integer(text, low, high);
            if (value) target = static_cast<T>(*value);
            return value.has_value();
          }};
}

std::string shortest(double value) {
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return std::string(buffer, error == std::errc() ? end : buffer);
}

std::string joined(const std::vector<std::string>& items, const char* separator) {
  std::string out;
  for (const std::string& item : items) out += (out.empty() ? "" : separator) + item;
  return out;
}

// Broken at spaces, so that help fits a terminal of 80 columns beside the names.
constexpr size_t kWidth = 46;

std::string wrapped(const std::string& text) {
  std::string out;
  size_t line = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    const bool fits = line + 1 + end - begin <= kWidth;
    if (line > 0) out += fits ? ' ' : '\n';
    line = line > 0 && fits ? line + 1 + end - begin : end - begin;
    out.append(text, begin, end - begin);
    begin = end + 1;
  }
  return out;
}

// In the last line where there is room, else in one of its own: never broken.
std::string with_variable(const std::string& text, const std::string& variable) {
  const std::string part = "[env: " + variable + "]";
  const size_t last = text.size() - (text.rfind('\n') + 1);   // npos + 1: 0
  return text + (last + 1 + part.size() <= kWidth ? ' ' : '\n') + part;
}

// The flags of a command, without their dashes.
std::vector<std::string> flag_names(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    const std::vector<std::string>& own = option->get_lnames();
    names.insert(names.end(), own.begin(), own.end());
  }
  return names;
}

[[noreturn]] void fail_unknown_flag(const CLI::App& app, const CLI::App& command, const std::string& flag,
                                    const std::string& help) {
  const std::string name = flag.substr(std::min(flag.find_first_not_of('-'), flag.size()));
  const std::string near = nearest(name, flag_names(command));
  if (!near.empty()) fail_usage(flag, "unknown flag", "perhaps --" + near + " (see " + help + " --help)");
  std::vector<std::string> others;   // the commands that have it
  for (const CLI::App* other : app.get_subcommands({})) {
    if (other->get_option_no_throw("--" + name)) others.push_back(other->get_name());
  }
  const std::string whose = others.empty() ? "" : ", a flag of " + joined(others, ", ");
  fail_usage(flag, "unknown flag" + whose, "one that " + help + " --help lists");
}

[[noreturn]] void fail_unknown(const CLI::App& app, const CLI::App& command, const std::string& argument) {
  const bool is_root = &app == &command;
  const std::string help = is_root ? app.get_name() : app.get_name() + " " + command.get_name();
  if (argument.rfind("-", 0) == 0 && argument.size() > 1) {
    fail_unknown_flag(app, command, argument.substr(0, argument.find('=')), help);
  }
  if (!is_root) fail_usage("argument", argument, "flags only, such as --prompt TEXT (see " + help + " --help)");
  std::vector<std::string> names;
  for (const CLI::App* each : app.get_subcommands({})) names.push_back(each->get_name());
  fail_usage("command", argument, "one of " + joined(names, ", "));
}

// Variables of this name that are no mirror of a flag: those of the package and of its tests.
constexpr std::string_view kOtherVariables[] = {"KDTREE_API_KEY", "KDTREE_LIBRARY", "KDTREE_MODELS_DIR", "KDTREE_RUN",
                                                "KDTREE_SOURCE_ROOT"};
constexpr std::string_view kPrefix = "KDTREE_", kTestPrefix = "KDTREE_TEST_";

// What Kubernetes sets in the pods beside a Service whose name begins with `kdtree`: nobody's mistake.
bool is_service_link(std::string_view name, std::string_view value) {
  const auto has = [&](std::string_view part) { return name.find(part) != std::string_view::npos; };
  return has("_SERVICE_HOST") || has("_SERVICE_PORT") || has("_TCP") || has("_UDP") || value.rfind("tcp://", 0) == 0 ||
         value.rfind("udp://", 0) == 0;
}

// What a flag without its value throws carries no name but in its message, which starts with it.
[[noreturn]] void fail_mismatch(const CLI::App& app, const std::string& what) {
  const std::string flag = what.substr(0, what.find(':'));
  for (const CLI::App* command : app.get_subcommands()) {
    if (const CLI::Option* option = command->get_option_no_throw(flag)) {
      fail_usage(flag, "no value", option->get_type_name());
    }
  }
  fail_usage("command line", what, "flags with their values");
}

}  // namespace

std::optional<int64_t> parse_integer(const std::string& text, int64_t low, int64_t high) {
  const std::optional<int64_t> value = parse_whole<int64_t>(text);
  return value && *value >= low && *value <= high ? value : std::nullopt;
}

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> items;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    if (end > begin) items.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return items;
}

ValueForm integer_form(int32_t& target, int64_t low, int64_t high) { return whole_form(target, low, high); }
ValueForm integer_form(int64_t& target, int64_t low, int64_t high) { return whole_form(target, low, high); }

ValueForm seed_form(std::optional<uint64_t>& target) {
  return {"N", "an integer from -2^63 to 2^64 - 1", [&target](const std::string& text) {
            target = parse_whole<uint64_t>(text);
            const std::optional<int64_t> negative = parse_whole<int64_t>(text);
            if (!target && negative) target = static_cast<uint64_t>(*negative);
            return target.has_value();
          }};
}

ValueForm number_form(double& target, double low, double high, bool above_low) {
  const std::string range = above_low ? "a number above " + shortest(low) + " and at most " + shortest(high)
                                      : "a number from " + shortest(low) + " to " + shortest(high);
  return {"X", range, [&target, low, high, above_low](const std::string& text) {
            const std::optional<double> value = parse_whole<double>(text);
            if (!value || !std::isfinite(*value) || *value > high) return false;
            if (*value < low || (above_low && *value == low)) return false;
            target = *value;
            return true;
          }};
}

ValueForm text_form(std::string& target, std::string label, bool may_be_empty) {
  const char* expected = may_be_empty ? "text" : "at least one character, or no such flag";
  return {std::move(label), expected, [&target, may_be_empty](const std::string& text) {
            target = text;
            return may_be_empty || !text.empty();
          }};
}

ValueForm choice_form(int32_t& target, std::vector<std::pair<std::string, int32_t>> choices) {
  std::vector<std::string> names;
  for (const auto& choice : choices) names.push_back(choice.first);
  return {joined(names, "|"), "one of " + joined(names, ", "), [&target, choices](const std::string& text) {
            const auto named = [&](const auto& choice) { return choice.first == text; };
            const auto found = std::find_if(choices.begin(), choices.end(), named);
            if (found != choices.end()) target = found->second;
            return found != choices.end();
          }};
}

ValueForm list_form(std::vector<std::string>& target, std::string label) {
  return {std::move(label), "items separated by commas", [&target](const std::string& text) {
            target = split_list(text);
            return !target.empty();
          }};
}

Flags::Flags(CLI::App& program, const std::string& name, const std::string& description)
    : command_(*program.add_subcommand(name, description)) {}

bool Flags::chosen() const { return command_.parsed() > 0; }
bool Flags::given(const std::string& name) const { return command_.count(name) > 0; }

CLI::Option* Flags::declare(const std::string& name, const ValueForm& form, const std::string& default_text,
                            const std::string& description) {
  const std::string variable = environment_name(name);
  const auto read = [this, name, form](const CLI::results_t& results) {
    // CLI11 also applies the environment to commands that were not chosen, and before it looks at --help.
    if (!chosen() || command_.get_help_ptr()->count() > 0) return true;
    if (!form.set(results.front())) fail_usage(source(name), results.front(), form.expected);
    return true;
  };
  return command_
      .add_option(name, CLI::callback_t(read),
                  wrapped(description) + "\n" + with_variable(wrapped("[default: " + default_text + "]"), variable))
      ->option_text(form.label)
      ->type_name(form.expected)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)
      ->envname(variable);
}

void Flags::value(const std::string& name, ValueForm form, const std::string& default_text,
                  const std::string& description) {
  declare(name, form, default_text, description);
}

void Flags::toggle(const std::string& name, bool& target, const std::string& description) {
  const ValueForm form = {"[on|off]", "on or off", [&target](const std::string& text) {
                            // Empty: the name alone.
                            const bool yes = text.empty() || text == "on" || text == "true" || text == "1";
                            target = yes;
                            return yes || text == "off" || text == "false" || text == "0";
                          }};
  declare(name, form, target ? "on" : "off", description)->expected(0, 1);
}

bool Flags::on_command_line(const std::string& name) const {
  const std::vector<CLI::Option*>& parsed = command_.parse_order();
  return std::find(parsed.begin(), parsed.end(), command_.get_option(name)) != parsed.end();
}

std::vector<std::string> Flags::on_command_line() const {
  std::vector<std::string> names;
  for (const CLI::Option* option : command_.parse_order()) names.push_back(option->get_name());
  return names;
}

std::string Flags::source(const std::string& name) const {
  return on_command_line(name) ? name : environment_name(name);
}

bool parse_command_line(CLI::App& app, const std::vector<std::string>& arguments) {
  // Extras are collected, not thrown, so that the first one can be named in this program's words.
  app.allow_extras();
  for (CLI::App* command : app.get_subcommands({})) command->allow_extras();
  std::vector<std::string> reversed;  // CLI11 takes the arguments last first
  for (const std::string& argument : arguments) {
    // To CLI11 `--flag=` has no value and swallows the next argument; to a shell it is an empty value.
    const bool empty_value = argument.size() > 3 && argument.rfind("--", 0) == 0 &&
                             argument.find('=') == argument.size() - 1;
    reversed.push_back(empty_value ? argument.substr(0, argument.size() - 1) : argument);
    if (empty_value) reversed.emplace_back();
  }
  std::reverse(reversed.begin(), reversed.end());
  try {
    app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    write_stdout(app.help());
    return true;
  } catch (const CLI::CallForVersion& version) {
    write_stdout(std::string(version.what()) + "\n");
    return true;
  } catch (const CLI::ArgumentMismatch& mismatch) {
    fail_mismatch(app, mismatch.what());
  } catch (const CLI::ParseError& error) {
    fail_usage("command line", error.what(), "flags with their values (see " + app.get_name() + " --help)");
  }
  for (const CLI::App* command : app.get_subcommands()) {
    const std::vector<std::string> extras = command->remaining();
    if (!extras.empty()) fail_unknown(app, *command, extras.front());
  }
  const std::vector<std::string> extras = app.remaining();
  if (!extras.empty()) fail_unknown(app, app, extras.front());
  return false;
}

std::string with_flag_name(const CLI::App& app, const std::string& message) {
  const size_t end = message.find(':');
  if (end == std::string::npos) return message;
  std::string name = "--" + message.substr(0, end);
  std::replace(name.begin(), name.end(), '_', '-');
  for (const CLI::App* command : app.get_subcommands()) {
    const CLI::Option* option = command->get_option_no_throw(name);
    if (!option || option->count() == 0) continue;
    const auto& parsed = command->parse_order();
    const bool typed = std::find(parsed.begin(), parsed.end(), option) != parsed.end();
    return (typed ? name : option->get_envname()) + message.substr(end);
  }
  return message;
}

std::vector<std::string> unknown_variables(const CLI::App& app) {
  std::vector<std::string> known, warnings;
  for (const CLI::App* command : app.get_subcommands({})) {
    for (const CLI::Option* option : command->get_options()) known.push_back(option->get_envname());
  }
  known.insert(known.end(), std::begin(kOtherVariables), std::end(kOtherVariables));
  known.erase(std::remove(known.begin(), known.end(), ""), known.end());
  std::vector<std::string> stems;
  for (const std::string& name : known) stems.push_back(name.substr(kPrefix.size()));
  for (char** each = environ; each && *each; ++each) {
    const std::string_view entry = *each;
    const std::string name(entry.substr(0, entry.find('=')));
    if (name.rfind(kPrefix, 0) != 0 || name.rfind(kTestPrefix, 0) == 0) continue;
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    if (is_service_link(name, entry.substr(std::min(name.size() + 1, entry.size())))) continue;
    const std::string near = nearest(std::string_view(name).substr(kPrefix.size()), stems);
    warnings.push_back(name + ": unknown variable: expected " +
                       (near.empty() ? "KDTREE_ and the name of a flag" : "perhaps " + std::string(kPrefix) + near));
  }
  return warnings;
}

}  // namespace kdt
