// fp64 results at sizes where the whole reference would take hours: log-sum-exp and loss of every row, dX of
// a few rows and dW of a few vocabulary entries, each exact over the full reductions. Uses all cores.
#ifndef LOSSD_BENCH_KERNELS_SAMPLED_REFERENCE_H_
#define LOSSD_BENCH_KERNELS_SAMPLED_REFERENCE_H_

#include <cstdint>
#include <span>
#include <vector>

#include "bench/kernels/loss_formula.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::bench {

struct SampledProblem {
  int64_t tokens = 0;
  int64_t vocab = 0;
  int64_t hidden = 0;
  std::span<const float> weight;         // [vocab, hidden], values as the head holds them
  std::span<const float> hidden_states;  // [tokens, hidden]
  std::span<const int64_t> labels;       // none ignored
  double gradient_scale = 1.0;
  kernels::LossOptions options = {};
};

class SampledReference {
 public:
  explicit SampledReference(const SampledProblem& problem);

  const std::vector<double>& losses() const { return losses_; }
  std::vector<double> InputGradient(int64_t row) const;     // [hidden]
  std::vector<double> WeightGradient(int64_t entry) const;  // [hidden]

 private:
  double Logit(int64_t row, int64_t entry) const;

  const SampledProblem problem_;
  const LossFormula formula_;
  std::vector<double> log_sum_exp_;
  std::vector<double> losses_;
};

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_SAMPLED_REFERENCE_H_
