// lossctl checkpoint save | restore | list | delete
#include <memory>

#include "CLI/Option.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "client/tools/lossctl/context.h"
#include "client/tools/lossctl/errors.h"
#include "client/tools/lossctl/table.h"
#include "nlohmann/json.hpp"

namespace lossd::tools {
namespace {

struct CheckpointOptions {
  std::string head;
  std::string tag;
};

std::string TimeOf(const CheckpointInfo& info) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::FromChrono(info.saved_at), absl::UTCTimeZone());
}

nlohmann::ordered_json ToJson(const CheckpointInfo& info) {
  return {{"head", info.head},
          {"tag", info.tag},
          {"generation", info.generation},
          {"weight_version", info.weight_version},
          {"optimizer_steps", info.optimizer_steps},
          {"window_tokens", info.window_tokens},
          {"bytes", info.bytes},
          {"saved_at", TimeOf(info)}};
}

std::string Describe(const CheckpointInfo& info) {
  return absl::StrCat("generation ", info.generation, ", step ", info.optimizer_steps, ", ",
                      WithCommas(static_cast<int64_t>(info.window_tokens)), " tokens in the window, ",
                      FormatBytes(info.bytes));
}

std::string CheckpointAdvice(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kNotFound:
      return "'lossctl checkpoint list' and 'lossctl head list' show what there is";
    case absl::StatusCode::kResourceExhausted:
      return "what was there before is whole; make room in the server's --checkpoint_dir, or in its memory";
    case absl::StatusCode::kDataLoss:
      return "nothing has changed; 'lossctl checkpoint list' shows older ones";
    default:
      return "";
  }
}

absl::Status Save(const Context& context, const CheckpointOptions& options) {
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  auto head = (*client)->GetHead(options.head);
  if (!head.ok()) return WithAdvice(head.status(), CheckpointAdvice(head.status()));
  const auto saved = head->SaveCheckpoint(options.tag);
  if (!saved.ok()) return WithAdvice(saved.status(), CheckpointAdvice(saved.status()));
  nlohmann::ordered_json json = ToJson(saved->info);
  json["bytes_written"] = saved->bytes_written;
  json["deleted"] = saved->deleted;
  std::string text =
      absl::StrCat("Saved head '", options.head, "' as '", options.tag, "': ", Describe(saved->info), ", ",
                   FormatBytes(saved->bytes_written), " written.\n");
  if (!saved->deleted.empty()) {
    absl::StrAppend(&text, "  The server keeps no more of this prefix: deleted ",
                    absl::StrJoin(saved->deleted, ", "), ".\n");
  }
  context.Print(json, text);
  return absl::OkStatus();
}

absl::Status Delete(const Context& context, const CheckpointOptions& options) {
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  const auto deleted = (*client)->DeleteCheckpoint(options.head, options.tag);
  if (!deleted.ok()) {
    return WithAdvice(deleted.status(), absl::IsNotFound(deleted.status())
                                            ? "'lossctl checkpoint list' shows what there is"
                                            : "");
  }
  context.Print({{"head", options.head}, {"tag", options.tag}, {"bytes_freed", deleted->bytes_freed}},
                absl::StrCat("Deleted checkpoint '", options.tag, "' of head '", options.head, "': ",
                             FormatBytes(deleted->bytes_freed), " of the server's disk are free again.\n"));
  return absl::OkStatus();
}

absl::Status Restore(const Context& context, const CheckpointOptions& options) {
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  const auto restored = (*client)->RestoreCheckpoint(options.head, options.tag);
  if (!restored.ok()) return WithAdvice(restored.status(), CheckpointAdvice(restored.status()));
  context.Print(ToJson(*restored), absl::StrCat("Head '", options.head, "' is what '", restored->tag,
                                                "' is: ", Describe(*restored), ".\n"));
  return absl::OkStatus();
}

absl::Status List(const Context& context, const std::string& head) {
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  const auto all = (*client)->ListCheckpoints(head);
  if (!all.ok()) return all.status();
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  Table table({{"HEAD"},
               {"TAG"},
               {"SAVED AT"},
               {"GENERATION", Align::kRight},
               {"STEPS", Align::kRight},
               {"WINDOW TOKENS", Align::kRight},
               {"BYTES", Align::kRight}});
  for (const CheckpointInfo& info : *all) {
    json.push_back(ToJson(info));
    table.AddRow({info.head, info.tag, TimeOf(info), absl::StrCat(info.generation),
                  absl::StrCat(info.optimizer_steps), WithCommas(static_cast<int64_t>(info.window_tokens)),
                  FormatBytes(info.bytes)});
  }
  context.Print({{"checkpoints", json}},
                all->empty() ? "No checkpoints. Save one with 'lossctl checkpoint save'.\n" : table.Render());
  return absl::OkStatus();
}

void AddSaveCommand(CLI::App& checkpoint, Context& context) {
  auto options = std::make_shared<CheckpointOptions>();
  CLI::App* command = checkpoint.add_subcommand("save", "Save all that a head is, as of now");
  command->add_option("NAME", options->head, "Name of the head")->required()->type_name("HEAD");
  command->add_option("TAG", options->tag, "Name of the checkpoint; one of that name is replaced")
      ->required()
      ->type_name("TAG");
  AddCommonOptions(*command, context);
  command->footer(
      "Weights, optimizer, gradient window and sessions, in the server's --checkpoint_dir. What has not\n"
      "changed since the last one is shared with it.\n\n"
      "Examples:\n"
      "  lossctl checkpoint save lm_head step-1000\n");
  command->callback(
      [&context, options] { context.run = [&context, options] { return Save(context, *options); }; });
}

void AddRestoreCommand(CLI::App& checkpoint, Context& context) {
  auto options = std::make_shared<CheckpointOptions>();
  CLI::App* command = checkpoint.add_subcommand("restore", "Make a head what it was");
  command->add_option("NAME", options->head, "Name of the head, which is created if it is not there")
      ->required()
      ->type_name("HEAD");
  command->add_option("TAG", options->tag, "Name of the checkpoint (default: the newest)")->type_name("TAG");
  AddCommonOptions(*command, context);
  command->footer(
      "What trainers did since is undone; they are told so, and have to replay it. A damaged checkpoint\n"
      "changes nothing.\n\n"
      "Examples:\n"
      "  lossctl checkpoint restore lm_head step-1000\n"
      "  lossctl checkpoint restore lm_head\n");
  command->callback(
      [&context, options] { context.run = [&context, options] { return Restore(context, *options); }; });
}

void AddListCommand(CLI::App& checkpoint, Context& context) {
  auto head = std::make_shared<std::string>();
  CLI::App* command = checkpoint.add_subcommand("list", "List checkpoints, the newest first");
  command->add_option("NAME", *head, "Of this head alone")->type_name("HEAD");
  AddCommonOptions(*command, context);
  command->footer(
      "Examples:\n"
      "  lossctl checkpoint list\n"
      "  lossctl checkpoint list lm_head --json | jq -r '.checkpoints[0].tag'\n");
  command->callback([&context, head] { context.run = [&context, head] { return List(context, *head); }; });
}

void AddDeleteCommand(CLI::App& checkpoint, Context& context) {
  auto options = std::make_shared<CheckpointOptions>();
  CLI::App* command = checkpoint.add_subcommand("delete", "Delete a checkpoint for good");
  command->add_option("NAME", options->head, "Name of the head")->required()->type_name("HEAD");
  command->add_option("TAG", options->tag, "Name of the checkpoint")->required()->type_name("TAG");
  AddCommonOptions(*command, context);
  command->footer(
      "What other checkpoints share with it stays, and so does what is being saved or restored: the server\n"
      "waits for that first. It may be a damaged one, or of a head that is not there. lossd "
      "--checkpoint_keep\n"
      "does it by itself.\n\n"
      "Examples:\n"
      "  lossctl checkpoint delete lm_head step-1000\n");
  command->callback(
      [&context, options] { context.run = [&context, options] { return Delete(context, *options); }; });
}

}  // namespace

void AddCheckpointCommand(CLI::App& app, Context& context) {
  CLI::App* checkpoint =
      app.add_subcommand("checkpoint", "Save, restore, list and delete checkpoints of heads");
  checkpoint->require_subcommand(1);
  AddCommonOptions(*checkpoint, context);
  AddSaveCommand(*checkpoint, context);
  AddRestoreCommand(*checkpoint, context);
  AddListCommand(*checkpoint, context);
  AddDeleteCommand(*checkpoint, context);
  checkpoint->footer(
      "Examples:\n"
      "  lossctl checkpoint save lm_head step-1000\n"
      "  lossctl checkpoint list lm_head\n"
      "  lossctl checkpoint restore lm_head step-1000\n"
      "  lossctl checkpoint delete lm_head step-1000\n");
}

}  // namespace lossd::tools
