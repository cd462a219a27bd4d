// lossctl: looks after the heads of a lossd server from the command line.
//
// Results go to standard output, errors and progress to standard error. Nothing but a finished command prints
// a result.
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/strings/str_cat.h"
#include "client/tools/connection_options.h"
#include "client/tools/lossctl/context.h"
#include "client/tools/lossctl/errors.h"

namespace lossd::tools {
namespace {

std::string Environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

// Arguments are named for what they are; their types, which the completion needs, would only repeat it.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option_opts(const CLI::Option* option) const override {
    return option->get_positional() ? "" : CLI::Formatter::make_option_opts(option);
  }
};

void AddCommands(CLI::App& app, Context& context) {
  app.set_version_flag("--version", absl::StrCat("lossctl ", LOSSD_VERSION), "Print the version");
  app.require_subcommand(1);
  auto formatter = std::make_shared<HelpFormatter>();
  formatter->column_width(30);
  formatter->label("REQUIRED", "(required)");
  app.formatter(formatter);
  AddCommonOptions(app, context);
  AddStatusCommand(app, context);
  AddHealthCommand(app, context);
  AddMemoryCommand(app, context);
  AddHeadCommand(app, context);
  AddFlushCommand(app, context);
  AddCheckpointCommand(app, context);
  AddStepCommand(app, context);
  AddGradientStatsCommand(app, context);
  AddCompletionCommand(app, context);
  app.footer(absl::StrCat(
      "Examples:\n"
      "  lossctl status\n"
      "  lossctl head load lm_head model/ --create          # weights from safetensors, sharded or not\n"
      "  lossctl flush lm_head --out grad.safetensors       # the accumulated gradient\n"
      "  lossctl step lm_head --lr 1e-3                     # or have the server's optimizer consume it\n"
      "  LOSSD_SERVER=trainer-7:50051 lossctl memory --json\n\n",
      ExitCodesHelp()));
}

// Only asked when the command line could not be parsed.
bool WantsJson(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0) return true;
  }
  return false;
}

// "lossctl head create": as far as the command line could be followed.
std::string CommandReached(const CLI::App& app) {
  const auto parsed = app.get_subcommands();
  return absl::StrCat(app.get_name(),
                      parsed.empty() ? "" : absl::StrCat(" ", CommandReached(*parsed.back())));
}

// A mistyped command is left over, but CLI11 only says that one is missing.
std::string UsageMessage(const CLI::App& app, const CLI::ParseError& error) {
  const std::vector<std::string> left_over = app.remaining(/*recurse=*/true);
  const bool mistyped = !left_over.empty() && dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
  return mistyped ? absl::StrCat("unknown command or option '", left_over.front(), "'") : error.what();
}

ExitCode Fail(const std::string& message, ExitCode code) {
  std::fputs(message.c_str(), stderr);
  return code;
}

// Writes out the result. Fails if standard output does not take all of it.
ExitCode Finish(const Context& context) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return ExitCode::kOk;
  const int error = errno;  // of the write that failed, now or before
  const absl::Status status =
      absl::UnknownError(absl::StrCat("the command was done, but its result cannot be printed",
                                      error == 0 ? "" : absl::StrCat(": ", std::strerror(error))));
  return Fail(FormatError(status, context.json), ExitCodeOf(status));
}

ExitCode Main(int argc, char** argv) {
  // A file-size limit shall be an error that is told, not a death.
  std::signal(SIGXFSZ, SIG_IGN);
  PrepareGrpc();
  Context context;
  context.server = Environment("LOSSD_SERVER", "127.0.0.1:50051");
  context.connection.token_file = Environment("LOSSD_TOKEN_FILE", "");
  CLI::App app("Look after the heads of a lossd server.", "lossctl");
  AddCommands(app, context);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) {
      return app.exit(error) == 0 ? Finish(context) : ExitCode::kFailed;  // --help, --version
    }
    return Fail(FormatUsageError(UsageMessage(app, error), CommandReached(app), WantsJson(argc, argv)),
                ExitCode::kUsage);
  }
  if (absl::Status status = context.run(); !status.ok()) {
    return Fail(FormatError(status, context.json), ExitCodeOf(status));
  }
  return Finish(context);
}

}  // namespace
}  // namespace lossd::tools

int main(int argc, char** argv) { return static_cast<int>(lossd::tools::Main(argc, argv)); }
