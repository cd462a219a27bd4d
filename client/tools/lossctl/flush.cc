// lossctl flush
#include <cmath>
#include <memory>

#include "CLI/Option.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/tools/lossctl/context.h"
#include "client/tools/lossctl/errors.h"
#include "client/tools/lossctl/head_info.h"
#include "nlohmann/json.hpp"

namespace lossd::tools {
namespace {

struct FlushCommandOptions {
  std::string name;
  std::string path;
  std::string dtype = "float32";
  bool abort = false;
  std::string flush_id;  // of the flush to abort; empty: whichever holds the window
};

std::string FlushAdvice(const absl::Status& status, const HeadConfig& head) {
  switch (status.code()) {
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kAborted:
      if (head.frozen) return "";
      return "is a trainer still sending, or flushing itself? nothing is lost: run it again when the step is "
             "done";
    case absl::StatusCode::kResourceExhausted:
      return "the window is whole and still accumulates: flush it again when there is room, or to another "
             "place";
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return "run it again: as long as the server lives, a flush that was cut goes on where it stood";
    default:
      return "";
  }
}

absl::Status Flush(const Context& context, const FlushCommandOptions& options) {
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  auto head = (*client)->GetHead(options.name);
  if (!head.ok()) return WithAdvice(head.status(), NotFoundAdvice(head.status()));
  auto info = head->Info();
  if (!info.ok()) return info.status();

  const DataType type = *ParseDtype(options.dtype);
  absl::StatusOr<FlushResult> result;
  {
    ProgressBar bar(absl::StrCat("flushing ", options.name), context.progress_style());
    FlushOptions flush_options;
    flush_options.dtype = type;
    flush_options.progress = [&bar](int64_t done, int64_t total) { bar.Update(done, total); };
    result = head->FlushToFile(flush_options, info->sessions, options.path);
  }
  if (!result.ok()) return WithAdvice(result.status(), FlushAdvice(result.status(), info->config));

  const int64_t bytes = result->rows * result->columns * SizeOf(type);
  std::string text = absl::StrCat(
      "Flushed generation ", result->generation, " of head '", options.name, "' to '", options.path,
      "': ", DescribeShape(result->rows, result->columns, type), ", ", FormatBytes(bytes), ".\n");
  absl::StrAppendFormat(&text, "  norm %.9g over %s tokens; generation %d begins.\n", result->norm,
                        WithCommas(static_cast<int64_t>(result->window_tokens)), result->generation + 1);
  if (head->config().bias) {
    absl::StrAppendFormat(&text, "  With the bias's gradient, norm %.9g.\n", result->bias_norm);
  }
  if (result->non_finite > 0) {
    absl::StrAppend(&text, "  WARNING: ", WithCommas(result->non_finite), " elements are NaN or infinite.\n");
  }
  nlohmann::ordered_json json = {
      {"head", options.name},
      {"file", options.path},
      {"tensor", "lm_head.weight.grad"},
      {"rows", result->rows},
      {"columns", result->columns},
      {"dtype", Name(type)},
      {"bytes", bytes},
      {"generation", result->generation},
      {"norm", nullptr},  // stays null if it is not finite: JSON has no such numbers
      {"window_tokens", result->window_tokens},
      {"non_finite", result->non_finite}};
  if (std::isfinite(result->norm)) json["norm"] = result->norm;
  if (head->config().bias) {
    json["bias_tensor"] = "lm_head.bias.grad";
    json["bias_norm"] = nullptr;
    if (std::isfinite(result->bias_norm)) json["bias_norm"] = result->bias_norm;
  }
  context.Print(json, text);
  return absl::OkStatus();
}

// The flush that holds the window. FAILED_PRECONDITION if none does.
absl::StatusOr<std::string> FlushThatHolds(const HeadInfo& head) {
  if (!head.flush_id.empty()) return head.flush_id;
  return WithAdvice(absl::FailedPreconditionError(
                        absl::StrCat("no flush holds the window of head '", head.config.name, "': it is ",
                                     Name(head.window_state), ", generation ", head.generation)),
                    head.window_state == WindowState::kFreezing
                        ? "a flush or a step waits for chunks that are under way; look again in a moment"
                        : "");
}

absl::Status Abort(const Context& context, const FlushCommandOptions& options) {
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  auto head = (*client)->GetHead(options.name);
  if (!head.ok()) return WithAdvice(head.status(), NotFoundAdvice(head.status()));
  std::string flush_id = options.flush_id;
  if (flush_id.empty()) {
    const auto before = head->Info();
    if (!before.ok()) return before.status();
    auto holding = FlushThatHolds(*before);
    if (!holding.ok()) return holding.status();
    flush_id = *std::move(holding);
  }
  if (absl::Status aborted = head->AbortFlush(flush_id); !aborted.ok()) {
    return WithAdvice(aborted,
                      absl::IsAborted(aborted)
                          ? "it was committed or aborted already; 'lossctl status' shows what there is"
                          : "");
  }
  const auto info = head->Info();
  if (!info.ok()) return info.status();
  context.Print(
      {{"head", options.name},
       {"flush_id", flush_id},
       {"aborted", true},
       {"generation", info->generation},
       {"window_tokens", info->window_tokens}},
      absl::StrCat("Aborted flush ", flush_id, " of head '", options.name, "'.\n  Generation ",
                   info->generation, " is open, with ", WithCommas(static_cast<int64_t>(info->window_tokens)),
                   " tokens: nothing of it was dropped. Whoever began the flush is told, and has to "
                   "begin another.\n"));
  return absl::OkStatus();
}

}  // namespace

void AddFlushCommand(CLI::App& app, Context& context) {
  auto options = std::make_shared<FlushCommandOptions>();
  CLI::App* command =
      app.add_subcommand("flush", "Write a head's accumulated gradient to a file and start anew");
  command->add_option("NAME", options->name, "Name of the head")->required()->type_name("HEAD");
  CLI::Option* out = command
                         ->add_option("--out", options->path,
                                      "File to write; it appears only when it is complete and on disk")
                         ->type_name("FILE");
  AddDtypeOption(*command, options->dtype, "Element type in the file (default: float32)");
  CLI::Option* abort = command->add_flag(
      "--abort", options->abort, "Instead: end a flush that holds the window, and open the window again");
  abort->excludes(out);
  command->add_option("--flush-id", options->flush_id, "Abort this flush only (default: the one there is)")
      ->needs(abort)
      ->type_name("ID");
  AddCommonOptions(*command, context);
  command->footer(
      "Everything accepted so far is in the file, exactly once; the window ends only when the file is safe.\n"
      "If anything fails, or lossctl is killed, nothing is lost: run the command again.\n\n"
      "--abort is for a flush whose client is gone: the window goes on as if it had not begun. A client "
      "that\n"
      "lives is told so when it commits, and must not use what it has read: flush again.\n\n"
      "Examples:\n"
      "  lossctl flush lm_head --out grad.safetensors\n"
      "  lossctl flush lm_head --out grad.safetensors --dtype bfloat16 --json | jq .norm\n"
      "  lossctl flush lm_head --abort\n");
  command->callback([&context, options] {
    if (!options->abort && options->path.empty()) throw CLI::RequiredError("--out FILE or --abort");
    context.run = [&context, options] {
      return options->abort ? Abort(context, *options) : Flush(context, *options);
    };
  });
}

}  // namespace lossd::tools
