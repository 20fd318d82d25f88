// The commands of kdtree-run. Each declares its flags on the program and returns what runs it once they are parsed.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace kdt {

// Returns an exit code; throws Failure (failure.h).
using Run = std::function<int()>;

struct Command {
  CLI::App* flags;
  Run run;
};

Command add_generate(CLI::App& app);
Command add_info(CLI::App& app);
Command add_bench(CLI::App& app);
Command add_bench_streams(CLI::App& app);
Command add_serve(CLI::App& app);
Command add_selftest(CLI::App& app);

}  // namespace kdt
