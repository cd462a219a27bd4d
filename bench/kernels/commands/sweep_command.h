// `lossd-bench sweep`: many sizes, each a case of `kernels` in a process of its own.
#ifndef LOSSD_BENCH_KERNELS_COMMANDS_SWEEP_COMMAND_H_
#define LOSSD_BENCH_KERNELS_COMMANDS_SWEEP_COMMAND_H_

#include <CLI/CLI.hpp>

namespace lossd::bench {

// Adds the command; *exit_code is set if it was asked for.
void AddSweepCommand(CLI::App& app, int* exit_code);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_COMMANDS_SWEEP_COMMAND_H_
