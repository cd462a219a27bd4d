// What the commands of lossd-bench share: options, exit codes, and running one case.
#ifndef LOSSD_BENCH_KERNELS_COMMAND_LINE_H_
#define LOSSD_BENCH_KERNELS_COMMAND_LINE_H_

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "bench/kernels/kernel_case.h"
#include "bench/kernels/optimizer_case.h"
#include "kernels/data_type.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::bench {

inline constexpr int kDone = 0;
inline constexpr int kFailed = 1;  // a result was wrong or a case could not run
inline constexpr int kBadArguments = 2;
inline constexpr char kExitCodes[] =
    "Exit codes: 0 done, 1 a result was wrong or a case could not run, 2 bad arguments.";

struct CaseOptions {
  std::string device = "cpu";
  std::vector<int64_t> tokens = {2048};
  std::vector<int64_t> vocab = {32768};
  std::vector<int64_t> hidden = {1024};
  std::vector<std::string> dtypes = {"bf16"};
  int64_t workspace_bytes = 0;
  int64_t repetitions = 7;
  double lse_spread = 0;
  double ignored = 0;
  kernels::LossOptions options;
  int64_t teacher_hidden = 0;
  kernels::Divergence divergence = kernels::Divergence::kForwardKl;
  bool returns = false;
  double entropy_gradient = 0;
  double zeros = 0;
  bool held = false;
  int64_t kept = 0;
  int64_t longest = 0;
  int64_t targets = 0;
  bool portable = false;
  bool fixed_segments = false;
};

// A step of an optimizer over a whole head.
struct OptimizerOptions {
  std::string optimizer = "adamw";
  std::string dtype = "bf16";
  bool no_master = false;
  int64_t vocab = 0;
  int64_t hidden = 0;
  int64_t repetitions = 9;
};

// cpu, or cuda:0 to cuda:9, here or elsewhere.
bool IsDevice(const std::string& name);
void AddDeviceOption(CLI::App& command, std::string& device);
void AddSizeOption(CLI::App& command, const std::string& name, std::vector<int64_t>& sizes,
                   const std::string& help);
void AddWorkspaceOption(CLI::App& command, int64_t& bytes);
void AddRepetitionsOption(CLI::App& command, int64_t& repetitions);
// All of CaseOptions.
void AddCaseOptions(CLI::App& command, CaseOptions& options);
// All of OptimizerOptions.
void AddOptimizerOptions(CLI::App& command, OptimizerOptions& options);

// Negative: the CPU.
int CudaIndex(const std::string& device);
// On this device; negative: the CPU.
OptimizerCase CaseOf(const OptimizerOptions& options, int cuda_index);
// Every combination, tokens fastest.
std::vector<KernelCase> Cases(const CaseOptions& options);
// fp32, bf16, fp16.
std::string ShortName(kernels::DataType type);
int64_t WorkspaceBytes(int64_t asked, int cuda_index);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_COMMAND_LINE_H_
