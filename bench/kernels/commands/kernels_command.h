// `lossd-bench kernels`: one table of cases that are run in this process.
#ifndef LOSSD_BENCH_KERNELS_COMMANDS_KERNELS_COMMAND_H_
#define LOSSD_BENCH_KERNELS_COMMANDS_KERNELS_COMMAND_H_

#include <CLI/CLI.hpp>

namespace lossd::bench {

// Adds the command; *exit_code is set if it was asked for.
void AddKernelsCommand(CLI::App& app, int* exit_code);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_COMMANDS_KERNELS_COMMAND_H_
