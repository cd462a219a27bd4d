#include "bench/kernels/commands/replicas_command.h"

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "bench/kernels/command_line.h"
#include "bench/kernels/ranks/devices_options.h"
#include "bench/kernels/replicas/replica_case.h"
#include "bench/kernels/replicas/replica_report.h"

namespace lossd::bench {
namespace {

struct ReplicasOptions {
  std::vector<std::string> devices = {"cuda:0", "cuda:1"};
  OptimizerOptions step;
  bool json = false;
};

const char kReplicasDescription[] =
    "Measures one step of replicas of a head, which hold it together and each have a gradient of their own: "
    "the same calls as a server's, with its communicators, in a process for each replica. It is compared "
    "with the bare operations of such a step, in turns with it: NCCL's reduce-scatter of the fp32 gradient, "
    "the optimizer over the rows of one replica, NCCL's all-gather of the weights.";

const char kReplicasFooter[] =
    "Examples:\n"
    "  lossd-bench replicas                                       AdamW, bf16 with an fp32 master, V=131072, "
    "H=4096, on cuda:0 and cuda:1\n"
    "  lossd-bench replicas --devices=cuda:0,cuda:1,cuda:2,cuda:3 --json     four replicas, for scripts\n"
    "  lossd-bench replicas --devices=cpu,cpu                     V=16384, H=1024, by Gloo\n"
    "\nsum gives each replica the sum of its slice; tally tells what all slices add up to; step is the "
    "optimizer over the slice, which sends the new weights to the others. ratio is the whole over the three "
    "bare operations, the median of the rounds' ratios; in each round the slowest replica counts. GB sent is "
    "what the first replica sends, as computed. First bits are checked: sums and weights of rows from all "
    "over the head against the CPU's arithmetic.\n";

int RunReplicas(const ReplicasOptions& options) {
  const ReplicaCase one{.devices = options.devices,
                        .step = CaseOf(options.step, CudaIndex(options.devices.front())),
                        .optimizer = options.step.optimizer};
  const auto print = [&](const nlohmann::ordered_json& result) {
    if (options.json) {
      std::printf("%s\n", result.dump(2).c_str());
    } else {
      PrintReplicaTable(result);
    }
  };
  return RunReplicaCase(one, print) ? kDone : kFailed;
}

}  // namespace

void AddReplicasCommand(CLI::App& app, int* exit_code) {
  CLI::App& command = *app.add_subcommand("replicas", kReplicasDescription);
  command.footer(std::string(kReplicasFooter) + kExitCodes);
  const auto options = std::make_shared<ReplicasOptions>();
  AddDevicesOption(command, options->devices, "A replica on each of these devices, in a process of its own");
  AddOptimizerOptions(command, options->step);
  command.add_flag("--json", options->json, "Print JSON instead of a table");
  command.callback([options, exit_code] { *exit_code = RunReplicas(*options); });
}

}  // namespace lossd::bench
