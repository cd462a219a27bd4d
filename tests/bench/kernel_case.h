// One case of `lossd-bench kernels`: what is asked for, and what came out. Device-independent.
#ifndef LOSSD_TESTS_BENCH_KERNEL_CASE_H_
#define LOSSD_TESTS_BENCH_KERNEL_CASE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/data_type.h"

namespace lossd::bench {

struct KernelCase {
  int64_t tokens = 0;
  int64_t vocab = 0;
  int64_t hidden = 0;
  kernels::DataType dtype = kernels::DataType::kBFloat16;  // of weights, hidden states and dX
  int64_t workspace_bytes = 0;
  int64_t repetitions = 0;
  double lse_spread = 0;  // log-sum-exps of rows vary by up to this much; 0: by little
  int cuda_index = -1;    // of the device; negative: the CPU
  bool portable = false;  // on a GPU, the path that every GPU takes
  double ignored = 0;     // share of the rows that are ignored; on a GPU only
};

struct StageTime {
  std::string name;
  double milliseconds = 0;
};

struct RelativeErrors {
  double loss = 0;
  double dx = 0;
  double dw = 0;
};

struct KernelResult {
  std::string error;  // empty, or why there is no timing
  RelativeErrors relative_error;
  double tolerance = 0;           // of dx and dw
  double milliseconds = 0;        // median of the fused step
  double limit_milliseconds = 0;  // median of the fastest bare products
  // Median of the rounds' ratios: what disturbs one round, or a part of the run, does not count.
  double ratio = 0;
  std::string limit_kind;  // which products those were
  std::vector<double> all_milliseconds;
  std::vector<double> all_limit_milliseconds;
  int64_t peak_bytes = 0;  // memory the step took above inputs and outputs, as the system counts it
  int64_t tile_rows = 0;
  int64_t rows_redone = 0;
  int64_t checked_rows = 0;
  int64_t checked_vocabulary_rows = 0;
  std::string hardware;
  std::vector<StageTime> stages;  // on a GPU, of one step
};

// Called with a short text as a case goes on.
using Progress = std::function<void(const std::string&)>;

// Checks the fused step on the CPU against fp64, then times it against bare oneDNN products, in turns.
KernelResult RunCpuCase(const KernelCase& kernel_case, const Progress& progress);

// The same on a CUDA device against cuBLAS. Losses and dX of sampled rows and sampled rows of dW are checked.
KernelResult RunCudaCase(const KernelCase& kernel_case, const Progress& progress);

}  // namespace lossd::bench

#endif  // LOSSD_TESTS_BENCH_KERNEL_CASE_H_
