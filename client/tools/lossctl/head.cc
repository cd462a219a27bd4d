// lossctl head create | list | delete
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

struct CreateOptions {
  std::string name;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  std::string dtype = "bfloat16";
  HeadOptions head;
};

absl::Status Create(const Context& context, const CreateOptions& options) {
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  auto head = (*client)->CreateHead(WithOptions({.name = options.name,
                                                 .vocab_size = options.vocab_size,
                                                 .hidden_size = options.hidden_size,
                                                 .weight_type = *ParseDtype(options.dtype)},
                                                options.head));
  if (!head.ok()) return WithAdvice(head.status(), CreateAdvice(head.status()));
  auto info = head->Info();
  if (!info.ok()) return info.status();
  const HeadConfig& config = info->config;
  std::string text = absl::StrCat(
      "Head '", config.name,
      "' is there: ", DescribeShape(config.vocab_size, config.hidden_size, config.weight_type),
      DescribeOptions(config, ", "), ", ", FormatBytes(TotalBytes(info->memory)), " reserved.\n");
  if (info->weight_version == 0) {
    absl::StrAppend(&text, "It has no weights yet: 'lossctl head load ", config.name,
                    " FILE.safetensors'.\n");
  }
  context.Print(HeadToJson(*info), text);
  return absl::OkStatus();
}

absl::Status List(const Context& context) {
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  auto heads = (*client)->ListHeads();
  if (!heads.ok()) return heads.status();
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const HeadInfo& head : *heads) json.push_back(HeadToJson(head));
  context.Print({{"heads", json}}, HeadsTable(*heads));
  return absl::OkStatus();
}

absl::Status Delete(const Context& context, const std::string& name, bool discard_gradient) {
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  absl::Status status = (*client)->DeleteHead(name, discard_gradient);
  if (absl::IsFailedPrecondition(status)) {
    return WithAdvice(status,
                      absl::StrCat("save the gradient with 'lossctl flush ", name,
                                   " --out FILE.safetensors', or give it up with --discard-gradient"));
  }
  if (!status.ok()) return WithAdvice(status, NotFoundAdvice(status));
  context.Print({{"deleted", name}}, absl::StrCat("Deleted head '", name, "'.\n"));
  return absl::OkStatus();
}

void AddCreateCommand(CLI::App& head, Context& context) {
  auto options = std::make_shared<CreateOptions>();
  CLI::App* command = head.add_subcommand("create", "Create a head without weights (or find it as it is)");
  command->add_option("NAME", options->name, "Name of the new head")->required()->type_name("NEW");
  command->add_option("--vocab", options->vocab_size, "Rows of the weight: the size of the vocabulary")
      ->required()
      ->type_name("V")
      ->check(PositiveInteger());
  command->add_option("--hidden", options->hidden_size, "Columns of the weight: the size of a hidden state")
      ->required()
      ->type_name("H")
      ->check(PositiveInteger());
  AddDtypeOption(*command, options->dtype, "Element type of the weight (default: bfloat16)");
  AddHeadOptions(*command, options->head);
  AddCommonOptions(*command, context);
  command->footer(
      "Reserves all the memory the head will ever need, or fails and says what is free. The same name with\n"
      "the same sizes and options is not an error, so that a script may run twice.\n\n"
      "Examples:\n"
      "  lossctl head create lm_head --vocab 131072 --hidden 4096\n"
      "  lossctl head create tiny --vocab 8192 --hidden 256 --dtype float32\n"
      "  lossctl head create gemma2 --vocab 256000 --hidden 2304 --softcap 30 --frozen\n");
  command->callback(
      [&context, options] { context.run = [&context, options] { return Create(context, *options); }; });
}

void AddListHeadsCommand(CLI::App& head, Context& context) {
  CLI::App* command = head.add_subcommand("list", "List the heads");
  AddCommonOptions(*command, context);
  command->footer(
      "Examples:\n"
      "  lossctl head list\n"
      "  lossctl head list --json | jq -r '.heads[] | select(.weight_version == 0) | .name'\n");
  command->callback([&context] { context.run = [&context] { return List(context); }; });
}

void AddDeleteHeadCommand(CLI::App& head, Context& context) {
  struct Options {
    std::string name;
    bool discard_gradient = false;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = head.add_subcommand("delete", "Delete a head and free its memory");
  command->add_option("NAME", options->name, "Name of the head")->required()->type_name("HEAD");
  command->add_flag("--discard-gradient", options->discard_gradient,
                    "Delete it even if gradients were accumulated that nobody flushed");
  AddCommonOptions(*command, context);
  command->footer(
      "Examples:\n"
      "  lossctl head delete lm_head\n"
      "  lossctl head delete lm_head --discard-gradient\n");
  command->callback([&context, options] {
    context.run = [&context, options] { return Delete(context, options->name, options->discard_gradient); };
  });
}

absl::Status Park(const Context& context, const std::string& name) {
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  const auto parked = (*client)->ParkHead(name);
  if (absl::IsNotFound(parked.status())) return WithAdvice(parked.status(), NotFoundAdvice(parked.status()));
  if (!parked.ok()) return parked.status();
  context.Print(HeadToJson(*parked),
                absl::StrCat("Parked head '", name, "': it takes ", FormatBytes(parked->parked_bytes),
                             " of the host's memory, and none of the device's, until somebody uses it.\n"));
  return absl::OkStatus();
}

void AddParkHeadCommand(CLI::App& head, Context& context) {
  auto name = std::make_shared<std::string>();
  CLI::App* command = head.add_subcommand("park", "Put a head aside in the host's memory until it is used");
  command->add_option("NAME", *name, "Name of the head")->required()->type_name("HEAD");
  AddCommonOptions(*command, context);
  command->footer(
      "Frees what the head has of the device. Nothing of it is lost, and it comes back by itself when a\n"
      "session is opened, or its weights are read, or anything else wants it. It must have no open "
      "sessions,\n"
      "and the server room for it (lossd --parking_bytes).\n\n"
      "Examples:\n"
      "  lossctl head park reference\n"
      "  lossctl head list --json | jq '.heads[] | select(.parked_bytes > 0) | .name'\n");
  command->callback([&context, name] { context.run = [&context, name] { return Park(context, *name); }; });
}

}  // namespace

void AddHeadCommand(CLI::App& app, Context& context) {
  CLI::App* head = app.add_subcommand("head", "Create, list, delete, copy, blend, park, load and save heads");
  head->require_subcommand(1);
  AddCommonOptions(*head, context);
  AddCreateCommand(*head, context);
  AddListHeadsCommand(*head, context);
  AddDeleteHeadCommand(*head, context);
  AddHeadCopyCommand(*head, context);
  AddHeadBlendCommand(*head, context);
  AddParkHeadCommand(*head, context);
  AddHeadLoadCommand(*head, context);
  AddHeadSaveCommand(*head, context);
  head->footer("'lossctl head COMMAND --help' shows what a command takes, with examples.\n");
}

}  // namespace lossd::tools
