// lossctl head copy | blend
#include <memory>

#include "CLI/Option.hpp"
#include "absl/strings/str_cat.h"
#include "client/tools/lossctl/context.h"
#include "client/tools/lossctl/errors.h"
#include "client/tools/lossctl/head_info.h"
#include "client/tools/lossctl/head_options.h"
#include "nlohmann/json.hpp"

namespace lossd::tools {
namespace {

struct CopyCommand {
  std::string source;
  std::string name;
  CopyOptions options;
};

absl::Status Copy(const Context& context, const CopyCommand& command) {
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  auto copy = (*client)->CopyHead(command.source, command.name, command.options);
  if (absl::IsNotFound(copy.status())) return WithAdvice(copy.status(), NotFoundAdvice(copy.status()));
  if (!copy.ok()) return WithAdvice(copy.status(), CreateAdvice(copy.status()));
  auto info = copy->head.Info();
  if (!info.ok()) return info.status();
  nlohmann::ordered_json json = HeadToJson(*info);
  json["copied_version"] = copy->weight_version;
  const HeadConfig& config = info->config;
  context.Print(json, absl::StrCat("Head '", config.name, "' has the weights of '", command.source,
                                   "', version ", copy->weight_version, ": ",
                                   DescribeShape(config.vocab_size, config.hidden_size, config.weight_type),
                                   DescribeOptions(config, ", "), ", ", FormatBytes(TotalBytes(info->memory)),
                                   " reserved.\n"));
  return absl::OkStatus();
}

struct BlendCommand {
  std::string name;
  std::string source;
  BlendOptions options;
};

absl::Status Blend(const Context& context, const BlendCommand& command) {
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  const auto head = (*client)->GetHead(command.name);
  if (!head.ok()) return WithAdvice(head.status(), NotFoundAdvice(head.status()));
  const auto version = head->Blend(command.source, command.options);
  if (!version.ok()) return WithAdvice(version.status(), NotFoundAdvice(version.status()));
  context.Print({{"head", command.name}, {"source", command.source}, {"weight_version", *version}},
                absl::StrCat("Blended '", command.source, "' into '", command.name,
                             "': its weights are version ", *version, ".\n"));
  return absl::OkStatus();
}

void AddSourceVersionOption(CLI::App& command, uint64_t& version) {
  command
      .add_option("--source-version", version,
                  "Version that the weights must be of (default: whatever they are)")
      ->type_name("NUMBER");
}

}  // namespace

void AddHeadCopyCommand(CLI::App& head, Context& context) {
  auto options = std::make_shared<CopyCommand>();
  CLI::App* command = head.add_subcommand("copy", "Copy a head at the server");
  command->add_option("SOURCE", options->source, "Name of the head to copy")->required()->type_name("HEAD");
  command->add_option("NAME", options->name, "Name of the copy")->required()->type_name("NEW");
  command->add_flag("--frozen", options->options.frozen,
                    "The weights alone: a snapshot, which cannot be trained");
  command->add_flag("--master-weights", options->options.master_weights,
                    "With an fp32 master of 16-bit weights: for moving averages");
  AddSourceVersionOption(*command, options->options.source_version);
  AddCommonOptions(*command, context);
  command->footer(
      "Nothing is sent: the server copies the weights as they are between two batches. Without --frozen the\n"
      "copy has the optimizer's state too, and trains on as the source would; its window is empty.\n\n"
      "Examples:\n"
      "  lossctl head copy lm_head reference --frozen\n"
      "  lossctl head copy lm_head lm_head.ema --frozen --master-weights\n"
      "  lossctl head copy lm_head branch --source-version 900\n");
  command->callback(
      [&context, options] { context.run = [&context, options] { return Copy(context, *options); }; });
}

void AddHeadBlendCommand(CLI::App& head, Context& context) {
  auto options = std::make_shared<BlendCommand>();
  CLI::App* command = head.add_subcommand("blend", "Mix the weights of a head into another one's");
  command->add_option("NAME", options->name, "Name of the head that changes")->required()->type_name("HEAD");
  command->add_option("SOURCE", options->source, "Name of the head whose weights go into it")
      ->required()
      ->type_name("HEAD");
  command
      ->add_option("--decay", options->options.decay,
                   "What is kept: weights = decay * weights + (1 - decay) * those of SOURCE; 0 to 1")
      ->required()
      ->type_name("NUMBER");
  AddSourceVersionOption(*command, options->options.source_version);
  command
      ->add_option("--target-version", options->options.target_version,
                   "Version that the weights of NAME must be of (default: whatever they are)")
      ->type_name("NUMBER");
  AddCommonOptions(*command, context);
  command->footer(
      "Both heads are of the same sizes, type and scale, as a copy and its source are.\n\n"
      "Examples:\n"
      "  lossctl head blend lm_head.ema lm_head --decay 0.999\n"
      "  lossctl head blend lm_head.ema lm_head --decay 0.5 --target-version 12 --json | jq "
      ".weight_version\n");
  command->callback(
      [&context, options] { context.run = [&context, options] { return Blend(context, *options); }; });
}

}  // namespace lossd::tools
