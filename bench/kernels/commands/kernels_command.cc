#include "bench/kernels/commands/kernels_command.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "bench/kernels/command_line.h"
#include "bench/kernels/kernel_case.h"
#include "bench/kernels/kernel_report.h"
#include "bench/kernels/ranks/devices_options.h"
#include "bench/kernels/ranks/rank_case.h"
#include "bench/kernels/ranks/rank_report.h"

namespace lossd::bench {
namespace {

struct KernelsOptions {
  CaseOptions cases;
  DevicesOptions over;
  bool json = false;
};

const char kKernelsDescription[] =
    "Times the fused linear + cross-entropy step (losses, dX and dW += of one batch) and compares it with "
    "its limit: the three matrix products that any implementation needs, bare, on the whole batch, in the "
    "same run and in turns. The result is checked against fp64 first. With --devices it times the step of a "
    "vocabulary over several devices, and compares it with that of one of them.";

const char kKernelsFooter[] =
    "Examples:\n"
    "  lossd-bench kernels                                        one case, as a table\n"
    "  lossd-bench kernels --dtype=all --json                     for scripts\n"
    "  lossd-bench kernels --tokens=1,64,512,4096 --hidden=512    how it scales with the batch\n"
    "  lossd-bench kernels --device=cuda:0 --tokens=16384 --vocab=131072 --hidden=4096   on a GPU\n"
    "  lossd-bench kernels --workspace_bytes=67108864             in small tiles of rows\n"
    "  lossd-bench kernels --lse_spread=100                       rows whose log-sum-exps differ by up to "
    "100\n"
    "  lossd-bench kernels --softcap=30 --label_smoothing=0.1     what options of the loss cost\n"
    "  lossd-bench kernels --targets=64         soft targets on a list of 64 tokens of each row\n"
    "  lossd-bench kernels --kept=64            each row over a list of 64 tokens; the limit stays the "
    "whole's\n"
    "  lossd-bench kernels --device=cuda:0 --teacher_hidden=4096  soft targets of a teacher\n"
    "  lossd-bench kernels --device=cuda:0 --fixed_segments       what the same bits on any number of GPUs "
    "cost\n"
    "  lossd-bench kernels --devices=cuda:0,cuda:1 --tokens=16384 --vocab=131072 --hidden=4096   over two "
    "GPUs\n"
    "\nTimes are medians; the ratio is the median of each round's own ratio. TFLOP/s counts the products "
    "that "
    "were asked for. GB moved is what a part has to read and write by its algorithm "
    "(bench/kernels/traffic.h), "
    "not what a counter saw. peak MiB: memory above inputs and outputs. On a GPU stages are timed in steps "
    "of their own. Run it on a quiet machine.\n"
    "\nWith --devices: 'one' is the whole head on one device while the others wait, the slowest of them; "
    "'over' "
    "is the step over all of them. Steps of a round, and on GPUs as many untimed ones before, follow each "
    "other "
    "without a pause; rows of each step go to all ranks, on GPUs while the step before is computed. "
    "'statistics' and 'parts' are what the rank that waits longest waits for sums of rows and for parts of "
    "dX, "
    "milliseconds of a step; JSON has them of every rank. 'moved by': copy engines, or messages of NCCL or "
    "Gloo. A CPU rank has its share of the processors, alone too, or OMP_NUM_THREADS threads.\n";

KernelResult RunCase(const KernelCase& kernel_case, const Progress& progress) {
  if (kernel_case.cuda_index < 0 && kernel_case.teacher_hidden > 0) {
    KernelResult result;
    result.error = "soft targets are timed on a GPU only";
    return result;
  }
  if (kernel_case.entropy_gradient != 0 && (kernel_case.cuda_index < 0 || kernel_case.teacher_hidden > 0)) {
    KernelResult result;
    result.error = "gradients of the entropy are timed on a GPU only, and without soft targets";
    return result;
  }
  const bool two_phases = kernel_case.held || kernel_case.zeros > 0;
  if (two_phases && (kernel_case.cuda_index < 0 || kernel_case.teacher_hidden > 0 || kernel_case.kept > 0 ||
                     kernel_case.targets > 0)) {
    KernelResult result;
    result.error = "--held and --zeros are timed on a GPU only, and without soft targets and kept tokens";
    return result;
  }
  const int64_t listed = std::max({kernel_case.kept, kernel_case.longest, kernel_case.targets});
  if (listed > 0 && (kernel_case.cuda_index < 0 || kernel_case.teacher_hidden > 0 ||
                     kernel_case.options.label_smoothing > 0 || listed > kernel_case.vocab)) {
    KernelResult result;
    result.error =
        "lists of tokens are timed on a GPU only, no longer than there are tokens, and without a teacher or "
        "label smoothing";
    return result;
  }
  const bool fixed = kernel_case.segments == kernels::Segments::kFixed;
  if (fixed && (kernel_case.cuda_index < 0 || kernel_case.teacher_hidden > 0 || kernel_case.targets > 0)) {
    KernelResult result;
    result.error = "fixed segments are timed on a GPU only, and without soft targets";
    return result;
  }
  if (kernel_case.cuda_index < 0) return RunCpuCase(kernel_case, progress);
#ifdef LOSSD_CUDA
  return RunCudaCase(kernel_case, progress);
#else
  KernelResult result;
  result.error = "this lossd-bench was built without CUDA (no CUDA toolkit was found)";
  return result;
#endif
}

// Empty, or what is timed on one device only.
std::string ProblemOverDevices(const CaseOptions& cases) {
  const char* option = cases.teacher_hidden > 0      ? "--teacher_hidden"
                       : cases.returns               ? "--returns"
                       : cases.entropy_gradient != 0 ? "--entropy_gradient"
                       : cases.held                  ? "--held"
                       : cases.zeros > 0             ? "--zeros"
                       : cases.kept > 0              ? "--kept"
                       : cases.targets > 0           ? "--targets"
                       : cases.portable              ? "--portable"
                                                     : nullptr;
  if (cases.fixed_segments && CudaIndex(cases.device) < 0) return "--fixed_segments is timed on GPUs only";
  if (option == nullptr) return "";
  return std::string(option) + " is timed on one device only: name it with --device instead of --devices";
}

int RunOverDevices(const KernelsOptions& options) {
  const auto print = [&](const std::vector<nlohmann::ordered_json>& results) {
    if (options.json) {
      std::printf("%s\n", nlohmann::ordered_json{{"cases", results}}.dump(2).c_str());
    } else {
      PrintTables(results);
    }
  };
  return RunCasesOverDevices(Cases(options.cases), options.over, print) ? kDone : kFailed;
}

int RunKernels(const KernelsOptions& options) {
  if (!options.over.devices.empty()) return RunOverDevices(options);
  const std::vector<KernelCase> cases = Cases(options.cases);
  std::vector<KernelResult> results;
  bool all_right = true;
  for (size_t i = 0; i < cases.size(); ++i) {
    results.push_back(RunCase(cases[i], [&](const std::string& what) {
      std::fprintf(stderr, "case %zu of %zu: %s\n", i + 1, cases.size(), what.c_str());
    }));
    if (results.back().error.empty()) continue;
    all_right = false;
    std::fprintf(stderr, "case %zu of %zu: %s\n", i + 1, cases.size(), results.back().error.c_str());
  }
  if (options.json) {
    nlohmann::ordered_json json = {{"cases", nlohmann::ordered_json::array()}};
    for (size_t i = 0; i < cases.size(); ++i) json["cases"].push_back(ToJson(cases[i], results[i]));
    std::printf("%s\n", json.dump(2).c_str());
  } else {
    PrintTables(cases, results);
  }
  return all_right ? kDone : kFailed;
}

}  // namespace

void AddKernelsCommand(CLI::App& app, int* exit_code) {
  CLI::App& command = *app.add_subcommand("kernels", kKernelsDescription);
  command.footer(std::string(kKernelsFooter) + kExitCodes);
  const auto options = std::make_shared<KernelsOptions>();
  AddCaseOptions(command, options->cases);
  AddDevicesOptions(command, options->over);
  command.add_flag("--json", options->json, "Print JSON instead of tables");
  command.callback([options, exit_code] {
    if (!options->over.devices.empty()) {
      options->cases.device = options->over.devices.front();
      const std::string problem = ProblemOverDevices(options->cases);
      if (!problem.empty()) throw CLI::ValidationError(problem);
    }
    *exit_code = RunKernels(*options);
  });
}

}  // namespace lossd::bench
