// A step that another benchmark drives: inputs from files, outputs to files, then passes when they are asked
// for, so that it can be timed in turns with programs of other processes.
#ifndef LOSSD_BENCH_KERNELS_PASSES_H_
#define LOSSD_BENCH_KERNELS_PASSES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/kernels/kernel_case.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::bench {

class Passes {
 public:
  virtual ~Passes() = default;
  // Reads weight.bin [V, H] and hidden_states.bin [N, H], both of the case's type, and labels.bin [N] int64
  // (-100: ignored); runs one pass that overwrites dW; writes losses.bin [N] fp32, dx.bin [N, H] of the
  // case's type and dw.bin [V, H] fp32. The gradient is the mean loss's over rows that are not ignored.
  // Returns an error, or nothing.
  virtual std::string Prepare(const std::string& folder) = 0;
  // After Prepare: one untimed pass and `count` timed ones in a row.
  virtual std::string Time(int64_t count, kernels::WeightGradient weight_gradient,
                           std::vector<double>* milliseconds) = 0;

  int64_t tile_rows() const { return tile_rows_; }
  int64_t peak_bytes() const { return peak_bytes_; }  // taken above inputs and outputs; negative: not known

 protected:
  int64_t tile_rows_ = 0;
  int64_t peak_bytes_ = -1;
};

std::unique_ptr<Passes> MakeCpuPasses(const KernelCase& kernel_case);
std::unique_ptr<Passes> MakeCudaPasses(const KernelCase& kernel_case);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_PASSES_H_
