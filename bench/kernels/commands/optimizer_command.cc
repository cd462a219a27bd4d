#include "bench/kernels/commands/optimizer_command.h"

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "bench/kernels/command_line.h"
#include "bench/kernels/optimizer_case.h"

namespace lossd::bench {
namespace {

using Json = nlohmann::ordered_json;

struct OptimizerCommand {
  std::string device = "cuda:0";
  OptimizerOptions step;
  bool json = false;
};

const char kOptimizerDescription[] =
    "Measures one step of the optimizer over a whole head against the time that its bytes take: a copy from "
    "memory to memory of the same device, in turns with it. A step reads the gradient and everything that it "
    "changes once, writes that once, and tells the gradient's norm on its way.";

const char kOptimizerFooter[] =
    "Examples:\n"
    "  lossd-bench optimizer                                      AdamW, bf16 with an fp32 master, V=131072, "
    "H=4096\n"
    "  lossd-bench optimizer --optimizer=momentum --no_master     SGD with momentum on the bf16 weights "
    "themselves\n"
    "  lossd-bench optimizer --device=cpu --json                  V=16384, H=1024, for scripts\n"
    "\nratio is the step's time over that of its bytes at the copy's bandwidth, the median of the rounds: "
    "1.00 "
    "is as fast as memory. norm is the reading of the gradient that tells its norm alone (GradientStats). "
    "First the step is checked: bits of elements from all over the matrix against the CPU's arithmetic, and "
    "the norm.\n";

double GigabytesPerSecond(int64_t bytes, double milliseconds) {
  return milliseconds > 0 ? static_cast<double>(bytes) / milliseconds * 1e-6 : 0;
}

Json ToJson(const OptimizerCommand& options, const OptimizerCase& c, const OptimizerResult& r) {
  Json json = {{"optimizer", options.step.optimizer},
               {"vocab", c.vocab},
               {"hidden", c.hidden},
               {"dtype", ShortName(c.dtype)},
               {"master", c.has_master()},
               {"bytes", c.step_bytes()},
               {"bytes_per_element", c.step_bytes() / c.elements()},
               {"milliseconds", r.step_ms},
               {"gigabytes_per_second", GigabytesPerSecond(c.step_bytes(), r.step_ms)},
               {"copy",
                {{"bytes", r.copy_bytes},
                 {"milliseconds", r.copy_ms},
                 {"gigabytes_per_second", GigabytesPerSecond(r.copy_bytes, r.copy_ms)}}},
               {"ratio", r.ratio},
               {"norm",
                {{"bytes", c.tally_bytes()},
                 {"milliseconds", r.tally_ms},
                 {"gigabytes_per_second", GigabytesPerSecond(c.tally_bytes(), r.tally_ms)}}},
               {"checked_elements", r.checked},
               {"relative_error_norm", r.norm_error},
               {"hardware", r.hardware}};
  if (!r.error.empty()) json["error"] = r.error;
  return json;
}

void PrintLine(const char* what, int64_t bytes, double milliseconds) {
  std::printf("  %-24s %9.3f %9.2f %8.1f\n", what, milliseconds, static_cast<double>(bytes) * 1e-9,
              GigabytesPerSecond(bytes, milliseconds));
}

void PrintTable(const OptimizerCommand& options, const OptimizerCase& c, const OptimizerResult& r) {
  std::printf("%s over [%lld, %lld] %s%s, %lld bytes an element; %s\n", options.step.optimizer.c_str(),
              static_cast<long long>(c.vocab), static_cast<long long>(c.hidden), ShortName(c.dtype).c_str(),
              c.has_master() ? " with an fp32 master" : "",
              static_cast<long long>(c.step_bytes() / c.elements()), r.hardware.c_str());
  std::printf("  %-24s %9s %9s %8s\n", "", "ms", "GB moved", "GB/s");
  PrintLine("step", c.step_bytes(), r.step_ms);
  PrintLine("copy", r.copy_bytes, r.copy_ms);
  PrintLine("norm", c.tally_bytes(), r.tally_ms);
  std::printf("\nratio to the copy's bandwidth: %.3f\n", r.ratio);
  std::printf("checked: bits of %lld elements; the norm, to %.1e\n", static_cast<long long>(r.checked),
              r.norm_error);
}

int RunOptimizer(const OptimizerCommand& options) {
  const OptimizerCase one = CaseOf(options.step, CudaIndex(options.device));
  const bool cpu = one.cuda_index < 0;
  OptimizerResult result;
  if (cpu) {
    result = RunCpuOptimizerCase(one);
  } else {
#ifdef LOSSD_CUDA
    result = RunCudaOptimizerCase(one);
#else
    result.error = "this lossd-bench was built without CUDA (no CUDA toolkit was found); --device=cpu";
#endif
  }
  if (options.json) std::printf("%s\n", ToJson(options, one, result).dump(2).c_str());
  if (!result.error.empty()) {
    std::fprintf(stderr, "%s\n", result.error.c_str());
    return kFailed;
  }
  if (!options.json) PrintTable(options, one, result);
  return kDone;
}

}  // namespace

void AddOptimizerCommand(CLI::App& app, int* exit_code) {
  CLI::App& command = *app.add_subcommand("optimizer", kOptimizerDescription);
  command.footer(std::string(kOptimizerFooter) + kExitCodes);
  const auto options = std::make_shared<OptimizerCommand>();
  AddDeviceOption(command, options->device);
  AddOptimizerOptions(command, options->step);
  command.add_flag("--json", options->json, "Print JSON instead of a table");
  command.callback([options, exit_code] { *exit_code = RunOptimizer(*options); });
}

}  // namespace lossd::bench
