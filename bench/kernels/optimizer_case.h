// One step of the optimizer over a head's weights: checked, and timed against a copy of as many bytes.
#ifndef LOSSD_BENCH_KERNELS_OPTIMIZER_CASE_H_
#define LOSSD_BENCH_KERNELS_OPTIMIZER_CASE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/data_type.h"
#include "kernels/optimizer.h"

namespace lossd::bench {

struct OptimizerCase {
  int64_t vocab = 0;
  int64_t hidden = 0;
  kernels::DataType dtype = kernels::DataType::kBFloat16;
  bool master = true;  // of 16-bit weights
  kernels::OptimizerArguments arguments = {};
  int64_t repetitions = 0;
  int cuda_index = -1;  // negative: the CPU

  int64_t elements() const { return vocab * hidden; }
  bool has_master() const { return master && dtype != kernels::DataType::kFloat32; }
  // What an element of each has to be read and written: gradient, weights, moments.
  int64_t step_bytes() const;
  int64_t tally_bytes() const { return elements() * 4; }
};

struct OptimizerResult {
  std::string error;       // empty, or what was wrong
  int64_t checked = 0;     // elements whose bits were compared
  double norm_error = 0;   // relative, of the gradient's norm
  double step_ms = 0;      // medians
  double copy_ms = 0;      // of a copy of copy_bytes
  double tally_ms = 0;     // of the gradient's norm alone
  int64_t copy_bytes = 0;  // read and written
  // Median over the rounds of the step's time over what its bytes take at the copy's bandwidth.
  double ratio = 0;
  std::string hardware;
};

// The step that is checked: not the first, so that every coefficient counts.
inline constexpr int64_t kCheckedStep = 3;
// Deviations of what steps work on.
inline constexpr float kWeightDeviation = 0.02f;
inline constexpr float kGradientDeviation = 1e-3f;

// Some elements of everything that a step works on, on the host: what the kernels of the CPU make of them is
// what any device has to make of them, bit for bit.
struct OptimizerSample {
  std::vector<float> gradient, master, first, second;
  std::vector<char> weight;

  OptimizerSample(int64_t count, const OptimizerCase& of);
  void Apply(const OptimizerCase& of, int64_t step);
};
// Elements, counting all of theirs, whose bits differ.
int64_t Differences(const OptimizerSample& a, const OptimizerSample& b);

kernels::OptimizerCoefficients CoefficientsAt(const OptimizerCase& of, int64_t step);
// What the norm of normal numbers is, all but exactly: fills in the result's error if it is not.
void CheckNorm(const OptimizerCase& of, const kernels::GradientTally& tally, OptimizerResult* result);

OptimizerResult RunCpuOptimizerCase(const OptimizerCase& optimizer_case);
OptimizerResult RunCudaOptimizerCase(const OptimizerCase& optimizer_case);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_OPTIMIZER_CASE_H_
