#include "bench/kernels/sampled_reference.h"

#include <algorithm>
#include <cmath>

namespace lossd::bench {
namespace {

// Rows and vocabulary entries whose dot products are worked on together, in registers.
constexpr int64_t kRows = 4;
constexpr int64_t kEntries = 4;
constexpr int64_t kRowsPerTask = 64;

// Logits of kRows rows and kEntries entries; x is [hidden][kRows], w [hidden][kEntries].
void DotProducts(int64_t hidden, const double* x, const double* w, double (&logits)[kRows][kEntries]) {
  for (auto& row : logits) std::fill(std::begin(row), std::end(row), 0.0);
  for (int64_t h = 0; h < hidden; ++h) {
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t v = 0; v < kEntries; ++v) logits[r][v] += x[h * kRows + r] * w[h * kEntries + v];
    }
  }
}

// [count, hidden] floats from row `first` on, as [hidden][width] doubles; rows that do not exist are zero.
void Interleave(std::span<const float> matrix, int64_t hidden, int64_t first, int64_t width, double* out) {
  const int64_t rows = static_cast<int64_t>(matrix.size()) / hidden;
  for (int64_t i = 0; i < width; ++i) {
    for (int64_t h = 0; h < hidden; ++h) {
      out[h * width + i] = first + i < rows ? matrix[(first + i) * hidden + h] : 0.0;
    }
  }
}

// A running log-sum-exp, and the sum itself.
struct LogSumExp {
  double largest = -HUGE_VAL;
  double sum = 0;
  double plain_sum = 0;

  void Add(double z) {
    plain_sum += z;
    if (z > largest) {
      sum *= std::exp(largest - z);
      largest = z;
    }
    sum += std::exp(z - largest);
  }
  double Value() const { return largest + std::log(sum); }
};

// Log-sum-exps, and sums, of the logits of rows [begin, begin + kRowsPerTask).
void SumRows(const SampledProblem& problem, const LossFormula& formula, int64_t begin,
             std::vector<double>& log_sum_exps, std::vector<double>& sums) {
  const int64_t end = std::min(begin + kRowsPerTask, problem.tokens);
  const int64_t groups = (end - begin + kRows - 1) / kRows;
  std::vector<double> x(static_cast<size_t>(groups * kRows * problem.hidden));
  std::vector<double> w(static_cast<size_t>(kEntries * problem.hidden));
  for (int64_t g = 0; g < groups; ++g) {
    Interleave(problem.hidden_states, problem.hidden, begin + g * kRows, kRows,
               &x[g * kRows * problem.hidden]);
  }
  std::vector<LogSumExp> running(static_cast<size_t>(groups * kRows));
  for (int64_t entry = 0; entry < problem.vocab; entry += kEntries) {
    Interleave(problem.weight, problem.hidden, entry, kEntries, w.data());
    for (int64_t g = 0; g < groups; ++g) {
      double logits[kRows][kEntries];
      DotProducts(problem.hidden, &x[g * kRows * problem.hidden], w.data(), logits);
      for (int64_t r = 0; r < kRows; ++r) {
        const int64_t valid = std::min(kEntries, problem.vocab - entry);
        for (int64_t v = 0; v < valid; ++v) running[g * kRows + r].Add(formula.Logit(logits[r][v]));
      }
    }
  }
  for (int64_t r = begin; r < end; ++r) {
    log_sum_exps[r] = running[r - begin].Value();
    sums[r] = running[r - begin].plain_sum;
  }
}

}  // namespace

SampledReference::SampledReference(const SampledProblem& problem)
    : problem_(problem),
      formula_{problem.options, problem.vocab, problem.gradient_scale},
      log_sum_exp_(static_cast<size_t>(problem.tokens)),
      losses_(static_cast<size_t>(problem.tokens)) {
  std::vector<double> sums(losses_.size());
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t begin = 0; begin < problem_.tokens; begin += kRowsPerTask) {
    SumRows(problem_, formula_, begin, log_sum_exp_, sums);
  }
  for (int64_t r = 0; r < problem_.tokens; ++r) {
    losses_[r] = formula_.Loss(log_sum_exp_[r], sums[r], Logit(r, problem_.labels[r]));
  }
}

double SampledReference::Logit(int64_t row, int64_t entry) const {
  double sum = 0;
  for (int64_t h = 0; h < problem_.hidden; ++h) {
    sum += static_cast<double>(problem_.hidden_states[row * problem_.hidden + h]) *
           static_cast<double>(problem_.weight[entry * problem_.hidden + h]);
  }
  return formula_.Logit(sum);
}

std::vector<double> SampledReference::InputGradient(int64_t row) const {
  std::vector<double> gradient(static_cast<size_t>(problem_.hidden));
  for (int64_t v = 0; v < problem_.vocab; ++v) {
    const double dz = formula_.Gradient(log_sum_exp_[row], Logit(row, v), problem_.labels[row] == v);
    const float* weight = &problem_.weight[v * problem_.hidden];
    for (int64_t h = 0; h < problem_.hidden; ++h) gradient[h] += dz * weight[h];
  }
  return gradient;
}

std::vector<double> SampledReference::WeightGradient(int64_t entry) const {
  std::vector<double> gradient(static_cast<size_t>(problem_.hidden));
  for (int64_t r = 0; r < problem_.tokens; ++r) {
    const double dz = formula_.Gradient(log_sum_exp_[r], Logit(r, entry), problem_.labels[r] == entry);
    for (int64_t h = 0; h < problem_.hidden; ++h) {
      gradient[h] += dz * problem_.hidden_states[r * problem_.hidden + h];
    }
  }
  return gradient;
}

}  // namespace lossd::bench
