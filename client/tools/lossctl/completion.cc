// lossctl completion, and the description of the commands that the scripts are made from.
#include "client/tools/lossctl/completion.h"

#include <memory>

#include "CLI/Option.hpp"
#include "CLI/Validators.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "client/tools/lossctl/context.h"
#include "nlohmann/json.hpp"

namespace lossd::tools {
namespace {

// The type name says what a value is: "FILE", "HEAD", or "TEXT:{a,b}" where a check allows only these.
CompletionValue DescribeValue(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  const size_t open = type.find('{');
  const size_t close = type.rfind('}');
  if (open != std::string::npos && close != std::string::npos && open < close) {
    return {.kind = ValueKind::kChoice,
            .choices = absl::StrSplit(type.substr(open + 1, close - open - 1), ',', absl::SkipWhitespace())};
  }
  if (type == "FILE" || type == "PATH") return {.kind = ValueKind::kFile};
  if (type == "HEAD") return {.kind = ValueKind::kHead};
  return {};
}

CompletionCommand Describe(const CLI::App& app, const std::string& path) {
  CompletionCommand command{.path = path, .name = app.get_name(), .description = app.get_description()};
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_positional()) {
      command.positionals.push_back(DescribeValue(*option));
      continue;
    }
    CompletionOption described{.description = option->get_description(),
                               .takes_value = option->get_items_expected_max() > 0,
                               .value = DescribeValue(*option)};
    for (const std::string& name : option->get_lnames()) described.names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) described.names.push_back("-" + name);
    command.options.push_back(std::move(described));
  }
  for (const CLI::App* subcommand : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (subcommand->get_group().empty()) continue;
    command.subcommands.push_back(Describe(*subcommand, absl::StrCat(path, " ", subcommand->get_name())));
  }
  return command;
}

void Collect(const CompletionCommand& command, std::vector<const CompletionCommand*>& all) {
  all.push_back(&command);
  for (const CompletionCommand& subcommand : command.subcommands) Collect(subcommand, all);
}

absl::Status PrintScript(const Context& context, const CLI::App& app, const std::string& shell) {
  const CompletionCommand root = DescribeCommands(app);
  const std::string script = shell == "bash"  ? BashCompletion(root)
                             : shell == "zsh" ? ZshCompletion(root)
                                              : FishCompletion(root);
  context.Print({{"shell", shell}, {"script", script}}, script);
  return absl::OkStatus();
}

// What the scripts call for the names of heads: quick, and silent if there is no server.
absl::Status PrintHeadNames(Context& context) {
  context.timeout_seconds = context.timeout_seconds.value_or(1.0);
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  auto heads = (*client)->ListHeads();
  if (!heads.ok()) return heads.status();
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  std::string text;
  for (const HeadInfo& head : *heads) {
    json.push_back(head.config.name);
    absl::StrAppend(&text, head.config.name, "\n");
  }
  context.Print(json, text);
  return absl::OkStatus();
}

}  // namespace

CompletionCommand DescribeCommands(const CLI::App& app) { return Describe(app, app.get_name()); }

std::vector<const CompletionCommand*> AllCommands(const CompletionCommand& root) {
  std::vector<const CompletionCommand*> all;
  Collect(root, all);
  return all;
}

std::string ShellQuote(const std::string& text) {
  return absl::StrCat("'", absl::StrReplaceAll(text, {{"'", "'\\''"}}), "'");
}

void AddCompletionCommand(CLI::App& app, Context& context) {
  auto shell = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("completion", "Print a completion script for a shell");
  command->add_option("SHELL", *shell, "bash, zsh or fish")
      ->required()
      ->type_name("SHELL")
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  command->add_flag("--json", context.json, "Print JSON")->group("Common options");
  command->footer(
      "Examples:\n"
      "  source <(lossctl completion bash)      # this shell only; for all, put the line into ~/.bashrc\n"
      "  source <(lossctl completion zsh)       # behind compinit in ~/.zshrc\n"
      "  lossctl completion fish > ~/.config/fish/completions/lossctl.fish\n");
  command->callback([&app, &context, shell] {
    context.run = [&app, &context, shell] { return PrintScript(context, app, *shell); };
  });

  CLI::App* names = app.add_subcommand("__heads", "Print the names of heads")->group("");
  AddCommonOptions(*names, context);
  names->callback([&context] { context.run = [&context] { return PrintHeadNames(context); }; });
}

}  // namespace lossd::tools
