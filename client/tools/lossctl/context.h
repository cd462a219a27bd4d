// What every command of lossctl shares: the options given before or after its name, the connection, how
// results and errors leave the program.
#ifndef LOSSD_CLIENT_TOOLS_LOSSCTL_CONTEXT_H_
#define LOSSD_CLIENT_TOOLS_LOSSCTL_CONTEXT_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "CLI/App.hpp"
#include "CLI/Validators.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/tools/connection_options.h"
#include "client/tools/progress_bar.h"
#include "lossd/client.h"
#include "nlohmann/json_fwd.hpp"

namespace lossd::tools {

struct Context {
  std::string server;
  std::optional<double> timeout_seconds;
  ConnectionOptions connection;
  bool json = false;
  // Set by the command that was parsed; main calls it.
  std::function<absl::Status()> run;

  absl::StatusOr<std::unique_ptr<Client>> Connect() const;
  // Prints the JSON under --json, else the text (which ends with a newline).
  void Print(const nlohmann::ordered_json& json_result, const std::string& text) const;
  // Progress lines would spoil the JSON error on standard error; a bar on a terminal erases itself.
  ProgressBar::Style progress_style() const;
};

// --server, --timeout, --json, those of TLS and of tokens, for the program itself and for each command, so
// that they may stand anywhere and every --help shows them.
void AddCommonOptions(CLI::App& app, Context& context);

// "float32" and so on, and the short "fp32", "bf16", "fp16"; normalised and checked while parsing.
CLI::Option* AddDtypeOption(CLI::App& app, std::string& dtype, const std::string& description);
std::optional<DataType> ParseDtype(const std::string& dtype);

// Checks of a value, with messages people can read.
CLI::Validator PositiveInteger();
CLI::Validator Seconds();

// 1234567 as "1,234,567".
std::string WithCommas(int64_t number);

// Each adds its command below `app`.
void AddStatusCommand(CLI::App& app, Context& context);
void AddHealthCommand(CLI::App& app, Context& context);
void AddMemoryCommand(CLI::App& app, Context& context);
void AddHeadCommand(CLI::App& app, Context& context);
void AddHeadCopyCommand(CLI::App& head, Context& context);
void AddHeadBlendCommand(CLI::App& head, Context& context);
void AddHeadLoadCommand(CLI::App& head, Context& context);
void AddHeadSaveCommand(CLI::App& head, Context& context);
void AddFlushCommand(CLI::App& app, Context& context);
void AddCheckpointCommand(CLI::App& app, Context& context);
void AddStepCommand(CLI::App& app, Context& context);
void AddGradientStatsCommand(CLI::App& app, Context& context);
void AddCompletionCommand(CLI::App& app, Context& context);

}  // namespace lossd::tools

#endif  // LOSSD_CLIENT_TOOLS_LOSSCTL_CONTEXT_H_
