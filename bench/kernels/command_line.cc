#include "bench/kernels/command_line.h"

#include <map>

namespace lossd::bench {
namespace {

using kernels::DataType;
using kernels::OptimizerArguments;
using kernels::OptimizerRule;

void AddLossOptions(CLI::App& command, CaseOptions& options) {
  kernels::LossOptions& loss = options.options;
  command.add_option("--label_smoothing", loss.label_smoothing, "Of the loss: 0 to 1")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command.add_option("--lse_square_scale", loss.lse_square_scale, "Of the loss: the z-loss's factor")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command.add_option("--softcap", loss.softcap, "Of the logits; 0: none")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command.add_option("--logit_scale", loss.logit_scale, "Of the logits")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      .add_option("--teacher_hidden", options.teacher_hidden,
                  "Add soft targets of a teacher of this hidden size; 0: none (GPU only)")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20))
      ->capture_default_str();
  command
      .add_option("--divergence", options.divergence,
                  "Of the soft targets: forward_kl, reverse_kl or jensen_shannon")
      ->transform(CLI::Transformer(std::map<std::string, kernels::Divergence>{
          {"forward_kl", kernels::Divergence::kForwardKl},
          {"reverse_kl", kernels::Divergence::kReverseKl},
          {"jensen_shannon", kernels::Divergence::kJensenShannon}}));
  CLI::Option* returns = command.add_flag("--returns", options.returns,
                                          "Ask for all that can be told of a row, top 8 (GPU only)");
  command
      .add_option("--entropy_gradient", options.entropy_gradient,
                  "Tell entropies with losses alone, and take this gradient of every row's in the step; 0: "
                  "neither (GPU only)")
      ->excludes(returns)
      ->check(CLI::Range(-1e3, 1e3))
      ->capture_default_str();
  command
      .add_option("--zeros", options.zeros,
                  "Share of the tokens without a gradient: losses alone are of all, the step of the others "
                  "(GPU only)")
      ->check(CLI::Range(0.0, 0.99))
      ->capture_default_str();
  command.add_flag("--held", options.held,
                   "Have the step take the exponentials that losses alone have made (Hopper GPUs only)");
  auto* kept =
      command
          .add_option("--kept", options.kept,
                      "Tokens that each row keeps, random ones: its softmax is over these alone; 0: over all "
                      "(GPU only)")
          ->excludes(returns)
          ->check(CLI::NonNegativeNumber)
          ->capture_default_str();
  command
      .add_option("--longest", options.longest,
                  "Tokens that one row keeps, whatever the others do; 0: as many as they")
      ->needs(kept)
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      .add_option(
          "--targets", options.targets,
          "Tokens of each row's list of soft targets, random ones beside the labels; 0: none (GPU only)")
      ->excludes(kept)
      ->excludes(returns)
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
}

OptimizerArguments ArgumentsOf(const std::string& optimizer) {
  OptimizerArguments arguments{.learning_rate = 1e-3, .gradient_scale = 0.5, .weight_decay = 0.01};
  if (optimizer == "sgd" || optimizer == "momentum") {
    arguments.rule = OptimizerRule::kSgd;
    arguments.momentum = optimizer == "momentum" ? 0.9 : 0;
  } else {
    arguments.rule = optimizer == "adam" ? OptimizerRule::kAdam : OptimizerRule::kAdamW;
  }
  return arguments;
}

}  // namespace

bool IsDevice(const std::string& name) {
  const std::string prefix = "cuda:";
  if (name == "cpu") return true;
  return name.size() == prefix.size() + 1 && name.rfind(prefix, 0) == 0 && name.back() >= '0' &&
         name.back() <= '9';
}

void AddDeviceOption(CLI::App& command, std::string& device) {
  command.add_option("--device", device, "Where to run")
      ->check(CLI::Validator(
          [](const std::string& name) {
            return IsDevice(name) ? std::string() : "'" + name + "' must be cpu or cuda:N";
          },
          "cpu|cuda:N"))
      ->capture_default_str();
}

void AddSizeOption(CLI::App& command, const std::string& name, std::vector<int64_t>& sizes,
                   const std::string& help) {
  command.add_option(name, sizes, help)
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
}

void AddWorkspaceOption(CLI::App& command, int64_t& bytes) {
  command
      .add_option("--workspace_bytes", bytes,
                  "Ceiling of the step's workspace; 0: 512 MiB on the CPU, 1.25 GiB on a GPU")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))
      ->capture_default_str();
}

void AddRepetitionsOption(CLI::App& command, int64_t& repetitions) {
  command.add_option("--repetitions", repetitions, "Timed rounds; medians are reported")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
}

void AddCaseOptions(CLI::App& command, CaseOptions& options) {
  AddDeviceOption(command, options.device);
  AddSizeOption(command, "--tokens", options.tokens, "Rows of a batch; several values make several cases");
  AddSizeOption(command, "--vocab", options.vocab, "Vocabulary size");
  AddSizeOption(command, "--hidden", options.hidden, "Hidden size");
  command
      .add_option("--dtype", options.dtypes, "Type of weights, hidden states and dX: fp32, bf16, fp16 or all")
      ->delimiter(',')
      ->check(CLI::IsMember({"fp32", "bf16", "fp16", "all"}))
      ->capture_default_str();
  AddWorkspaceOption(command, options.workspace_bytes);
  AddRepetitionsOption(command, options.repetitions);
  command.add_option("--lse_spread", options.lse_spread, "Largest difference between rows' log-sum-exps")
      ->check(CLI::Range(0.0, 1000.0))
      ->capture_default_str();
  command.add_option("--ignored", options.ignored, "Share of the rows that are ignored (GPU only)")
      ->check(CLI::Range(0.0, 0.99))
      ->capture_default_str();
  CLI::Option* portable =
      command.add_flag("--portable", options.portable, "On a GPU, take the path that every GPU takes");
  command
      .add_flag("--fixed_segments", options.fixed_segments,
                "Compute in the segments that give the same bits on any number of GPUs (Hopper only)")
      ->excludes(portable);
  AddLossOptions(command, options);
}

void AddOptimizerOptions(CLI::App& command, OptimizerOptions& options) {
  const CLI::Range size(int64_t{0}, int64_t{1} << 31);
  command.add_option("--vocab", options.vocab, "Vocabulary size; 0: 131072, on the CPU 16384")
      ->check(size)
      ->capture_default_str();
  command.add_option("--hidden", options.hidden, "Hidden size; 0: 4096, on the CPU 1024")
      ->check(size)
      ->capture_default_str();
  command.add_option("--optimizer", options.optimizer, "adamw, adam, momentum (SGD with 0.9) or sgd")
      ->check(CLI::IsMember({"adamw", "adam", "momentum", "sgd"}))
      ->capture_default_str();
  command.add_option("--dtype", options.dtype, "Of the weights: fp32, bf16 or fp16")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  command.add_flag("--no_master", options.no_master,
                   "Step the 16-bit weights themselves, without an fp32 master beside them");
  AddRepetitionsOption(command, options.repetitions);
}

int CudaIndex(const std::string& device) { return device == "cpu" ? -1 : device.back() - '0'; }

int64_t WorkspaceBytes(int64_t asked, int cuda_index) {
  if (asked != 0) return asked;
  return cuda_index < 0 ? kernels::kDefaultCpuWorkspaceBytes : kernels::kDefaultCudaWorkspaceBytes;
}

OptimizerCase CaseOf(const OptimizerOptions& options, int cuda_index) {
  const bool cpu = cuda_index < 0;
  OptimizerCase one{.vocab = options.vocab, .hidden = options.hidden};
  if (one.vocab == 0) one.vocab = cpu ? 16384 : 131072;
  if (one.hidden == 0) one.hidden = cpu ? 1024 : 4096;
  one.dtype = options.dtype == "fp32"   ? DataType::kFloat32
              : options.dtype == "fp16" ? DataType::kFloat16
                                        : DataType::kBFloat16;
  one.master = !options.no_master;
  one.arguments = ArgumentsOf(options.optimizer);
  one.repetitions = options.repetitions;
  one.cuda_index = cuda_index;
  return one;
}

std::vector<KernelCase> Cases(const CaseOptions& options) {
  const std::map<std::string, std::vector<DataType>> types = {
      {"fp32", {DataType::kFloat32}},
      {"bf16", {DataType::kBFloat16}},
      {"fp16", {DataType::kFloat16}},
      {"all", {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}}};
  KernelCase common;
  common.cuda_index = CudaIndex(options.device);
  common.workspace_bytes = WorkspaceBytes(options.workspace_bytes, common.cuda_index);
  common.repetitions = options.repetitions;
  common.lse_spread = options.lse_spread;
  common.portable = options.portable;
  if (options.fixed_segments) common.segments = kernels::Segments::kFixed;
  common.ignored = options.ignored;
  common.options = options.options;
  common.teacher_hidden = options.teacher_hidden;
  common.divergence = options.divergence;
  common.returns = options.returns;
  common.entropy_gradient = options.entropy_gradient;
  common.zeros = options.zeros;
  common.held = options.held;
  common.kept = options.kept;
  common.longest = options.longest;
  common.targets = options.targets;
  std::vector<KernelCase> cases;
  for (const std::string& name : options.dtypes) {
    for (const DataType dtype : types.at(name)) {
      for (const int64_t hidden : options.hidden) {
        for (const int64_t vocab : options.vocab) {
          for (const int64_t tokens : options.tokens) {
            KernelCase one = common;
            one.tokens = tokens;
            one.vocab = vocab;
            one.hidden = hidden;
            one.dtype = dtype;
            cases.push_back(one);
          }
        }
      }
    }
  }
  return cases;
}

std::string ShortName(DataType type) {
  return type == DataType::kFloat32 ? "fp32" : type == DataType::kBFloat16 ? "bf16" : "fp16";
}

}  // namespace lossd::bench
