#include "client/tools/perf/sweep.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/tools/perf/child_process.h"
#include "client/tools/perf/run.h"
#include "client/tools/perf/server_process.h"

namespace lossd::perf {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kLists[] = "Lists, of which every combination is measured";

enum class Plotting { kDraw, kLeaveOut };

struct SweepOptions {
  Settings settings;  // of every case, but for the lists
  std::vector<int64_t> clients = {1, 2, 4};
  std::vector<int64_t> tokens = {1024};
  std::vector<int64_t> chunk_bytes = {0};
  std::vector<int64_t> lanes = {0};
  std::vector<Transport> transports = {Transport::kTcp};
  std::string out;
  std::string python = "python3";
  Plotting plotting = Plotting::kDraw;
};

// Each case once with every value, side by side.
template <class T>
std::vector<Settings> Vary(const std::vector<Settings>& cases, T Settings::*field,
                           const std::vector<T>& values) {
  std::vector<Settings> varied;
  varied.reserve(cases.size() * values.size());
  for (const Settings& one : cases) {
    for (const T& value : values) {
      varied.push_back(one);
      varied.back().*field = value;
    }
  }
  return varied;
}

std::vector<Settings> CasesOf(const SweepOptions& options) {
  std::vector<Settings> cases = {options.settings};
  cases = Vary(cases, &Settings::transport, options.transports);
  cases = Vary(cases, &Settings::lanes, options.lanes);
  cases = Vary(cases, &Settings::chunk_bytes, options.chunk_bytes);
  cases = Vary(cases, &Settings::tokens, options.tokens);
  return Vary(cases, &Settings::clients, options.clients);
}

// Empty, or which file could not be written.
std::string WriteFiles(const Json& sweep, const std::string& folder) {
  for (const auto& [name, text] : {std::pair<const char*, std::string>{"/sweep.json", sweep.dump(2) + "\n"},
                                   {"/sweep.csv", SweepCsv(sweep)},
                                   {"/sweep.md", SweepMarkdown(sweep)}}) {
    std::ofstream file(folder + name, std::ios::binary | std::ios::trunc);
    file << text;
    if (!file.flush()) return folder + name;
  }
  return "";
}

// By the script beside this program. Whether it can is not the sweep's success or failure; it says why not.
void Plot(const SweepOptions& options) {
  const std::string script = BesideThisProgram("plot_perf.py");
  std::fflush(stdout);
  if (Succeeds({options.python, script, options.out}, ChildOutput::kShow)) return;
  std::printf("no plot; to draw it, with a Python that has matplotlib:\n    python3 %s %s\n", script.c_str(),
              options.out.c_str());
}

ExitCode Sweep(const SweepOptions& options, const std::string& command_line,
               const std::atomic<bool>& interrupted) {
  std::error_code error;
  std::filesystem::create_directories(options.out, error);
  if (error) {
    std::fprintf(stderr, "lossd-perf: cannot make %s: %s\n", options.out.c_str(), error.message().c_str());
    return ExitCode::kUsage;
  }
  const std::vector<Settings> cases = CasesOf(options);
  Json sweep = {{"command", command_line},
                {"time", absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone())},
                {"cases", Json::array()}};
  ExitCode exit_code = ExitCode::kOk;
  size_t measured = 0;
  for (size_t i = 0; i < cases.size() && !interrupted; ++i) {
    Outcome outcome = Run(cases[i], tools::ProgressBar::StyleOfStderr(), interrupted);
    if (outcome.exit_code != ExitCode::kOk && exit_code != ExitCode::kFailed) exit_code = outcome.exit_code;
    if (outcome.problem.empty()) {
      ++measured;
    } else {
      outcome.report = {{"settings", ToJson(cases[i])}, {"error", outcome.problem}};
    }
    std::fprintf(stderr, "[%zu/%zu] %s\n", i + 1, cases.size(), CaseLine(outcome.report).c_str());
    sweep["cases"].push_back(std::move(outcome.report));
    // After every case: a sweep that is cut short leaves what it had.
    if (const std::string file = WriteFiles(sweep, options.out); !file.empty()) {
      std::fprintf(stderr, "lossd-perf: cannot write %s\n", file.c_str());
      return ExitCode::kFailed;
    }
  }
  std::printf("%zu of %zu cases measured: %s/sweep.md, sweep.csv, sweep.json\n", measured, cases.size(),
              options.out.c_str());
  if (options.plotting == Plotting::kDraw && measured > 0) Plot(options);
  return exit_code;
}

CLI::Option* AddList(CLI::App& app, const std::string& name, std::vector<int64_t>& values, int64_t least,
                     const std::string& help) {
  return app.add_option(name, values, help)
      ->delimiter(',')
      ->check(CLI::Range(least, int64_t{1} << 40))
      ->capture_default_str()
      ->group(kLists);
}

std::string CommandLine(const CLI::App& command) {
  std::string line = "lossd-perf sweep";
  for (const CLI::Option* option : command.get_options()) {
    if (option->count() == 0) continue;
    absl::StrAppend(&line, " ", option->get_name());
    if (option->get_expected_min() > 0) absl::StrAppend(&line, "=", absl::StrJoin(option->results(), ","));
  }
  return line;
}

}  // namespace

CLI::App& AddSweepCommand(CLI::App& app, const std::atomic<bool>& interrupted, ExitCode* exit_code) {
  CLI::App& command = *app.add_subcommand("sweep",
                                          "Measures every combination of clients, tokens, chunk sizes and "
                                          "lanes and transports, each with a server of its own unless "
                                          "--target names one, and writes tables and a plot");
  const auto options = std::make_shared<SweepOptions>();
  AddList(command, "--clients", options->clients, 1, "Numbers of clients");
  AddList(command, "--tokens", options->tokens, 1, "Tokens of a batch");
  AddList(command, "--chunk_bytes", options->chunk_bytes, 0,
          "Hidden-state bytes of the largest chunks, as 4194304 or 4M; 0: what suits the server's device")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false));
  AddList(command, "--lanes", options->lanes, 0, "Connections of each client; 0: the client's choice");
  AddServerOptions(command, options->settings);
  AddTransportOption(command, options->transports, *command.get_option("--target"))
      ->delimiter(',')
      ->group(kLists);
  command.add_option("--out", options->out, "Folder for the results; made if it is not there")->required();
  command.add_option("--python", options->python, "Interpreter that draws the plot")->capture_default_str();
  command.add_flag_callback(
      "--no_plot", [options] { options->plotting = Plotting::kLeaveOut; }, "Draw nothing");
  AddLoadOptions(command, options->settings);
  command.footer(absl::StrCat(
      "Examples:\n"
      "  lossd-perf sweep --clients=1,2,4,8 --tokens=256,1024,4096 --duration=5 --out=sweep\n"
      "  lossd-perf sweep --transport=tcp,uds,tls --duration=5 --out=sweep\n"
      "  lossd-perf sweep --target=trainer-7:50051 --chunk_bytes=1M,4M,16M --out=sweep\n\n"
      "In the folder: sweep.json (each case as lossd-perf --json gives it), sweep.csv, sweep.md, and "
      "sweep.svg\n"
      "and sweep.png (by plot_perf.py, which needs Python with matplotlib).\n\n",
      ExitCodesHelp()));
  command.callback([&command, &interrupted, options, exit_code] {
    for (const Settings& one : CasesOf(*options)) {
      if (const std::string problem = Problem(one); !problem.empty()) throw CLI::ValidationError(problem);
    }
    *exit_code = Sweep(*options, CommandLine(command), interrupted);
  });
  return command;
}

}  // namespace lossd::perf
