// lossd-perf: puts load on a lossd server and says how it bears it.
//
// Results go to standard output, errors and progress to standard error.
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "client/tools/connection_options.h"
#include "client/tools/perf/comparison.h"
#include "client/tools/perf/report.h"
#include "client/tools/perf/run.h"
#include "client/tools/perf/server_process.h"
#include "client/tools/perf/settings.h"
#include "client/tools/perf/sweep.h"

namespace lossd::perf {
namespace {

std::atomic<bool> interrupted{false};

// The first signal ends the measurement early, with its report; a second one the program and its server.
void Interrupt(int signal_number) {
  if (interrupted.exchange(true)) {
    KillOwnServer();
    _exit(128 + signal_number);  // as shells have it
  }
}

enum class Format { kText, kJson };

std::string Text(const nlohmann::ordered_json& report) {
  return IsComparison(report) ? ComparisonText(report) : ReportText(report);
}

ExitCode RunOnce(const Settings& settings, Format format) {
  using Style = tools::ProgressBar::Style;
  Style style = tools::ProgressBar::StyleOfStderr();
  if (format == Format::kJson && style == Style::kLines) style = Style::kSilent;
  const Outcome outcome = settings.devices.empty() ? Run(settings, style, interrupted)
                                                   : RunOverDevices(settings, style, interrupted);
  if (!outcome.problem.empty()) {
    std::fprintf(stderr, "lossd-perf: %s\n", outcome.problem.c_str());
    return outcome.exit_code;
  }
  const std::string output = format == Format::kJson ? outcome.report.dump(2) + "\n" : Text(outcome.report);
  std::fputs(output.c_str(), stdout);
  return std::fflush(stdout) == 0 ? outcome.exit_code : ExitCode::kFailed;
}

std::string Footer() {
  return absl::StrCat(
      "Examples:\n"
      "  lossd-perf                                         # a server of its own, ten seconds of one "
      "client\n"
      "  lossd-perf --target=127.0.0.1:50051 --metrics=127.0.0.1:9464 --clients=4 --duration=30\n"
      "  lossd-perf --device=cuda:0 --tokens=16384 --vocab=131072 --hidden=4096\n"
      "  lossd-perf --devices=cuda:0,cuda:1 --replicas=2 --clients=64  # two servers with one head, beside "
      "one\n"
      "  lossd-perf --devices=cuda:0,cuda:1 --transport=shm # a server over two devices, beside one on the "
      "first\n"
      "  lossd-perf --rate=2 --clients=8                    # open loop: what 2 batches a second cost\n"
      "  lossd-perf --json | jq .latency_ms.p99\n"
      "  lossd-perf sweep --clients=1,2,4 --tokens=256,1024 --out=sweep\n\n"
      "The head is made for the run, filled with random weights, and deleted in the end. The first answer "
      "is\n"
      "checked before anything is measured; every later one must say the same as the first of its batch.\n"
      "Latency is that of a batch: from the moment it was due (open loop: its arrival, also where all\n"
      "clients were busy then) until its last dX is there. Ctrl-C ends a run early, with its report.\n\n",
      ExitCodesHelp());
}

ExitCode Main(int argc, char** argv) {
  tools::PrepareGrpc();
  std::signal(SIGINT, Interrupt);
  std::signal(SIGTERM, Interrupt);
  CLI::App app("Puts load on a lossd server, checks its answers, and reports throughput, latency and cost.",
               "lossd-perf");
  app.set_version_flag("--version", absl::StrCat("lossd-perf ", LOSSD_VERSION), "Print the version");
  app.footer(Footer());
  app.require_subcommand(0, 1);
  Settings settings;
  bool json = false;
  AddServerOptions(app, settings);
  AddDevicesOptions(app, settings);
  std::vector<Transport> transports;
  AddTransportOption(app, transports, *app.get_option("--target"))->expected(1);
  AddLoadOptions(app, settings);
  AddSizeOptions(app, settings);
  app.add_flag("--json", json, "Print the report as JSON");
  ExitCode exit_code = ExitCode::kOk;
  CLI::App& sweep = AddSweepCommand(app, interrupted, &exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? ExitCode::kOk : ExitCode::kUsage;
  }
  if (sweep.parsed()) return exit_code;
  if (!transports.empty()) settings.transport = transports.front();
  if (const std::string problem = Problem(settings); !problem.empty()) {
    std::fprintf(stderr, "lossd-perf: %s\n", problem.c_str());
    return ExitCode::kUsage;
  }
  return RunOnce(settings, json ? Format::kJson : Format::kText);
}

}  // namespace
}  // namespace lossd::perf

int main(int argc, char** argv) { return static_cast<int>(lossd::perf::Main(argc, argv)); }
