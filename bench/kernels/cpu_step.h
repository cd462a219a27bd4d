// The fused step on the CPU with everything it reads and writes, for benchmarks.
#ifndef LOSSD_BENCH_KERNELS_CPU_STEP_H_
#define LOSSD_BENCH_KERNELS_CPU_STEP_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "bench/kernels/bare_products.h"
#include "bench/kernels/kernel_case.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::bench {

// Memory for a step, fresh from the system: only what the step touches counts as used. Null if there is none.
struct FreeMemory {
  void operator()(unsigned char* pointer) const { std::free(pointer); }
};
using CpuWorkspace = std::unique_ptr<unsigned char, FreeMemory>;
CpuWorkspace NewCpuWorkspace(int64_t bytes);

// It refers to itself and is not copied.
class CpuStep {
 public:
  explicit CpuStep(const KernelCase& kernel_case) : case_(kernel_case) {}
  CpuStep(const CpuStep&) = delete;
  CpuStep& operator=(const CpuStep&) = delete;

  static std::string Hardware();

  // Takes memory and fills in random inputs, the same ones for the same case. Empty, or why not;
  // std::vector's exceptions pass.
  std::string Create();
  kernels::Status Run(kernels::WeightGradient weight_gradient,
                      kernels::LinearCrossEntropyStats* stats = nullptr);

  const kernels::LinearCrossEntropyParams& params() const { return params_; }
  BareOperands& operands() { return operands_; }  // fp32 copies of the inputs
  const std::vector<int64_t>& labels() const { return labels_; }
  const std::vector<float>& losses() const { return losses_; }
  const std::vector<unsigned char>& dx() const { return dx_; }  // [N, H] of the case's type
  const std::vector<float>& dw() const { return dw_; }          // [V, H]
  int64_t batch_bytes() const;                                  // of X, dX and losses

 private:
  std::vector<unsigned char> Narrowed(const std::vector<float>& values) const;
  std::vector<float> Rounded(const std::vector<float>& values) const;
  void MakeInputs();

  const KernelCase case_;
  BareOperands operands_;
  std::vector<int64_t> labels_;
  std::vector<unsigned char> weight_;
  std::vector<unsigned char> hidden_states_;
  std::vector<float> losses_;
  std::vector<unsigned char> dx_;
  std::vector<float> dw_;
  CpuWorkspace workspace_;
  kernels::LinearCrossEntropyParams params_;
};

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_CPU_STEP_H_
