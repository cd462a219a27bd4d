// Checks, then times, the fused step on the CPU.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <tuple>

#include "kernels/cpu/arithmetic.h"
#include "kernels/cpu/simd_kernels.h"
#include "kernels/linear_cross_entropy.h"
#include "tests/bench/bare_products.h"
#include "tests/bench/kernel_case.h"
#include "tests/bench/measure.h"
#include "tests/bench/sampled_reference.h"

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

double Milliseconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

class CpuCase {
 public:
  CpuCase(const KernelCase& kernel_case, const Progress& progress)
      : case_(kernel_case), progress_(progress) {}

  KernelResult Run() {
    result_.hardware = Hardware();
    result_.tile_rows = std::min(
        case_.tokens, kernels::RowsWithin(case_.workspace_bytes, case_.vocab, case_.hidden, case_.dtype));
    if (result_.tile_rows < 1) {
      result_.error = "not one row fits a workspace of " + std::to_string(case_.workspace_bytes) + " bytes";
      return result_;
    }
    progress_("making random data");
    MakeInputs();
    progress_("checking against fp64");
    if (!Check()) return result_;
    Time();
    return result_;
  }

 private:
  static std::string Hardware() {
    std::ostringstream text;
    text << std::thread::hardware_concurrency() << " threads, " << kernels::cpu::BestSimdKernels().name;
    return text.str();
  }

  // Values as the head's type holds them, in fp32.
  std::vector<float> Rounded(const std::vector<float>& values) const {
    std::vector<unsigned char> narrow(values.size() * static_cast<size_t>(kernels::SizeOf(case_.dtype)));
    std::vector<float> wide(values.size());
    const auto count = static_cast<int64_t>(values.size());
    kernels::Convert(DataType::kFloat32, values.data(), case_.dtype, narrow.data(), count);
    kernels::Convert(case_.dtype, narrow.data(), DataType::kFloat32, wide.data(), count);
    return wide;
  }

  std::vector<unsigned char> Narrowed(const std::vector<float>& values) const {
    std::vector<unsigned char> narrow(values.size() * static_cast<size_t>(kernels::SizeOf(case_.dtype)));
    kernels::Convert(DataType::kFloat32, values.data(), case_.dtype, narrow.data(),
                     static_cast<int64_t>(values.size()));
    return narrow;
  }

  void MakeInputs() {
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    const auto fill = [&](int64_t count, float deviation) {
      std::vector<float> values(static_cast<size_t>(count));
      for (float& value : values) value = deviation * normal(random);
      return values;
    };
    const auto h = static_cast<float>(case_.hidden);
    operands_.tokens = case_.tokens;
    operands_.vocab = case_.vocab;
    operands_.hidden = case_.hidden;
    operands_.weight = Rounded(fill(case_.vocab * case_.hidden, 2.0f / std::sqrt(h)));
    operands_.hidden_states = fill(case_.tokens * case_.hidden, 1.0f);
    // Logits of deviation d have a log-sum-exp of about log V + d²/2.
    std::uniform_real_distribution<double> spread(0, case_.lse_spread);
    for (int64_t r = 0; r < case_.tokens && case_.lse_spread > 0; ++r) {
      const auto scale = static_cast<float>(std::sqrt(2 * spread(random)) / 2);
      for (int64_t i = 0; i < case_.hidden; ++i) operands_.hidden_states[r * case_.hidden + i] *= scale;
    }
    operands_.hidden_states = Rounded(operands_.hidden_states);
    std::uniform_int_distribution<int64_t> label(0, case_.vocab - 1);
    labels_.resize(static_cast<size_t>(case_.tokens));
    for (int64_t& value : labels_) value = label(random);

    weight_ = Narrowed(operands_.weight);
    hidden_states_ = Narrowed(operands_.hidden_states);
    losses_.assign(static_cast<size_t>(case_.tokens), 0.0f);
    dx_.assign(static_cast<size_t>(case_.tokens * case_.hidden * kernels::SizeOf(case_.dtype)), 0xff);
    dw_.assign(static_cast<size_t>(case_.vocab * case_.hidden), 0.0f);

    params_.tokens = case_.tokens;
    params_.vocab = case_.vocab;
    params_.hidden = case_.hidden;
    params_.weight_type = params_.hidden_type = params_.dx_type = case_.dtype;
    params_.weight = weight_.data();
    params_.hidden_states = hidden_states_.data();
    params_.labels = labels_.data();
    // Gradients are scaled as for a mean, except in fp16: there dX would be too small, which is why trainers
    // scale their losses.
    params_.gradient_scale =
        case_.dtype == DataType::kFloat16 ? 1.0f : 1.0f / static_cast<float>(case_.tokens);
    params_.options = case_.options;
    params_.losses = losses_.data();
    params_.dx = dx_.data();
    params_.dw = dw_.data();
    // Fresh from the system: only what the step touches counts as used.
    const int64_t aligned = (case_.workspace_bytes + 63) / 64 * 64;
    workspace_.reset(static_cast<unsigned char*>(std::aligned_alloc(64, static_cast<size_t>(aligned))));
    params_.workspace = workspace_.get();
    params_.workspace_bytes = case_.workspace_bytes;
    result_.batch_bytes =
        static_cast<int64_t>(hidden_states_.size() + dx_.size() + losses_.size() * sizeof(float));
  }

  bool Check() {
    if (workspace_ == nullptr) {
      result_.error = "out of memory for the workspace";
      return false;
    }
    params_.weight_gradient = kernels::WeightGradient::kOverwrite;
    ResetPeak();
    const int64_t before = ProcessBytes("VmRSS:");
    kernels::LinearCrossEntropyStats stats;
    const kernels::Status status = kernels::CpuLinearCrossEntropy(params_, &stats);
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
    const SampledReference reference({.tokens = case_.tokens,
                                      .vocab = case_.vocab,
                                      .hidden = case_.hidden,
                                      .weight = operands_.weight,
                                      .hidden_states = operands_.hidden_states,
                                      .labels = labels_,
                                      .gradient_scale = params_.gradient_scale,
                                      .options = case_.options});
    ErrorNorm loss;
    for (int64_t r = 0; r < case_.tokens; ++r) loss.Add(losses_[r], reference.losses()[r]);
    ErrorNorm dx;
    ErrorNorm dw;
    std::mt19937_64 random(2);
    std::vector<float> row(static_cast<size_t>(case_.hidden));
    for (int64_t i = 0; i < kCheckedRows; ++i) {
      const auto r = static_cast<int64_t>(random() % static_cast<uint64_t>(case_.tokens));
      // Half of the vocabulary entries are labels of the batch.
      const int64_t entry =
          i % 2 == 0 ? labels_[r] : static_cast<int64_t>(random() % static_cast<uint64_t>(case_.vocab));
      const std::vector<double> dx_row = reference.InputGradient(r);
      const std::vector<double> dw_row = reference.WeightGradient(entry);
      kernels::Convert(case_.dtype,
                       &dx_[static_cast<size_t>(r * case_.hidden * kernels::SizeOf(case_.dtype))],
                       DataType::kFloat32, row.data(), case_.hidden);
      for (int64_t h = 0; h < case_.hidden; ++h) {
        dx.Add(row[h], dx_row[h]);
        dw.Add(dw_[entry * case_.hidden + h], dw_row[h]);
      }
    }
    result_.relative_error = {loss.Relative(), dx.Relative(), dw.Relative()};
    result_.checked_rows = kCheckedRows;
    result_.checked_vocabulary_rows = kCheckedRows;
  }

  void Time() {
    std::mt19937_64 random(3);
    std::normal_distribution<float> normal;
    operands_.logits.assign(static_cast<size_t>(case_.tokens * case_.vocab), 0.0f);
    operands_.logit_gradients.resize(operands_.logits.size());
    for (float& value : operands_.logit_gradients) value = normal(random);
    operands_.dx.assign(static_cast<size_t>(case_.tokens * case_.hidden), 0.0f);
    operands_.dw.assign(dw_.size(), 0.0f);
    std::vector<BareProducts> limits = AllBareProducts(case_.dtype, operands_);
    params_.weight_gradient = kernels::WeightGradient::kAccumulate;
    progress_("warming up");
    // Also drops what this processor cannot do.
    std::erase_if(limits, [](const BareProducts& way) {
      return !std::all_of(way.products.begin(), way.products.end(), [](const auto& run) { return run(); });
    });
    std::vector<ProductTimes> times(limits.size());
    for (int64_t i = 0; i < case_.repetitions; ++i) {
      progress_("timing, round " + std::to_string(i + 1) + " of " + std::to_string(case_.repetitions));
      result_.all_milliseconds.push_back(
          Milliseconds([this] { kernels::CpuLinearCrossEntropy(params_, nullptr); }));
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

  struct Free {
    void operator()(unsigned char* pointer) const { std::free(pointer); }
  };

  const KernelCase case_;
  const Progress& progress_;
  KernelResult result_;
  BareOperands operands_;  // fp32 copies of the inputs, and the limit's outputs
  std::vector<int64_t> labels_;
  std::vector<unsigned char> weight_;
  std::vector<unsigned char> hidden_states_;
  std::vector<float> losses_;
  std::vector<unsigned char> dx_;
  std::vector<float> dw_;
  std::unique_ptr<unsigned char, Free> workspace_;
  kernels::LinearCrossEntropyParams params_;
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
