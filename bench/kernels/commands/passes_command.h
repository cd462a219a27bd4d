// `lossd-bench passes`: what bench/peers drives lossd with.
#ifndef LOSSD_BENCH_KERNELS_COMMANDS_PASSES_COMMAND_H_
#define LOSSD_BENCH_KERNELS_COMMANDS_PASSES_COMMAND_H_

#include <CLI/CLI.hpp>

namespace lossd::bench {

// Adds the command; *exit_code is set if it was asked for.
void AddPassesCommand(CLI::App& app, int* exit_code);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_COMMANDS_PASSES_COMMAND_H_
