// lossd-bench: checks the kernels and times them against their limit.
#include <CLI/CLI.hpp>

#include "bench/kernels/command_line.h"
#include "bench/kernels/commands/kernels_command.h"
#include "bench/kernels/commands/optimizer_command.h"
#include "bench/kernels/commands/passes_command.h"
#include "bench/kernels/commands/replicas_command.h"
#include "bench/kernels/commands/sweep_command.h"
#include "bench/kernels/commands/weight_gradient_command.h"

namespace lossd::bench {
namespace {

int Main(int argc, char** argv) {
  CLI::App app("Measures lossd against its limits. Each command has a --help of its own.", "lossd-bench");
  app.footer(kExitCodes);
  app.require_subcommand(1);
  int exit_code = kDone;
  AddKernelsCommand(app, &exit_code);
  AddSweepCommand(app, &exit_code);
  AddWeightGradientCommand(app, &exit_code);
  AddOptimizerCommand(app, &exit_code);
  AddReplicasCommand(app, &exit_code);
  AddPassesCommand(app, &exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kDone : kBadArguments;
  }
  return exit_code;
}

}  // namespace
}  // namespace lossd::bench

int main(int argc, char** argv) { return lossd::bench::Main(argc, argv); }
