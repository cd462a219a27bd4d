#include "client/tools/lossctl/head_options.h"

#include "CLI/Option.hpp"
#include "CLI/Validators.hpp"
#include "absl/strings/str_cat.h"
#include "client/tools/names.h"

namespace lossd::tools {
namespace {

constexpr char kGroup[] = "Optimizer ('lossctl step', ApplyStep)";

// What the arguments of torch.optim are called there.
std::vector<CLI::Option*> AddOptimizerOptions(CLI::App& command, HeadOptions& options) {
  CLI::Option* optimizer =
      command
          .add_option("--optimizer", options.optimizer,
                      "What the server updates the weight by: torch.optim's (default: none)")
          ->type_name("KIND")
          ->check(CLI::IsMember(OptimizerNames()));
  const std::vector<CLI::Option*> arguments = {
      command.add_option("--weight-decay", options.weight_decay, "Weight decay (default: 0, of adamw 0.01)")
          ->type_name("NUMBER"),
      command.add_option("--momentum", options.momentum, "Momentum of sgd (default: 0, no memory for it)")
          ->type_name("NUMBER"),
      command.add_option("--dampening", options.dampening, "Dampening of sgd's momentum (default: 0)")
          ->type_name("NUMBER"),
      command.add_flag("--nesterov", options.nesterov, "Nesterov's momentum, of sgd"),
      command.add_option("--beta1", options.beta1, "Of adam and adamw (default: 0.9)")->type_name("NUMBER"),
      command.add_option("--beta2", options.beta2, "Of adam and adamw (default: 0.999)")->type_name("NUMBER"),
      command.add_option("--eps", options.eps, "Of adam and adamw (default: 1e-8)")->type_name("NUMBER"),
      command.add_flag("--maximize", options.maximize, "Ascend instead of descend")};
  std::vector<CLI::Option*> all = {optimizer};
  for (CLI::Option* argument : arguments) all.push_back(argument->needs(optimizer));
  all.push_back(command.add_flag("--master-weights", options.master_weights,
                                 "Keep an fp32 copy of 16-bit weights, which steps and writes work on"));
  for (CLI::Option* option : all) option->group(kGroup);
  return all;
}

}  // namespace

std::vector<CLI::Option*> AddHeadOptions(CLI::App& command, HeadOptions& options) {
  std::vector<CLI::Option*> all = {
      command.add_option("--logit_scale", options.logit_scale, "Multiplies the logits (default: 1)")
          ->type_name("SCALE"),
      command
          .add_option("--softcap", options.softcap, "Caps the logits: C * tanh(logit / C) (default: 0, none)")
          ->type_name("C"),
      command.add_flag("--frozen", options.frozen,
                       "The weight is not trained: no memory for its gradient, and no flush"),
      command.add_flag("--bias", options.bias,
                       "Beside the weight there is a bias, loaded and flushed with it"),
      command.add_flag("--double-buffer", options.double_buffer,
                       "Take the next window's batches into a second gradient while a flush reads this one"),
      command.add_flag("--fixed-segments", options.fixed_segments,
                       "Results have the same bits on any number of devices; about 1 % slower on one"),
      command
          .add_option("--held-bytes", options.held_bytes,
                      "Memory of the device for what phase one of batches leaves for phase two; a token "
                      "takes a little "
                      "more than its logits in the weights' dtype")
          ->check(CLI::NonNegativeNumber)
          ->transform(CLI::AsSizeValue(false))};
  const std::vector<CLI::Option*> optimizer = AddOptimizerOptions(command, options);
  all.insert(all.end(), optimizer.begin(), optimizer.end());
  return all;
}

HeadConfig WithOptions(HeadConfig config, const HeadOptions& options) {
  config.logit_scale = options.logit_scale;
  config.softcap = options.softcap;
  config.frozen = options.frozen;
  config.bias = options.bias;
  config.master_weights = options.master_weights;
  config.double_buffer = options.double_buffer;
  config.fixed_segments = options.fixed_segments;
  config.held_bytes = static_cast<int64_t>(options.held_bytes);
  for (const OptimizerKind kind : kOptimizerKinds) {
    if (options.optimizer == Name(kind)) config.optimizer.kind = kind;
  }
  config.optimizer.weight_decay = options.weight_decay;
  config.optimizer.momentum = options.momentum;
  config.optimizer.dampening = options.dampening;
  config.optimizer.nesterov = options.nesterov;
  config.optimizer.beta1 = options.beta1;
  config.optimizer.beta2 = options.beta2;
  config.optimizer.eps = options.eps;
  config.optimizer.maximize = options.maximize;
  return config;
}

std::string DescribeOptimizer(const OptimizerConfig& optimizer) {
  if (optimizer.kind == OptimizerKind::kNone) return "";
  std::string text = optimizer.kind == OptimizerKind::kSgd    ? "SGD"
                     : optimizer.kind == OptimizerKind::kAdam ? "Adam"
                                                              : "AdamW";
  absl::StrAppend(&text, " (weight decay ", optimizer.weight_decay.value_or(0));
  if (optimizer.kind != OptimizerKind::kSgd) {
    absl::StrAppend(&text, ", betas ", optimizer.beta1, " and ", optimizer.beta2, ", eps ", optimizer.eps);
  } else if (optimizer.momentum != 0) {
    absl::StrAppend(&text, optimizer.nesterov ? ", Nesterov's momentum " : ", momentum ", optimizer.momentum);
  }
  return absl::StrCat(text, optimizer.maximize ? ", maximize)" : ")");
}

}  // namespace lossd::tools
