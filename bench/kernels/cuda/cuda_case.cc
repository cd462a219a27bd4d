// Checks, then times, the fused step on a CUDA device.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "bench/kernels/cuda/cuda_check.h"
#include "bench/kernels/cuda/cuda_products.h"
#include "bench/kernels/cuda/cuda_step.h"
#include "bench/kernels/cuda/cuda_timing.h"
#include "bench/kernels/kernel_case.h"
#include "bench/kernels/measure.h"

namespace lossd::bench {
namespace {

using kernels::WeightGradient;
using kernels::cuda::Result;

constexpr int64_t kCudaWarmUpRounds = 2;

class CudaCase {
 public:
  CudaCase(const KernelCase& kernel_case, const Progress& progress, KernelResult* result)
      : case_(kernel_case), progress_(progress), result_(*result), step_(kernel_case), products_(step_) {}

  Result Run() {
    progress_("making random data");
    LOSSD_CUDA_PASS_ON(step_.Create());
    result_.hardware = step_.hardware();
    result_.batch_bytes = step_.batch_bytes();
    LOSSD_CUDA_PASS_ON(step_.FillInputs());
    LOSSD_CUDA_PASS_ON(step_.Prepare(&result_.error));
    if (!result_.error.empty()) return {};
    result_.tile_rows = step_.tile_rows();
    progress_("checking against fp64");
    LOSSD_CUDA_PASS_ON(step_.Run(WeightGradient::kOverwrite));
    LOSSD_CUDA_PASS_ON(step_.TakenBytes(&result_.peak_bytes));
    LOSSD_CUDA_PASS_ON(step_.RowsRedone(&result_.rows_redone));
    if (case_.entropy_gradient != 0) LOSSD_CUDA_PASS_ON(step_.RunForward());
    LOSSD_CUDA_PASS_ON(CheckCudaStep(step_, &result_));
    if (!result_.error.empty()) return {};
    progress_("timing");
    LOSSD_CUDA_PASS_ON(products_.Create());
    for (int64_t round = -kCudaWarmUpRounds; round < case_.repetitions; ++round) {
      LOSSD_CUDA_PASS_ON(TimeRound(round));
      if (round < 0) Forget();
    }
    Summarize();
    return {};
  }

 private:
  // Times of one part, round by round.
  using Times = std::vector<double>;
  struct Part {
    std::string name;
    Times times;
  };

  Result TimeRound(int64_t round) {
    double step = 0;
    double logits = 0;
    double forward = 0;
    // The card slows down as it heats up: whoever went first goes second in the next round.
    if (round % 2 == 0) LOSSD_CUDA_PASS_ON(TimeLimit());
    LOSSD_CUDA_PASS_ON(TimeOnDevice([this] { return step_.Run(WeightGradient::kAccumulate); }, &step));
    if (round % 2 != 0) LOSSD_CUDA_PASS_ON(TimeLimit());
    LOSSD_CUDA_PASS_ON(TimeOnDevice([this] { return products_.Run(Product::kLogits); }, &logits));
    LOSSD_CUDA_PASS_ON(TimeOnDevice([this] { return step_.RunForward(); }, &forward));
    LOSSD_CUDA_PASS_ON(TimeStages());
    result_.all_milliseconds.push_back(step);
    forward_limits_.push_back(logits);
    forwards_.push_back(forward);
    return {};
  }

  Result TimeLimit() {
    Marks marks;
    marks.Add("begin");
    for (const Product product : kProducts) {
      LOSSD_CUDA_PASS_ON(products_.Run(product));
      marks.Add(ProductName(product));
    }
    double all = 0;
    LOSSD_CUDA_PASS_ON(Keep(marks, &product_parts_, &all));
    result_.all_limit_milliseconds.push_back(all);
    return {};
  }

  // A step of its own: the marks between its stages cost it a little.
  Result TimeStages() {
    Marks marks;
    marks.Add("begin");
    LOSSD_CUDA_PASS_ON(step_.RunStages(&Marks::AddTo, &marks));
    double all = 0;
    return Keep(marks, &stage_parts_, &all);
  }

  // Adds up what has one name, as a stage has in every tile of rows, and keeps the sums as this round's.
  static Result Keep(const Marks& marks, std::vector<Part>* parts, double* all) {
    std::vector<std::pair<std::string, double>> intervals;
    LOSSD_CUDA_PASS_ON(marks.Read(&intervals));
    std::map<std::string, double> sums;
    for (const auto& [name, milliseconds] : intervals) {
      sums[name] += milliseconds;
      *all += milliseconds;
      const auto same = [&name = name](const Part& part) { return part.name == name; };
      if (std::none_of(parts->begin(), parts->end(), same)) parts->push_back({name, {}});
    }
    for (Part& part : *parts) part.times.push_back(sums[part.name]);
    return {};
  }

  void Forget() {
    for (Times* times :
         {&result_.all_milliseconds, &result_.all_limit_milliseconds, &forwards_, &forward_limits_}) {
      times->clear();
    }
    product_parts_.clear();
    stage_parts_.clear();
  }

  static double MedianRatio(const Times& times, const Times& limits) {
    Times ratios;
    for (size_t i = 0; i < times.size(); ++i) ratios.push_back(times[i] / limits[i]);
    return Median(ratios);
  }

  void Summarize() {
    const StepShape shape = step_.Shape();
    result_.limit_kind = "cuBLAS, in sequence";
    result_.ratio = MedianRatio(result_.all_milliseconds, result_.all_limit_milliseconds);
    result_.step = {"fused step", Median(result_.all_milliseconds), StepWork(shape)};
    for (const Part& part : stage_parts_) {
      result_.stages.push_back({part.name, Median(part.times), StageWork(part.name, shape)});
    }
    result_.limit = {"limit", Median(result_.all_limit_milliseconds), {}};
    for (size_t i = 0; i < kProducts.size(); ++i) {
      const Work work =
          ProductWork(kProducts[i], case_.tokens, case_.vocab, case_.hidden, case_.dtype, case_.dtype);
      result_.products.push_back({product_parts_[i].name, Median(product_parts_[i].times), work});
      result_.limit.work += work;
    }
    result_.forward = {"forward only", Median(forwards_), ForwardWork(shape)};
    result_.forward_limit = {"bare logits product", Median(forward_limits_), result_.products[0].work};
    result_.forward_ratio = MedianRatio(forwards_, forward_limits_);
    result_.of_one_product = MedianRatio(result_.all_milliseconds, forward_limits_);
    Times both;
    for (size_t i = 0; i < forwards_.size(); ++i) both.push_back(forwards_[i] + result_.all_milliseconds[i]);
    result_.two_phases = MedianRatio(both, forward_limits_);
    if (case_.teacher_hidden > 0) CountTeacher(shape);
  }

  // The stages are other ones, and what they move is not known.
  void CountTeacher(const StepShape& shape) {
    const double entries = 2 * static_cast<double>(shape.rows) * static_cast<double>(shape.vocab);
    const double own = entries * static_cast<double>(case_.hidden);
    const double teacher = entries * static_cast<double>(case_.teacher_hidden);
    result_.step.work = {3 * own + teacher, 0};
    result_.forward.work = {own + teacher, 0};
    for (Measurement& stage : result_.stages) {
      const bool is_own = stage.name == "logits" || stage.name == "dx" || stage.name == "dw";
      stage.work = {is_own ? own : stage.name == "teacher" ? teacher : 0, 0};
    }
  }

  const KernelCase& case_;
  const Progress& progress_;
  KernelResult& result_;
  CudaStep step_;
  CudaProducts products_;
  Times forwards_;
  Times forward_limits_;
  std::vector<Part> product_parts_;
  std::vector<Part> stage_parts_;
};

}  // namespace

KernelResult RunCudaCase(const KernelCase& kernel_case, const Progress& progress) {
  KernelResult result;
  if (const Result run = CudaCase(kernel_case, progress, &result).Run(); !run.ok()) {
    result.error = run.message();
  }
  return result;
}

}  // namespace lossd::bench
