// `lossd-bench replicas`: what a step of replicas of a head costs.
#ifndef LOSSD_BENCH_KERNELS_COMMANDS_REPLICAS_COMMAND_H_
#define LOSSD_BENCH_KERNELS_COMMANDS_REPLICAS_COMMAND_H_

#include <CLI/CLI.hpp>

namespace lossd::bench {

// Adds the command; *exit_code is set if it was asked for.
void AddReplicasCommand(CLI::App& app, int* exit_code);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_COMMANDS_REPLICAS_COMMAND_H_
