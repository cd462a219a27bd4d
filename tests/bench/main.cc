// lossd-bench: checks the kernels and times them against their limit. Exit codes: 0 done, 1 a result was
// wrong or a case could not run, 2 bad arguments.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/bench/kernel_case.h"

namespace lossd::bench {
namespace {

using kernels::DataType;

constexpr int kWrongResult = 1;
constexpr int kBadArguments = 2;

struct Options {
  std::string device = "cpu";
  std::vector<int64_t> tokens = {2048};
  std::vector<int64_t> vocab = {32768};
  std::vector<int64_t> hidden = {1024};
  std::vector<std::string> dtypes = {"bf16"};
  int64_t workspace_bytes = 0;
  int64_t repetitions = 7;
  double lse_spread = 0;
  double ignored = 0;
  bool portable = false;
  bool json = false;
};

const char kDescription[] =
    "Times the fused linear + cross-entropy step (losses, dX and dW += of one batch) and compares it with "
    "its limit: the "
    "three matrix products that any implementation needs, bare, on the whole batch, in the same run and in "
    "turns. "
    "The result is checked against fp64 first: every loss, and dX and dW of sampled rows.";

const char kFooter[] =
    "Examples:\n"
    "  lossd-bench kernels                                        one case, as a table\n"
    "  lossd-bench kernels --dtype=all --json                     for scripts\n"
    "  lossd-bench kernels --tokens=1,64,512,4096 --hidden=512    how it scales with the batch\n"
    "  lossd-bench kernels --device=cuda:0 --tokens=16384 --vocab=131072 --hidden=4096   on a GPU\n"
    "  lossd-bench kernels --workspace_bytes=67108864             in small tiles of rows\n"
    "  lossd-bench kernels --lse_spread=100                       rows whose log-sum-exps differ by up to "
    "100\n"
    "\nTimes are medians; the ratio is the median of each round's own ratio. Run it on a quiet machine.\n"
    "Exit codes: 0 done, 1 a result was wrong or a case could not run, 2 bad arguments.";

bool IsDevice(const std::string& name) {
  const std::string prefix = "cuda:";
  if (name == "cpu") return true;
  return name.size() == prefix.size() + 1 && name.rfind(prefix, 0) == 0 && name.back() >= '0' &&
         name.back() <= '9';
}

void AddOptions(CLI::App& command, Options& options) {
  const CLI::Range size(int64_t{1}, int64_t{1} << 40);
  command.add_option("--device", options.device, "Where to run")
      ->check(CLI::Validator(
          [](const std::string& name) {
            return IsDevice(name) ? std::string() : "'" + name + "' must be cpu or cuda:N";
          },
          "cpu|cuda:N"))
      ->capture_default_str();
  command.add_option("--tokens", options.tokens, "Rows of a batch; several values make several cases")
      ->delimiter(',')
      ->check(size)
      ->capture_default_str();
  command.add_option("--vocab", options.vocab, "Vocabulary size")
      ->delimiter(',')
      ->check(size)
      ->capture_default_str();
  command.add_option("--hidden", options.hidden, "Hidden size")
      ->delimiter(',')
      ->check(size)
      ->capture_default_str();
  command
      .add_option("--dtype", options.dtypes, "Type of weights, hidden states and dX: fp32, bf16, fp16 or all")
      ->delimiter(',')
      ->check(CLI::IsMember({"fp32", "bf16", "fp16", "all"}))
      ->capture_default_str();
  command
      .add_option("--workspace_bytes", options.workspace_bytes,
                  "Ceiling of the step's workspace; 0: 512 MiB on the CPU, 1.25 GiB on a GPU")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))
      ->capture_default_str();
  command.add_option("--repetitions", options.repetitions, "Timed rounds; medians are reported")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command.add_option("--lse_spread", options.lse_spread, "Largest difference between rows' log-sum-exps")
      ->check(CLI::Range(0.0, 1000.0))
      ->capture_default_str();
  command.add_option("--ignored", options.ignored, "Share of the rows that are ignored (GPU only)")
      ->check(CLI::Range(0.0, 0.99))
      ->capture_default_str();
  command.add_flag("--portable", options.portable, "On a GPU, take the path that every GPU takes");
  command.add_flag("--json", options.json, "Print JSON instead of a table");
}

std::vector<KernelCase> Cases(const Options& options) {
  const std::map<std::string, std::vector<DataType>> types = {
      {"fp32", {DataType::kFloat32}},
      {"bf16", {DataType::kBFloat16}},
      {"fp16", {DataType::kFloat16}},
      {"all", {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}}};
  const int cuda_index = options.device == "cpu" ? -1 : options.device.back() - '0';
  const int64_t workspace_bytes = options.workspace_bytes != 0 ? options.workspace_bytes
                                  : cuda_index < 0             ? int64_t{512} << 20
                                                               : int64_t{5} << 28;
  std::vector<KernelCase> cases;
  for (const std::string& name : options.dtypes) {
    for (const DataType dtype : types.at(name)) {
      for (const int64_t hidden : options.hidden) {
        for (const int64_t vocab : options.vocab) {
          for (const int64_t tokens : options.tokens) {
            cases.push_back({.tokens = tokens,
                             .vocab = vocab,
                             .hidden = hidden,
                             .dtype = dtype,
                             .workspace_bytes = workspace_bytes,
                             .repetitions = options.repetitions,
                             .lse_spread = options.lse_spread,
                             .cuda_index = cuda_index,
                             .portable = options.portable,
                             .ignored = options.ignored});
          }
        }
      }
    }
  }
  return cases;
}

std::string ShortName(DataType type) {
  return type == DataType::kFloat32 ? "fp32" : type == DataType::kBFloat16 ? "bf16" : "fp16";
}

KernelResult RunCase(const KernelCase& kernel_case, const Progress& progress) {
  if (kernel_case.cuda_index < 0) return RunCpuCase(kernel_case, progress);
#ifdef LOSSD_CUDA
  return RunCudaCase(kernel_case, progress);
#else
  KernelResult result;
  result.error = "this lossd-bench was built without CUDA (no CUDA toolkit was found)";
  return result;
#endif
}

nlohmann::ordered_json ToJson(const KernelCase& c, const KernelResult& r) {
  nlohmann::ordered_json json = {
      {"tokens", c.tokens},
      {"vocab", c.vocab},
      {"hidden", c.hidden},
      {"dtype", ShortName(c.dtype)},
      {"milliseconds", r.milliseconds},
      {"limit_milliseconds", r.limit_milliseconds},
      {"ratio", r.ratio},
      {"peak_bytes", r.peak_bytes},
      {"relative_error",
       {{"loss", r.relative_error.loss}, {"dx", r.relative_error.dx}, {"dw", r.relative_error.dw}}},
      {"limit", r.limit_kind},
      {"workspace_bytes", c.workspace_bytes},
      {"tile_rows", r.tile_rows},
      {"rows_redone", r.rows_redone},
      {"checked",
       {{"losses", c.tokens}, {"dx_rows", r.checked_rows}, {"dw_rows", r.checked_vocabulary_rows}}},
      {"all_milliseconds", r.all_milliseconds},
      {"all_limit_milliseconds", r.all_limit_milliseconds},
      {"hardware", r.hardware}};
  if (!r.stages.empty()) {
    const double operations =
        6.0 * static_cast<double>(c.tokens) * static_cast<double>(c.vocab) * static_cast<double>(c.hidden);
    json["tflops"] = operations / r.milliseconds * 1e-9;
    for (const StageTime& stage : r.stages) json["stages_milliseconds"][stage.name] = stage.milliseconds;
  }
  if (!r.error.empty()) json["error"] = r.error;
  return json;
}

void PrintTable(const std::vector<KernelCase>& cases, const std::vector<KernelResult>& results) {
  std::printf("%8s %8s %7s %6s %11s %11s %7s %10s %9s %9s %9s  %s\n", "tokens", "vocab", "hidden", "dtype",
              "fused ms", "limit ms", "ratio", "peak MiB", "err loss", "err dx", "err dw", "limit");
  for (size_t i = 0; i < cases.size(); ++i) {
    const KernelCase& c = cases[i];
    const KernelResult& r = results[i];
    std::printf("%8lld %8lld %7lld %6s %11.1f %11.1f %7.3f %10.1f %9.1e %9.1e %9.1e  %s\n",
                static_cast<long long>(c.tokens), static_cast<long long>(c.vocab),
                static_cast<long long>(c.hidden), ShortName(c.dtype).c_str(), r.milliseconds,
                r.limit_milliseconds, r.ratio, static_cast<double>(r.peak_bytes) / (1 << 20),
                r.relative_error.loss, r.relative_error.dx, r.relative_error.dw,
                r.error.empty() ? r.limit_kind.c_str() : r.error.c_str());
  }
}

int RunKernels(const Options& options) {
  const std::vector<KernelCase> cases = Cases(options);
  std::vector<KernelResult> results;
  bool all_right = true;
  for (size_t i = 0; i < cases.size(); ++i) {
    results.push_back(RunCase(cases[i], [&](const std::string& what) {
      std::fprintf(stderr, "case %zu of %zu: %s\n", i + 1, cases.size(), what.c_str());
    }));
    if (results.back().error.empty()) continue;
    all_right = false;
    std::fprintf(stderr, "case %zu of %zu: %s\n", i + 1, cases.size(), results.back().error.c_str());
  }
  if (options.json) {
    nlohmann::ordered_json json = {{"cases", nlohmann::ordered_json::array()}};
    for (size_t i = 0; i < cases.size(); ++i) json["cases"].push_back(ToJson(cases[i], results[i]));
    std::printf("%s\n", json.dump(2).c_str());
  } else {
    PrintTable(cases, results);
  }
  return all_right ? 0 : kWrongResult;
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Measures lossd against its limits.", "lossd-bench");
  app.require_subcommand(1);
  CLI::App* const command = app.add_subcommand("kernels", kDescription);
  command->footer(kFooter);
  AddOptions(*command, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kBadArguments;
  }
  return RunKernels(options);
}

}  // namespace
}  // namespace lossd::bench

int main(int argc, char** argv) { return lossd::bench::Main(argc, argv); }
