// kdtree-run: the command line of the engine. Uses kdtree.h only.
#include <fcntl.h>
#include <signal.h>

#include <CLI/CLI.hpp>
#include <exception>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "client.h"
#include "commands.h"
#include "failure.h"
#include "flags.h"
#include "interrupt.h"

namespace kdt {
namespace {

// A descriptor that was closed would be given to the next file or socket, and text would be written into that. Results that
// nobody can get are an error: what takes the place of a closed standard output cannot be written to.
void open_standard_descriptors() {
  for (int descriptor = 0; descriptor <= 2; ++descriptor)
    if (fcntl(descriptor, F_GETFD) == -1) open("/dev/null", descriptor == 2 ? O_WRONLY : O_RDONLY);
}

// Without a command it is `serve`, with or without flags of its own.
std::vector<std::string> with_command(std::vector<std::string> arguments) {
  const bool is_flag = !arguments.empty() && arguments[0].size() > 2 && arguments[0].compare(0, 2, "--") == 0;
  const bool is_ours = is_flag && (arguments[0] == "--help" || arguments[0] == "--version");
  if (is_flag && arguments[0] == "--list-devices") {
    arguments.insert(arguments.begin(), "info");
  } else if (arguments.empty() || (is_flag && !is_ours)) {
    arguments.insert(arguments.begin(), "serve");
  }
  return arguments;
}

int run(const std::vector<std::string>& arguments) {
  // A reader that goes away is noticed at the write, and ends the program quietly.
  signal(SIGPIPE, SIG_IGN);
  open_standard_descriptors();
  install_interrupt_handler();
  check_abi();

  const auto formatter = std::make_shared<CLI::Formatter>();
  formatter->column_width(34);
  CLI::App app("kdtree-run: losslessly speculated text from Kimi K2 checkpoints", "kdtree-run");
  app.formatter(formatter);
  app.set_version_flag("--version", std::string("kdtree-run ") + kdt_version(), "Print the version and exit");
  app.require_subcommand(0, 1);
  app.footer("Without a command the bundled model is served on http://127.0.0.1:8000.\n"
             "Every flag has an environment variable of the same meaning; the flag wins.\n"
             "Exit codes: 0 ok, 1 the input or the run failed, 2 usage, 130 interrupted.");
  const std::vector<Command> commands = {add_serve(app), add_generate(app),      add_info(app),    add_plan(app),
                                         add_bench(app), add_bench_streams(app), add_selftest(app)};

  if (parse_command_line(app, with_command(arguments))) return kExitOk;
  if (!is_follower()) {
    for (const std::string& line : unknown_variables(app)) print_warning(line);
  }
  for (const Command& command : commands) {
    if (!command.chosen()) continue;
    try {
      return command.run();
    } catch (const Failure& failure) {
      throw Failure(failure.exit_code(), with_flag_name(app, failure.what()));
    }
  }
  std::cerr << app.help();
  return kExitUsage;
}

// Of a launcher's job the rank, unless the message begins with one.
std::string with_rank(const std::string& message) {
  int32_t rank = 0, n_ranks = 1;
  if (kdt_launched(&rank, &n_ranks) != KDT_OK || n_ranks == 1 || message.rfind("rank ", 0) == 0) return message;
  return "rank " + std::to_string(rank) + ": " + message;
}

}  // namespace
}  // namespace kdt

int main(int argc, char** argv) {
  try {
    return kdt::run(std::vector<std::string>(argv + (argc > 0 ? 1 : 0), argv + argc));
  } catch (const kdt::Failure& failure) {
    kdt::print_error(kdt::with_rank(failure.what()));
    return failure.exit_code();
  } catch (const std::exception& error) {
    kdt::print_error(kdt::with_rank("kdtree-run: ") + error.what() + ": expected to run to its end");
    return kdt::kExitFailed;
  }
}
