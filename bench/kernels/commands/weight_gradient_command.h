// `lossd-bench weight-gradient`: what accumulating dW costs in time and memory.
#ifndef LOSSD_BENCH_KERNELS_COMMANDS_WEIGHT_GRADIENT_COMMAND_H_
#define LOSSD_BENCH_KERNELS_COMMANDS_WEIGHT_GRADIENT_COMMAND_H_

#include <CLI/CLI.hpp>

namespace lossd::bench {

// Adds the command; *exit_code is set if it was asked for.
void AddWeightGradientCommand(CLI::App& app, int* exit_code);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_COMMANDS_WEIGHT_GRADIENT_COMMAND_H_
