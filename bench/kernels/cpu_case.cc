// Checks, then times, the fused step on the CPU.
#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <new>
#include <random>
#include <stdexcept>
#include <tuple>

#include "bench/kernels/bare_products.h"
#include "bench/kernels/cpu_step.h"
#include "bench/kernels/kernel_case.h"
#include "bench/kernels/measure.h"
#include "bench/kernels/sampled_reference.h"
#include "kernels/cpu/arithmetic.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::bench {
namespace {

using kernels::DataType;

constexpr int64_t kCheckedRows = 16;
constexpr double kLossTolerance = 1e-5;

// Bytes from a line of /proc/self/status such as "VmRSS:   123 kB".
int64_t ProcessBytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(key, 0) == 0) return std::strtoll(line.c_str() + key.size() + 1, nullptr, 10) * 1024;
  }
  return 0;
}

// Makes VmHWM start again from the present resident size.
void ResetPeak() { std::ofstream("/proc/self/clear_refs") << "5"; }

class CpuCase {
 public:
  CpuCase(const KernelCase& kernel_case, const Progress& progress)
      : case_(kernel_case), progress_(progress), step_(kernel_case) {}

  KernelResult Run() {
    result_.hardware = CpuStep::Hardware();
    result_.tile_rows = std::min(
        case_.tokens, kernels::RowsWithin(case_.workspace_bytes, case_.vocab, case_.hidden, case_.dtype));
    if (result_.tile_rows < 1) {
      result_.error = "not one row fits a workspace of " + std::to_string(case_.workspace_bytes) + " bytes";
      return result_;
    }
    progress_("making random data");
    result_.error = step_.Create();
    if (!result_.error.empty()) return result_;
    result_.batch_bytes = step_.batch_bytes();
    progress_("checking against fp64");
    if (!Check()) return result_;
    Time();
    return result_;
  }

 private:
  bool Check() {
    ResetPeak();
    const int64_t before = ProcessBytes("VmRSS:");
    kernels::LinearCrossEntropyStats stats;
    const kernels::Status status = step_.Run(kernels::WeightGradient::kOverwrite, &stats);
    result_.peak_bytes = std::max<int64_t>(0, ProcessBytes("VmHWM:") - before);
    result_.rows_redone = stats.rows_redone;
    if (status != kernels::Status::kOk) {
      result_.error = std::string("the step failed: ") + kernels::StatusName(status);
      return false;
    }
    MeasureErrors();
    const RelativeErrors& error = result_.relative_error;
    result_.tolerance = case_.dtype == DataType::kFloat32 ? 1e-5 : 5e-3;
    const bool close =
        error.loss <= kLossTolerance && error.dx <= result_.tolerance && error.dw <= result_.tolerance;
    if (close) return true;
    result_.error = "the result is wrong: relative errors of loss, dx, dw above " +
                    std::to_string(kLossTolerance) + ", " + std::to_string(result_.tolerance);
    return false;
  }

  void MeasureErrors() {
    const BareOperands& inputs = step_.operands();
    const std::vector<int64_t>& labels = step_.labels();
    const SampledReference reference({.tokens = case_.tokens,
                                      .vocab = case_.vocab,
                                      .hidden = case_.hidden,
                                      .weight = inputs.weight,
                                      .hidden_states = inputs.hidden_states,
                                      .labels = labels,
                                      .gradient_scale = step_.params().gradient_scale,
                                      .options = case_.options});
    ErrorNorm loss;
    for (int64_t r = 0; r < case_.tokens; ++r) loss.Add(step_.losses()[r], reference.losses()[r]);
    ErrorNorm dx;
    ErrorNorm dw;
    std::mt19937_64 random(2);
    std::vector<float> row(static_cast<size_t>(case_.hidden));
    for (int64_t i = 0; i < kCheckedRows; ++i) {
      const auto r = static_cast<int64_t>(random() % static_cast<uint64_t>(case_.tokens));
      // Half of the vocabulary entries are labels of the batch.
      const int64_t entry =
          i % 2 == 0 ? labels[r] : static_cast<int64_t>(random() % static_cast<uint64_t>(case_.vocab));
      const std::vector<double> dx_row = reference.InputGradient(r);
      const std::vector<double> dw_row = reference.WeightGradient(entry);
      kernels::Convert(case_.dtype,
                       &step_.dx()[static_cast<size_t>(r * case_.hidden * kernels::SizeOf(case_.dtype))],
                       DataType::kFloat32, row.data(), case_.hidden);
      for (int64_t h = 0; h < case_.hidden; ++h) {
        dx.Add(row[h], dx_row[h]);
        dw.Add(step_.dw()[entry * case_.hidden + h], dw_row[h]);
      }
    }
    result_.relative_error = {loss.Relative(), dx.Relative(), dw.Relative()};
    result_.checked_rows = kCheckedRows;
    result_.checked_vocabulary_rows = kCheckedRows;
  }

  void Time() {
    std::mt19937_64 random(3);
    std::normal_distribution<float> normal;
    BareOperands& operands = step_.operands();
    operands.logits.assign(static_cast<size_t>(case_.tokens * case_.vocab), 0.0f);
    operands.logit_gradients.resize(operands.logits.size());
    for (float& value : operands.logit_gradients) value = normal(random);
    operands.dx.assign(static_cast<size_t>(case_.tokens * case_.hidden), 0.0f);
    operands.dw.assign(step_.dw().size(), 0.0f);
    std::vector<BareProducts> limits = AllBareProducts(case_.dtype, operands);
    progress_("warming up");
    // Also drops what this processor cannot do.
    std::erase_if(limits, [](const BareProducts& way) {
      return !std::all_of(way.products.begin(), way.products.end(), [](const auto& run) { return run(); });
    });
    std::vector<ProductTimes> times(limits.size());
    for (int64_t i = 0; i < case_.repetitions; ++i) {
      progress_("timing, round " + std::to_string(i + 1) + " of " + std::to_string(case_.repetitions));
      result_.all_milliseconds.push_back(
          Milliseconds([this] { step_.Run(kernels::WeightGradient::kAccumulate); }));
      for (size_t j = 0; j < limits.size(); ++j) {
        double all = 0;
        for (size_t k = 0; k < kProducts.size(); ++k) {
          times[j].products[k].push_back(Milliseconds([&] { limits[j].products[k](); }));
          all += times[j].products[k].back();
        }
        times[j].all.push_back(all);
      }
    }
    Summarize(limits, times);
  }

  struct ProductTimes {
    std::array<std::vector<double>, kProducts.size()> products;
    std::vector<double> all;
  };

  void Summarize(const std::vector<BareProducts>& limits, const std::vector<ProductTimes>& times) {
    const auto [n, v, h] = std::tuple(case_.tokens, case_.vocab, case_.hidden);
    size_t fastest = 0;
    for (size_t j = 1; j < limits.size(); ++j) {
      if (Median(times[j].all) < Median(times[fastest].all)) fastest = j;
    }
    result_.limit_kind = limits[fastest].kind;
    result_.all_limit_milliseconds = times[fastest].all;
    result_.limit = {"limit", Median(times[fastest].all), {}};
    const DataType type = result_.limit_kind == "bfloat16 matmul" ? DataType::kBFloat16 : DataType::kFloat32;
    for (size_t k = 0; k < kProducts.size(); ++k) {
      const Work work = ProductWork(kProducts[k], n, v, h, type, DataType::kFloat32);
      result_.products.push_back({ProductName(kProducts[k]), Median(times[fastest].products[k]), work});
      result_.limit.work += work;
    }
    // Its traffic is that of caches, which differ from processor to processor.
    result_.step = {"fused step", Median(result_.all_milliseconds), {result_.limit.work.operations, 0}};
    std::vector<double> ratios;
    for (size_t i = 0; i < result_.all_milliseconds.size(); ++i) {
      ratios.push_back(result_.all_milliseconds[i] / result_.all_limit_milliseconds[i]);
    }
    result_.ratio = Median(ratios);
  }

  const KernelCase case_;
  const Progress& progress_;
  KernelResult result_;
  CpuStep step_;
};

}  // namespace

KernelResult RunCpuCase(const KernelCase& kernel_case, const Progress& progress) {
  try {
    return CpuCase(kernel_case, progress).Run();
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {
  }
  KernelResult result;
  result.error = "not enough memory for the case and its limit";
  return result;
}

}  // namespace lossd::bench
