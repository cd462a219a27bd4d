// `lossd-bench optimizer`: what a step of a head's optimizer costs.
#ifndef LOSSD_BENCH_KERNELS_COMMANDS_OPTIMIZER_COMMAND_H_
#define LOSSD_BENCH_KERNELS_COMMANDS_OPTIMIZER_COMMAND_H_

#include <CLI/CLI.hpp>

namespace lossd::bench {

// Adds the command; *exit_code is set if it was asked for.
void AddOptimizerCommand(CLI::App& app, int* exit_code);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_COMMANDS_OPTIMIZER_COMMAND_H_
