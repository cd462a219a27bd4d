#include "tests/bench/commands/optimizer_command.h"

#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/bench/command_line.h"
#include "tests/bench/optimizer_case.h"

namespace lossd::bench {
namespace {

using Json = nlohmann::ordered_json;
using kernels::DataType;
using kernels::OptimizerArguments;
using kernels::OptimizerRule;

struct OptimizerOptions {
  std::string device = "cuda:0";
  std::string optimizer = "adamw";
  std::string dtype = "bf16";
  bool no_master = false;
  bool json = false;
  OptimizerCase one = {.repetitions = 9};
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

OptimizerArguments ArgumentsOf(const std::string& name) {
  OptimizerArguments arguments{.learning_rate = 1e-3, .gradient_scale = 0.5, .weight_decay = 0.01};
  if (name == "sgd" || name == "momentum") {
    arguments.rule = OptimizerRule::kSgd;
    arguments.momentum = name == "momentum" ? 0.9 : 0;
  } else {
    arguments.rule = name == "adam" ? OptimizerRule::kAdam : OptimizerRule::kAdamW;
  }
  return arguments;
}

double GigabytesPerSecond(int64_t bytes, double milliseconds) {
  return milliseconds > 0 ? static_cast<double>(bytes) / milliseconds * 1e-6 : 0;
}

Json ToJson(const OptimizerOptions& options, const OptimizerCase& c, const OptimizerResult& r) {
  Json json = {{"optimizer", options.optimizer},
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

void PrintTable(const OptimizerOptions& options, const OptimizerCase& c, const OptimizerResult& r) {
  std::printf("%s over [%lld, %lld] %s%s, %lld bytes an element; %s\n", options.optimizer.c_str(),
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

int RunOptimizer(const OptimizerOptions& options) {
  OptimizerCase one = options.one;
  one.cuda_index = CudaIndex(options.device);
  const bool cpu = one.cuda_index < 0;
  if (one.vocab == 0) one.vocab = cpu ? 16384 : 131072;
  if (one.hidden == 0) one.hidden = cpu ? 1024 : 4096;
  one.dtype = options.dtype == "fp32"   ? DataType::kFloat32
              : options.dtype == "fp16" ? DataType::kFloat16
                                        : DataType::kBFloat16;
  one.master = !options.no_master;
  one.arguments = ArgumentsOf(options.optimizer);
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
  const auto options = std::make_shared<OptimizerOptions>();
  const CLI::Range size(int64_t{0}, int64_t{1} << 31);
  AddDeviceOption(command, options->device);
  command.add_option("--vocab", options->one.vocab, "Vocabulary size; 0: 131072, on the CPU 16384")
      ->check(size)
      ->capture_default_str();
  command.add_option("--hidden", options->one.hidden, "Hidden size; 0: 4096, on the CPU 1024")
      ->check(size)
      ->capture_default_str();
  command.add_option("--optimizer", options->optimizer, "adamw, adam, momentum (SGD with 0.9) or sgd")
      ->check(CLI::IsMember({"adamw", "adam", "momentum", "sgd"}))
      ->capture_default_str();
  command.add_option("--dtype", options->dtype, "Of the weights: fp32, bf16 or fp16")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  command.add_flag("--no_master", options->no_master,
                   "Step the 16-bit weights themselves, without an fp32 master beside them");
  AddRepetitionsOption(command, options->one.repetitions);
  command.add_flag("--json", options->json, "Print JSON instead of a table");
  command.callback([options, exit_code] { *exit_code = RunOptimizer(*options); });
}

}  // namespace lossd::bench
