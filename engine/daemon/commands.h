// The commands of kdtree-run. Each declares its flags on the program and returns what runs it once they are parsed.
#pragma once

#include <functional>
#include <memory>

namespace CLI {
class App;
}

namespace kdt {

struct Command {
  std::function<bool()> chosen;  // once the command line is parsed
  std::function<int()> run;      // returns an exit code; throws Failure (failure.h)
};

// For a type with a member `flags` (flags.h) and a member `run`.
template <class Type>
Command command_of(std::shared_ptr<Type> command) {
  return {[command] { return command->flags.chosen(); }, [command] { return command->run(); }};
}

Command add_generate(CLI::App& app);
Command add_info(CLI::App& app);
Command add_bench(CLI::App& app);
Command add_bench_streams(CLI::App& app);
Command add_serve(CLI::App& app);
Command add_selftest(CLI::App& app);
Command add_plan(CLI::App& app);

}  // namespace kdt
