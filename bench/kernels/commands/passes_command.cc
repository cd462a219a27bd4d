#include "bench/kernels/commands/passes_command.h"

#include <cstdlib>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/kernels/command_line.h"
#include "bench/kernels/passes.h"

namespace lossd::bench {
namespace {

using Json = nlohmann::ordered_json;

struct PassesOptions {
  std::string device = "cpu";
  std::string dtype = "bf16";
  std::string folder;
  bool add = false;
  KernelCase one;
};

const char kPassesDescription[] =
    "Runs the step on another program's inputs, and then as often as that program asks, so that both can be "
    "timed in "
    "turns. bench/peers/peers.py uses it.";

const char kPassesFooter[] =
    "In FOLDER it reads weight.bin [V, H] and hidden_states.bin [N, H] (of --dtype) and labels.bin [N] "
    "(int64, -100: "
    "ignored), and writes losses.bin [N] (fp32), dx.bin [N, H] (of --dtype) and dw.bin [V, H] (fp32), "
    "gradients of the "
    "mean loss. Then it prints one line of JSON: {\"tile_rows\", \"peak_bytes\"}, or {\"error\"}. For each "
    "number it "
    "reads from standard input it runs one untimed pass and so many timed ones, each making dW anew or, with "
    "--add, adding to it, and prints {\"milliseconds\": [...]}. It ends with the input.\n";

// False if it is an error.
bool Say(const Json& answer) {
  std::cout << answer.dump() << "\n" << std::flush;
  return !answer.contains("error");
}

int RunPasses(const PassesOptions& options) {
  KernelCase one = options.one;
  one.cuda_index = CudaIndex(options.device);
  one.workspace_bytes = WorkspaceBytes(one.workspace_bytes, one.cuda_index);
  one.dtype = options.dtype == "fp32" ? kernels::DataType::kFloat32 : kernels::DataType::kBFloat16;
  std::unique_ptr<Passes> passes;
  if (one.cuda_index < 0) {
    passes = MakeCpuPasses(one);
  } else {
#ifdef LOSSD_CUDA
    passes = MakeCudaPasses(one);
#else
    Say({{"error", "this lossd-bench was built without CUDA (no CUDA toolkit was found)"}});
    return kFailed;
#endif
  }
  if (const std::string error = passes->Prepare(options.folder); !error.empty()) {
    Say({{"error", error}});
    return kFailed;
  }
  Say({{"tile_rows", passes->tile_rows()}, {"peak_bytes", passes->peak_bytes()}});
  const auto weight_gradient =
      options.add ? kernels::WeightGradient::kAccumulate : kernels::WeightGradient::kOverwrite;
  for (std::string line; std::getline(std::cin, line);) {
    const int64_t count = std::strtoll(line.c_str(), nullptr, 10);
    if (count < 1 || count > 1000) {
      Say({{"error", "'" + line + "' is no number of passes"}});
      return kFailed;
    }
    std::vector<double> milliseconds;
    const std::string error = passes->Time(count, weight_gradient, &milliseconds);
    if (!Say(error.empty() ? Json{{"milliseconds", milliseconds}} : Json{{"error", error}})) return kFailed;
  }
  return kDone;
}

}  // namespace

void AddPassesCommand(CLI::App& app, int* exit_code) {
  CLI::App& command = *app.add_subcommand("passes", kPassesDescription);
  command.footer(std::string(kPassesFooter) + kExitCodes);
  const auto options = std::make_shared<PassesOptions>();
  const CLI::Range size(int64_t{1}, int64_t{1} << 40);
  AddDeviceOption(command, options->device);
  command.add_option("--tokens", options->one.tokens, "Rows of the batch")->check(size)->required();
  command.add_option("--vocab", options->one.vocab, "Vocabulary size")->check(size)->required();
  command.add_option("--hidden", options->one.hidden, "Hidden size")->check(size)->required();
  command.add_option("--dtype", options->dtype, "bf16 or fp32")
      ->check(CLI::IsMember({"bf16", "fp32"}))
      ->capture_default_str();
  AddWorkspaceOption(command, options->one.workspace_bytes);
  command.add_flag("--add", options->add, "Add to dW in the timed passes instead of making it anew");
  command.add_option("folder", options->folder, "Folder of inputs and outputs")
      ->check(CLI::ExistingDirectory)
      ->required();
  command.callback([options, exit_code] { *exit_code = RunPasses(*options); });
}

}  // namespace lossd::bench
