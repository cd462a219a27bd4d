// `lossd-bench passes`: what tests/bench/peers drives lossd with.
#ifndef LOSSD_TESTS_BENCH_COMMANDS_PASSES_COMMAND_H_
#define LOSSD_TESTS_BENCH_COMMANDS_PASSES_COMMAND_H_

#include <CLI/CLI.hpp>

namespace lossd::bench {

// Adds the command; *exit_code is set if it was asked for.
void AddPassesCommand(CLI::App& app, int* exit_code);

}  // namespace lossd::bench

#endif  // LOSSD_TESTS_BENCH_COMMANDS_PASSES_COMMAND_H_
