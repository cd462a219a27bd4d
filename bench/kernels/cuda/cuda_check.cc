#include "bench/kernels/cuda/cuda_check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "bench/kernels/loss_formula.h"
#include "bench/kernels/measure.h"
#include "kernels/reference_divergence.h"
#include "kernels/target_shares.h"

namespace lossd::bench {
namespace {

using kernels::DataType;
using kernels::cuda::BatchRows;
using kernels::cuda::Result;

constexpr int64_t kCheckedRows = 8;
constexpr double kLossTolerance = 1e-5;
constexpr double kLogitError = 1e-6;  // of a sum in fp32, for each unit of its magnitude

class Check {
 public:
  Check(CudaStep& step, KernelResult* result)
      : step_(step),
        case_(step.kernel_case()),
        rows_(step.rows()),
        padded_(step.padded_hidden()),
        formula_{case_.options, case_.vocab, step.gradient_scale()},
        result_(*result) {}

  Result Run() {
    LOSSD_CUDA_PASS_ON(
        CudaStep::ReadWide(step_.weight(), case_.dtype, 0, case_.vocab * padded_, &host_weight_));
    if (case_.teacher_hidden > 0) LOSSD_CUDA_PASS_ON(ReadTeacher());
    LOSSD_CUDA_PASS_ON(CheckRows());
    // What a mixture's entries are cannot be told from the sums of rows.
    if (case_.teacher_hidden == 0 || case_.divergence != kernels::Divergence::kJensenShannon) {
      LOSSD_CUDA_PASS_ON(CheckVocabulary());
    }
    result_.tolerance = case_.dtype == DataType::kFloat32 ? 1e-5 : 8e-3;
    const RelativeErrors& error = result_.relative_error;
    if (!(error.loss < kLossTolerance + kLogitError * case_.lse_spread) || !(error.dx < result_.tolerance) ||
        !(error.dw < result_.tolerance)) {
      result_.error = "wrong: relative errors of loss, dX, dW are " + std::to_string(error.loss) + ", " +
                      std::to_string(error.dx) + ", " + std::to_string(error.dw);
    }
    return {};
  }

 private:
  double Logit(const float* x, int64_t v) const {
    double sum = 0;
    const float* w = &host_weight_[static_cast<size_t>(v * padded_)];
    for (int64_t h = 0; h < case_.hidden; ++h) sum += static_cast<double>(x[h]) * w[h];
    return formula_.Logit(sum);
  }

  Result ReadTeacher() {
    const kernels::Teacher& teacher = step_.teacher().head;
    teacher_padded_ = kernels::cuda::PaddedHidden(teacher.hidden);
    LOSSD_CUDA_PASS_ON(
        CudaStep::ReadWide(teacher.weight, case_.dtype, 0, case_.vocab * teacher_padded_, &teacher_weight_));
    return CudaStep::ReadWide(teacher.hidden_states, case_.dtype, 0, case_.tokens * teacher.hidden,
                              &teacher_x_);
  }
  double TeacherLogit(int64_t token, int64_t v) const {
    const float* x = &teacher_x_[static_cast<size_t>(token * case_.teacher_hidden)];
    const float* w = &teacher_weight_[static_cast<size_t>(v * teacher_padded_)];
    double sum = 0;
    for (int64_t h = 0; h < case_.teacher_hidden; ++h) sum += static_cast<double>(x[h]) * w[h];
    return sum;
  }
  // The shares of a row with soft targets on a list, whose logits `logit` tells.
  template <class Logit>
  kernels::TargetShares SharesOfRow(int64_t row, double log_sum_exp, const Logit& logit) const {
    const std::span<const int32_t> tokens = step_.TargetsOf(row);
    kernels::TargetSums sums;
    double listed = 0;
    for (size_t i = 0; i < tokens.size(); ++i) {
      const double q = step_.ProbabilitiesOf(row)[i];
      const double s = logit(tokens[i]);
      sums.mass += q;
      sums.cross += q * s;
      sums.negentropy += q * std::log(q);
      listed += std::exp(s - log_sum_exp);
    }
    sums.log_sum_exp = log_sum_exp + std::log(listed);
    return kernels::SharesOf(sums, log_sum_exp);
  }
  // q of an entry, or below 0 where the row's list has it not.
  double TargetOf(int64_t row, int64_t v) const {
    const std::span<const int32_t> tokens = step_.TargetsOf(row);
    const auto at = std::find(tokens.begin(), tokens.end(), v);
    return at == tokens.end() ? -1.0 : step_.ProbabilitiesOf(row)[static_cast<size_t>(at - tokens.begin())];
  }
  static double SlopeOf(const kernels::TargetShares& shares, double p, double target) {
    return target < 0 ? shares.others * p : shares.listed * p - target;
  }
  kernels::ReferenceDivergence DivergenceOfList(int64_t row, double log_sum_exp,
                                                const std::vector<double>& logits) const {
    const auto at = [&](int64_t v) { return logits[static_cast<size_t>(v)]; };
    const kernels::TargetShares shares = SharesOfRow(row, log_sum_exp, at);
    kernels::ReferenceDivergence divergence{.value = shares.divergence, .slopes = logits};
    for (double& value : divergence.slopes) value = shares.others * std::exp(value - log_sum_exp);
    for (const int32_t v : step_.TargetsOf(row)) {
      divergence.slopes[static_cast<size_t>(v)] =
          SlopeOf(shares, std::exp(at(v) - log_sum_exp), TargetOf(row, v));
    }
    return divergence;
  }

  // The divergence of a row whose logits these are; nothing without soft targets.
  kernels::ReferenceDivergence DivergenceOfRow(int64_t row, int64_t token, double log_sum_exp,
                                               const std::vector<double>& logits) const {
    if (case_.targets > 0) return DivergenceOfList(row, log_sum_exp, logits);
    kernels::ReferenceDivergence none;
    none.slopes.assign(logits.size(), 0.0);
    if (case_.teacher_hidden == 0) return none;
    std::vector<double> teacher_logits(logits.size());
#pragma omp parallel for
    for (int64_t v = 0; v < case_.vocab; ++v) {
      teacher_logits[static_cast<size_t>(v)] = TeacherLogit(token, v);
    }
    return kernels::DivergenceOf({.divergence = case_.divergence}, logits, teacher_logits);
  }

  // Loss and dX of some rows, in fp64 from their very beginning.
  Result CheckRows() {
    ErrorNorm loss_error;
    ErrorNorm dx_error;
    result_.checked_rows = std::min(kCheckedRows, rows_.rows);
    for (int64_t i = 0; i < result_.checked_rows; ++i) {
      const auto row =
          static_cast<size_t>(i * (rows_.rows - 1) / std::max<int64_t>(1, result_.checked_rows - 1));
      const int64_t token = rows_.batch_rows[row];
      const int64_t label = rows_.labels[row];
      std::vector<float> x;
      std::vector<float> dx;
      std::vector<float> loss;
      LOSSD_CUDA_PASS_ON(
          CudaStep::ReadWide(step_.hidden_states(), case_.dtype, token * case_.hidden, case_.hidden, &x));
      LOSSD_CUDA_PASS_ON(
          CudaStep::ReadWide(step_.dx(), case_.dtype, token * case_.hidden, case_.hidden, &dx));
      LOSSD_CUDA_PASS_ON(CudaStep::ReadWide(step_.losses(), DataType::kFloat32, token, 1, &loss));
      std::vector<double> z(static_cast<size_t>(case_.vocab));
#pragma omp parallel for
      for (int64_t v = 0; v < case_.vocab; ++v) z[static_cast<size_t>(v)] = Logit(x.data(), v);
      // What the row's list has not is as if its logit were -infinity.
      std::vector<bool> kept(z.size());
      for (size_t v = 0; v < z.size(); ++v) {
        kept[v] = step_.Keeps(static_cast<int64_t>(row), static_cast<int64_t>(v));
        if (!kept[v]) z[v] = -std::numeric_limits<double>::infinity();
      }
      const double largest = *std::max_element(z.begin(), z.end());
      double sum = 0;
      double moment = 0;
      for (size_t v = 0; v < z.size(); ++v) {
        if (!kept[v]) continue;
        const double value = z[v];
        sum += std::exp(value - largest);
        moment += std::exp(value - largest) * value;
      }
      const double log_sum_exp = largest + std::log(sum);
      const double mean = moment / sum;
      // Label smoothing alone needs it, and there is none with lists.
      const double sum_of_logits = case_.kept > 0 ? 0.0 : std::accumulate(z.begin(), z.end(), 0.0);
      const kernels::ReferenceDivergence divergence =
          DivergenceOfRow(static_cast<int64_t>(row), token, log_sum_exp, z);
      loss_error.Add(loss[0], formula_.Loss(log_sum_exp, sum_of_logits, z[static_cast<size_t>(label)]) +
                                  divergence.value);
      std::vector<double> gradient(static_cast<size_t>(case_.hidden), 0.0);
#pragma omp parallel
      {
        std::vector<double> part(gradient.size(), 0.0);
#pragma omp for nowait
        for (int64_t v = 0; v < case_.vocab; ++v) {
          if (!kept[static_cast<size_t>(v)]) continue;
          const double logit = z[static_cast<size_t>(v)];
          const double dz = formula_.Gradient(log_sum_exp, logit, v == label) +
                            formula_.Times(divergence.slopes[static_cast<size_t>(v)], logit) +
                            formula_.EntropyGradient(case_.entropy_gradient, log_sum_exp, mean, logit);
          const float* w = &host_weight_[static_cast<size_t>(v * padded_)];
          for (size_t h = 0; h < part.size(); ++h) part[h] += dz * w[h];
        }
#pragma omp critical
        for (size_t h = 0; h < part.size(); ++h) gradient[h] += part[h];
      }
      for (size_t h = 0; h < gradient.size(); ++h) dx_error.Add(dx[h], gradient[h]);
    }
    result_.relative_error.loss = loss_error.Relative();
    result_.relative_error.dx = dx_error.Relative();
    return {};
  }

  // Some rows of dW: half of them labels, half not. Their p is made from the step's own log-sum-exps, which
  // the losses have vouched for, and the mean of their logits from its entropies.
  Result CheckVocabulary() {
    std::vector<float> x;
    std::vector<float> log_sum_exps;
    LOSSD_CUDA_PASS_ON(
        CudaStep::ReadWide(step_.hidden_states(), case_.dtype, 0, case_.tokens * case_.hidden, &x));
    LOSSD_CUDA_PASS_ON(
        CudaStep::ReadWide(step_.log_sum_exps(), DataType::kFloat32, 0, case_.tokens, &log_sum_exps));
    std::vector<float> entropies(log_sum_exps.size());
    if (case_.entropy_gradient != 0) {
      LOSSD_CUDA_PASS_ON(
          CudaStep::ReadWide(step_.entropies(), DataType::kFloat32, 0, case_.tokens, &entropies));
    }
    std::vector<float> teacher_sums;
    std::vector<float> divergences;
    if (case_.teacher_hidden > 0) {
      LOSSD_CUDA_PASS_ON(
          CudaStep::ReadWide(step_.divergences(), DataType::kFloat32, 0, case_.tokens, &divergences));
      LOSSD_CUDA_PASS_ON(step_.TeacherLogSumExps(&teacher_sums));
    }
    std::vector<kernels::TargetShares> shares(case_.targets > 0 ? static_cast<size_t>(rows_.rows) : 0);
#pragma omp parallel for
    for (int64_t r = 0; r < std::ssize(shares); ++r) {
      const auto token = static_cast<size_t>(rows_.batch_rows[static_cast<size_t>(r)]);
      const float* row = &x[token * static_cast<size_t>(case_.hidden)];
      shares[static_cast<size_t>(r)] =
          SharesOfRow(r, log_sum_exps[token], [&](int64_t v) { return Logit(row, v); });
    }
    const auto soft_slope = [&](int64_t r, size_t token, int64_t v, double logit) {
      if (!shares.empty()) {
        return SlopeOf(shares[static_cast<size_t>(r)], std::exp(logit - log_sum_exps[token]), TargetOf(r, v));
      }
      if (divergences.empty()) return 0.0;
      const double log_q = logit - log_sum_exps[token];
      const double log_p = TeacherLogit(static_cast<int64_t>(token), v) - teacher_sums[token];
      if (case_.divergence == kernels::Divergence::kForwardKl) return std::exp(log_q) - std::exp(log_p);
      return std::exp(log_q) * (log_q - log_p - divergences[token]);
    };
    std::vector<float> smoothing;
    if (step_.smoothing_gradient() != nullptr) {
      LOSSD_CUDA_PASS_ON(
          CudaStep::ReadWide(step_.smoothing_gradient(), DataType::kFloat32, 0, case_.hidden, &smoothing));
    }
    ErrorNorm error;
    result_.checked_vocabulary_rows = std::min(kCheckedRows, case_.vocab);
    for (int64_t i = 0; i < result_.checked_vocabulary_rows; ++i) {
      const int64_t v = i % 2 == 0 ? rows_.labels[static_cast<size_t>(i * (rows_.rows - 1) / kCheckedRows)]
                                   : i * (case_.vocab - 1) / kCheckedRows;
      std::vector<float> dw;
      LOSSD_CUDA_PASS_ON(CudaStep::ReadWide(step_.dw(), DataType::kFloat32, v * padded_, case_.hidden, &dw));
      std::vector<double> expected(static_cast<size_t>(case_.hidden), 0.0);
      for (int64_t r = 0; r < rows_.rows; ++r) {
        if (!step_.Keeps(r, v)) continue;
        const auto token = static_cast<size_t>(rows_.batch_rows[static_cast<size_t>(r)]);
        const float* row = &x[token * static_cast<size_t>(case_.hidden)];
        const double logit = Logit(row, v);
        const double factor =
            formula_.Gradient(log_sum_exps[token], logit, rows_.labels[static_cast<size_t>(r)] == v) +
            formula_.Times(soft_slope(r, token, v, logit), logit) +
            formula_.EntropyGradient(case_.entropy_gradient, log_sum_exps[token],
                                     log_sum_exps[token] - entropies[token], logit);
        for (size_t h = 0; h < expected.size(); ++h) expected[h] += factor * row[h];
      }
      for (size_t h = 0; h < expected.size(); ++h) {
        error.Add(smoothing.empty() ? dw[h] : dw[h] - smoothing[h], expected[h]);
      }
    }
    result_.relative_error.dw = error.Relative();
    return {};
  }

  CudaStep& step_;
  const KernelCase& case_;
  const BatchRows& rows_;
  const int64_t padded_;
  const LossFormula formula_;
  KernelResult& result_;
  std::vector<float> host_weight_;
  std::vector<float> teacher_weight_;  // and its hidden states: empty without a teacher
  std::vector<float> teacher_x_;
  int64_t teacher_padded_ = 0;
};

}  // namespace

Result CheckCudaStep(CudaStep& step, KernelResult* result) { return Check(step, result).Run(); }

}  // namespace lossd::bench
