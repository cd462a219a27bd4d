#include "bench/kernels/commands/sweep_command.h"

#include <array>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/kernels/child_process.h"
#include "bench/kernels/command_line.h"
#include "bench/kernels/sweep_report.h"

namespace lossd::bench {
namespace {

using Json = nlohmann::ordered_json;

struct SweepOptions {
  CaseOptions cases;
  std::string preset;
  std::string out;
  std::string python = "python3";
  int64_t timeout_s = 600;
  bool no_plot = false;
};

const char kSweepDescription[] =
    "Runs `kernels` over every combination of the sizes given, or over a preset, and writes a table, a CSV "
    "file, JSON and "
    "a plot. Each size is checked and timed in a process of its own: one that fails, is too large or takes "
    "too long is a "
    "line that says so, and the others go on.";

const char kSweepFooter[] =
    "Examples:\n"
    "  lossd-bench sweep --device=cuda:0 --preset=issue --out=results\n"
    "  lossd-bench sweep --device=cuda:0 --preset=models --repetitions=5 --out=results\n"
    "  lossd-bench sweep --tokens=64,512,4096 --vocab=32768 --hidden=512,1024 --out=results\n"
    "\nPresets: issue, the five sizes for which docs/performance.md has bars; models, heads of well-known "
    "models at 8192 "
    "tokens.\n"
    "In the folder: sweep.json (each case as `kernels --json` gives it), sweep.csv, sweep.md, sweep.log "
    "(what the cases "
    "wrote to standard error), sweep.svg and sweep.png (by plot_sweep.py, which needs Python with "
    "matplotlib).\n";

struct NamedShape {
  const char* preset;
  const char* name;
  int64_t tokens;
  int64_t vocab;
  int64_t hidden;
};

constexpr std::array kPresets = {
    NamedShape{"issue", "", 16384, 131072, 4096},
    NamedShape{"issue", "", 16384, 131072, 2048},
    NamedShape{"issue", "", 8192, 262144, 2304},
    NamedShape{"issue", "", 16384, 32000, 4096},
    NamedShape{"issue", "", 2048, 128256, 4096},
    NamedShape{"models", "GPT-2", 8192, 50257, 768},
    NamedShape{"models", "Llama 2 7B", 8192, 32000, 4096},
    NamedShape{"models", "Llama 3.2 1B", 8192, 128256, 2048},
    NamedShape{"models", "Llama 3.1 8B", 8192, 128256, 4096},
    NamedShape{"models", "Llama 3.1 70B", 8192, 128256, 8192},
    NamedShape{"models", "Mistral NeMo 12B", 8192, 131072, 5120},
    NamedShape{"models", "Qwen2.5 7B", 8192, 152064, 3584},
    NamedShape{"models", "Gemma 2 2B", 8192, 256000, 2304},
    NamedShape{"models", "DeepSeek-V3", 8192, 129280, 7168},
};

struct NamedCase {
  std::string name;
  KernelCase kernel_case;
};

std::vector<NamedCase> CasesOf(const SweepOptions& options) {
  std::vector<NamedCase> cases;
  const auto add = [&](const CaseOptions& of, const char* name) {
    for (const KernelCase& one : Cases(of)) cases.push_back({name, one});
  };
  if (options.preset.empty()) add(options.cases, "");
  for (const NamedShape& shape : kPresets) {
    if (options.preset != shape.preset) continue;
    CaseOptions one = options.cases;
    one.tokens = {shape.tokens};
    one.vocab = {shape.vocab};
    one.hidden = {shape.hidden};
    add(one, shape.name);
  }
  return cases;
}

std::vector<std::string> Command(const CaseOptions& options, const KernelCase& one) {
  std::vector<std::string> command = {OwnPath(),
                                      "kernels",
                                      "--json",
                                      "--device=" + options.device,
                                      "--tokens=" + std::to_string(one.tokens),
                                      "--vocab=" + std::to_string(one.vocab),
                                      "--hidden=" + std::to_string(one.hidden),
                                      "--dtype=" + ShortName(one.dtype),
                                      "--workspace_bytes=" + std::to_string(one.workspace_bytes),
                                      "--repetitions=" + std::to_string(one.repetitions),
                                      "--lse_spread=" + std::to_string(one.lse_spread),
                                      "--ignored=" + std::to_string(one.ignored)};
  if (one.portable) command.emplace_back("--portable");
  if (one.segments == kernels::Segments::kFixed) command.emplace_back("--fixed_segments");
  return command;
}

// The case as the child printed it, or its sizes and what went wrong.
Json RunCase(const SweepOptions& options, const KernelCase& one) {
  const ChildResult child = RunChild(Command(options.cases, one), options.out + "/sweep.log",
                                     std::chrono::seconds(options.timeout_s));
  const Json answer = Json::parse(child.output, nullptr, false);
  if (child.problem.empty() && !answer.is_discarded() && answer.contains("cases")) {
    return answer["cases"].at(0);
  }
  const std::string exit = "exit status " + std::to_string(child.exit_status) + "; sweep.log may say why";
  return {{"tokens", one.tokens},
          {"vocab", one.vocab},
          {"hidden", one.hidden},
          {"dtype", ShortName(one.dtype)},
          {"error", child.problem.empty() ? exit : child.problem}};
}

std::string Now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  std::array<char, 32> text{};
  (void)std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text.data();
}

// By the script beside this program. Whether it can is not the sweep's success or failure.
void Plot(const SweepOptions& options) {
  const std::string script = std::filesystem::path(OwnPath()).replace_filename("plot_sweep.py").string();
  const std::vector<std::string> command = {options.python, script, options.out};
  const ChildResult child = RunChild(command, options.out + "/sweep.log", std::chrono::seconds(120));
  if (child.exit_status == 0) {
    std::fputs(child.output.c_str(), stdout);
    return;
  }
  std::printf("no plot: %s\nto draw it, with a Python that has matplotlib:\n    python3 %s %s\n",
              child.problem.empty() ? "the last lines of sweep.log say why" : child.problem.c_str(),
              script.c_str(), options.out.c_str());
}

int RunSweep(const SweepOptions& options, const std::string& command_line) {
  std::error_code error;
  std::filesystem::create_directories(options.out, error);
  if (error) {
    std::fprintf(stderr, "cannot make %s: %s\n", options.out.c_str(), error.message().c_str());
    return kBadArguments;
  }
  const std::vector<NamedCase> cases = CasesOf(options);
  Json sweep = {{"command", command_line}, {"time", Now()}, {"cases", Json::array()}};
  size_t failed = 0;
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto began = std::chrono::steady_clock::now();
    Json one = RunCase(options, cases[i].kernel_case);
    if (!cases[i].name.empty()) one["name"] = cases[i].name;
    if (one.contains("error")) ++failed;
    const auto took = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    std::fprintf(stderr, "[%zu/%zu, %.0f s] %s\n", i + 1, cases.size(), took, CaseLine(one).c_str());
    sweep["cases"].push_back(std::move(one));
    // After every case: a sweep that is cut short leaves what it had.
    if (const std::string file = WriteReports(sweep, options.out); !file.empty()) {
      std::fprintf(stderr, "cannot write %s\n", file.c_str());
      return kFailed;
    }
  }
  std::printf("%zu of %zu cases done: %s/sweep.md, sweep.csv, sweep.json\n", cases.size() - failed,
              cases.size(), options.out.c_str());
  if (!options.no_plot && failed < cases.size()) Plot(options);
  return failed == 0 ? kDone : kFailed;
}

}  // namespace

void AddSweepCommand(CLI::App& app, int* exit_code) {
  CLI::App& command = *app.add_subcommand("sweep", kSweepDescription);
  command.footer(std::string(kSweepFooter) + kExitCodes);
  const auto options = std::make_shared<SweepOptions>();
  AddCaseOptions(command, options->cases);
  CLI::Option* const preset =
      command.add_option("--preset", options->preset, "Sizes by name instead of lists")
          ->check(CLI::IsMember({"issue", "models"}));
  for (const char* sizes : {"--tokens", "--vocab", "--hidden"}) preset->excludes(sizes);
  command.add_option("--out", options->out, "Folder for the results; made if it is not there")->required();
  command.add_option("--timeout", options->timeout_s, "Seconds that one case may take")
      ->check(CLI::Range(1, 86400))
      ->capture_default_str();
  command.add_option("--python", options->python, "Interpreter that draws the plot")->capture_default_str();
  command.add_flag("--no_plot", options->no_plot, "Draw nothing");
  command.callback([&command, options, exit_code] {
    std::string line = "lossd-bench sweep";
    for (const CLI::Option* option : command.get_options()) {
      if (option->count() == 0) continue;
      const std::string values = CLI::detail::join(option->results(), ",");
      line += " " + option->get_name() + (option->get_expected_min() == 0 ? "" : "=" + values);
    }
    *exit_code = RunSweep(*options, line);
  });
}

}  // namespace lossd::bench
