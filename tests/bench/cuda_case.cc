// Checks, then times, the fused step on a CUDA device.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "kernels/cuda/linear_cross_entropy.h"
#include "kernels/cuda/owners.h"
#include "kernels/cuda/portable/cublas_lt.h"
#include "tests/bench/cuda_random.h"
#include "tests/bench/kernel_case.h"
#include "tests/bench/measure.h"

namespace lossd::bench {
namespace {

using kernels::DataType;
using kernels::SizeOf;
using kernels::cuda::BatchRows;
using kernels::cuda::BlasOperand;
using kernels::cuda::CublasLt;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::Event;
using kernels::cuda::LinearCrossEntropy;
using kernels::cuda::PaddedHidden;
using kernels::cuda::Path;
using kernels::cuda::Result;

constexpr int64_t kCheckedRows = 8;
constexpr int64_t kIgnoreIndex = -100;
constexpr double kLossTolerance = 1e-5;
constexpr double kLogitError = 1e-6;  // of a sum in fp32, for each unit of its magnitude
constexpr double kLogitDeviation = 1.5;
constexpr float kZero = 0.0f;
constexpr float kOne = 1.0f;

Result Copy(const std::vector<int32_t>& from, DeviceBuffer* to) {
  const auto bytes = static_cast<int64_t>(from.size() * sizeof(int32_t));
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(bytes, to));
  LOSSD_CUDA_TRY(cudaMemcpy(to->data(), from.data(), static_cast<size_t>(bytes), cudaMemcpyHostToDevice));
  return {};
}

class CudaCase {
 public:
  CudaCase(const KernelCase& kernel_case, const Progress& progress, KernelResult* result)
      : case_(kernel_case),
        progress_(progress),
        result_(*result),
        padded_(PaddedHidden(case_.hidden)),
        shape_{case_.vocab, case_.hidden, case_.dtype} {}

  Result Run() {
    cudaDeviceProp properties{};
    LOSSD_CUDA_TRY(cudaSetDevice(case_.cuda_index));
    LOSSD_CUDA_TRY(cudaGetDeviceProperties(&properties, case_.cuda_index));
    result_.hardware = properties.name;
    LOSSD_CUDA_PASS_ON(kernels::cuda::BestPath(case_.dtype, &path_));
    if (case_.portable) path_ = Path::kPortable;
    LOSSD_CUDA_PASS_ON(CublasLt::Open(&library_));
    progress_("making random data");
    LOSSD_CUDA_PASS_ON(MakeInputs());
    LOSSD_CUDA_PASS_ON(MakeStep());
    if (!result_.error.empty()) return {};
    progress_("checking against fp64");
    LOSSD_CUDA_PASS_ON(Check());
    if (!result_.error.empty()) return {};
    return Time();
  }

 private:
  Result MakeInputs() {
    const int64_t element = SizeOf(case_.dtype);
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(case_.vocab * padded_ * element, &weight_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(case_.tokens * case_.hidden * element, &x_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(case_.tokens * case_.hidden * element, &dx_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(case_.vocab * padded_ * 4, &dw_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(case_.tokens * 4, &losses_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(case_.tokens * 4, &log_sum_exps_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(4, &largest_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(4, &redone_));
    const double deviation = kLogitDeviation / std::sqrt(static_cast<double>(case_.hidden));
    LOSSD_CUDA_PASS_ON(
        FillNormal(case_.dtype, weight_.data(), case_.vocab * padded_, static_cast<float>(deviation), 1));
    LOSSD_CUDA_PASS_ON(FillNormal(case_.dtype, x_.data(), case_.tokens * case_.hidden, 1.0f, 2));
    LOSSD_CUDA_TRY(cudaMemset(redone_.data(), 0, 4));
    if (case_.lse_spread > 0) LOSSD_CUDA_PASS_ON(SpreadLogSumExps());
    LOSSD_CUDA_PASS_ON(kernels::cuda::LargestMagnitude(case_.dtype, weight_.data(), case_.vocab * padded_,
                                                       static_cast<float*>(largest_.data()), nullptr));
    std::mt19937_64 generator(3);
    std::uniform_int_distribution<int64_t> label(0, case_.vocab - 1);
    std::uniform_real_distribution<double> share(0, 1);
    token_labels_.resize(static_cast<size_t>(case_.tokens));
    for (int64_t& y : token_labels_) {
      y = label(generator);
      if (share(generator) < case_.ignored) y = kIgnoreIndex;
    }
    return {};
  }

  // The mean's; but fp16 has no room for it, as trainers know who scale their losses.
  float Scale() const {
    return case_.dtype == DataType::kFloat16 ? 1.0f : 1.0f / static_cast<float>(case_.tokens);
  }

  // All weights get 1 in their first column, so that the first element of a hidden state moves all of its
  // logits.
  Result SpreadLogSumExps() {
    const int64_t element = SizeOf(case_.dtype);
    const auto size = static_cast<size_t>(element);
    std::vector<float> ones(static_cast<size_t>(case_.vocab), 1.0f);
    std::vector<float> offsets(static_cast<size_t>(case_.tokens));
    std::mt19937_64 generator(4);
    std::uniform_real_distribution<float> offset(static_cast<float>(-case_.lse_spread),
                                                 static_cast<float>(case_.lse_spread));
    for (float& value : offsets) value = offset(generator);
    std::vector<char> narrow(std::max(ones.size(), offsets.size()) * size);
    kernels::Convert(DataType::kFloat32, ones.data(), case_.dtype, narrow.data(), case_.vocab);
    LOSSD_CUDA_TRY(cudaMemcpy2D(weight_.data(), static_cast<size_t>(padded_ * element), narrow.data(), size,
                                size, ones.size(), cudaMemcpyHostToDevice));
    kernels::Convert(DataType::kFloat32, offsets.data(), case_.dtype, narrow.data(), case_.tokens);
    LOSSD_CUDA_TRY(cudaMemcpy2D(x_.data(), static_cast<size_t>(case_.hidden * element), narrow.data(), size,
                                size, offsets.size(), cudaMemcpyHostToDevice));
    return {};
  }

  Result MakeStep() {
    LOSSD_CUDA_TRY(cudaDeviceSynchronize());
    size_t total = 0;
    LOSSD_CUDA_TRY(cudaMemGetInfo(&free_before_, &total));
    const int64_t tile_rows =
        std::min(case_.tokens, LinearCrossEntropy::RowsWithin(shape_, path_, case_.workspace_bytes));
    if (tile_rows < 1) {
      result_.error = "not one row fits a workspace of " + std::to_string(case_.workspace_bytes) + " bytes";
      return {};
    }
    LOSSD_CUDA_PASS_ON(
        DeviceBuffer::Create(LinearCrossEntropy::WorkspaceBytes(shape_, path_, tile_rows), &workspace_));
    step_ = std::make_unique<LinearCrossEntropy>(shape_, path_, tile_rows, workspace_.data(), library_.get());
    const kernels::cuda::LabelledRows all{token_labels_.data(), case_.tokens, kIgnoreIndex, Scale()};
    rows_ = step_->Arrange({&all, 1});
    result_.tile_rows = step_->RowsPerTile(rows_.rows);
    LOSSD_CUDA_PASS_ON(Copy(rows_.batch_rows, &batch_rows_));
    LOSSD_CUDA_PASS_ON(Copy(rows_.labels, &labels_));
    LOSSD_CUDA_PASS_ON(Copy(rows_.by_label, &by_label_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(rows_.rows * 4, &scales_));
    LOSSD_CUDA_TRY(cudaMemcpy(scales_.data(), rows_.gradient_scales.data(),
                              static_cast<size_t>(rows_.rows) * 4, cudaMemcpyHostToDevice));
    return {};
  }

  LinearCrossEntropy::Batch Batch(kernels::WeightGradient weight_gradient, bool forward_only) const {
    LinearCrossEntropy::Batch batch;
    batch.rows = rows_.rows;
    batch.batch_rows = static_cast<const int32_t*>(batch_rows_.data());
    batch.labels = static_cast<const int32_t*>(labels_.data());
    batch.gradient_scales = static_cast<const float*>(scales_.data());
    batch.by_label = static_cast<const int32_t*>(by_label_.data());
    batch.weight = weight_.data();
    batch.weight_largest = static_cast<const float*>(largest_.data());
    batch.hidden_type = case_.dtype;
    batch.hidden_states = x_.data();
    batch.losses = static_cast<float*>(losses_.data());
    batch.log_sum_exps = static_cast<float*>(log_sum_exps_.data());
    batch.dx_type = case_.dtype;
    batch.dx = forward_only ? nullptr : dx_.data();
    batch.weight_gradient = forward_only ? kernels::WeightGradient::kNone : weight_gradient;
    batch.dw = static_cast<float*>(dw_.data());
    batch.rows_redone = static_cast<int32_t*>(redone_.data());
    return batch;
  }

  Result Step(kernels::WeightGradient weight_gradient) {
    return step_->Run(Batch(weight_gradient, false), nullptr, nullptr);
  }

  // --- Checking

  Result ReadWide(const DeviceBuffer& buffer, DataType type, int64_t first, int64_t count,
                  std::vector<float>* wide) const {
    std::vector<char> narrow(static_cast<size_t>(count * SizeOf(type)));
    LOSSD_CUDA_TRY(cudaMemcpy(narrow.data(), static_cast<const char*>(buffer.data()) + first * SizeOf(type),
                              narrow.size(), cudaMemcpyDeviceToHost));
    wide->resize(static_cast<size_t>(count));
    kernels::Convert(type, narrow.data(), DataType::kFloat32, wide->data(), count);
    return {};
  }

  Result Check() {
    LOSSD_CUDA_PASS_ON(Step(kernels::WeightGradient::kOverwrite));
    LOSSD_CUDA_TRY(cudaDeviceSynchronize());
    int32_t redone = 0;
    LOSSD_CUDA_TRY(cudaMemcpy(&redone, redone_.data(), 4, cudaMemcpyDeviceToHost));
    result_.rows_redone = redone;
    size_t free_now = 0;
    size_t total = 0;
    LOSSD_CUDA_TRY(cudaMemGetInfo(&free_now, &total));
    result_.peak_bytes = static_cast<int64_t>(free_before_ - free_now);
    LOSSD_CUDA_PASS_ON(ReadWide(weight_, case_.dtype, 0, case_.vocab * padded_, &host_weight_));
    LOSSD_CUDA_PASS_ON(CheckRows());
    LOSSD_CUDA_PASS_ON(CheckVocabulary());
    result_.tolerance = case_.dtype == DataType::kFloat32 ? 1e-5 : 8e-3;
    const RelativeErrors& error = result_.relative_error;
    if (!(error.loss < kLossTolerance + kLogitError * case_.lse_spread) || !(error.dx < result_.tolerance) ||
        !(error.dw < result_.tolerance)) {
      result_.error = "wrong: relative errors of loss, dX, dW are " + std::to_string(error.loss) + ", " +
                      std::to_string(error.dx) + ", " + std::to_string(error.dw);
    }
    return {};
  }

  double Logit(const float* x, int64_t v) const {
    double sum = 0;
    const float* w = &host_weight_[static_cast<size_t>(v * padded_)];
    for (int64_t h = 0; h < case_.hidden; ++h) sum += static_cast<double>(x[h]) * w[h];
    return sum;
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
      LOSSD_CUDA_PASS_ON(ReadWide(x_, case_.dtype, token * case_.hidden, case_.hidden, &x));
      LOSSD_CUDA_PASS_ON(ReadWide(dx_, case_.dtype, token * case_.hidden, case_.hidden, &dx));
      LOSSD_CUDA_PASS_ON(ReadWide(losses_, DataType::kFloat32, token, 1, &loss));
      std::vector<double> z(static_cast<size_t>(case_.vocab));
#pragma omp parallel for
      for (int64_t v = 0; v < case_.vocab; ++v) z[static_cast<size_t>(v)] = Logit(x.data(), v);
      const double largest = *std::max_element(z.begin(), z.end());
      double sum = 0;
      for (const double value : z) sum += std::exp(value - largest);
      const double log_sum_exp = largest + std::log(sum);
      loss_error.Add(loss[0], log_sum_exp - z[static_cast<size_t>(label)]);
      std::vector<double> gradient(static_cast<size_t>(case_.hidden), 0.0);
#pragma omp parallel
      {
        std::vector<double> part(gradient.size(), 0.0);
#pragma omp for nowait
        for (int64_t v = 0; v < case_.vocab; ++v) {
          const double p = std::exp(z[static_cast<size_t>(v)] - log_sum_exp) - (v == label ? 1.0 : 0.0);
          const float* w = &host_weight_[static_cast<size_t>(v * padded_)];
          for (size_t h = 0; h < part.size(); ++h) part[h] += p * w[h];
        }
#pragma omp critical
        for (size_t h = 0; h < part.size(); ++h) gradient[h] += part[h];
      }
      for (size_t h = 0; h < gradient.size(); ++h) dx_error.Add(dx[h], Scale() * gradient[h]);
    }
    result_.relative_error.loss = loss_error.Relative();
    result_.relative_error.dx = dx_error.Relative();
    return {};
  }

  // Some rows of dW: half of them labels, half not. Their p is made from the step's own log-sum-exps, which
  // the losses have vouched for.
  Result CheckVocabulary() {
    std::vector<float> x;
    std::vector<float> log_sum_exps;
    LOSSD_CUDA_PASS_ON(ReadWide(x_, case_.dtype, 0, case_.tokens * case_.hidden, &x));
    LOSSD_CUDA_PASS_ON(ReadWide(log_sum_exps_, DataType::kFloat32, 0, case_.tokens, &log_sum_exps));
    ErrorNorm error;
    result_.checked_vocabulary_rows = std::min(kCheckedRows, case_.vocab);
    for (int64_t i = 0; i < result_.checked_vocabulary_rows; ++i) {
      const int64_t v = i % 2 == 0 ? rows_.labels[static_cast<size_t>(i * (rows_.rows - 1) / kCheckedRows)]
                                   : i * (case_.vocab - 1) / kCheckedRows;
      std::vector<float> dw;
      LOSSD_CUDA_PASS_ON(ReadWide(dw_, DataType::kFloat32, v * padded_, case_.hidden, &dw));
      std::vector<double> expected(static_cast<size_t>(case_.hidden), 0.0);
      for (int64_t r = 0; r < rows_.rows; ++r) {
        const auto token = static_cast<size_t>(rows_.batch_rows[static_cast<size_t>(r)]);
        const float* row = &x[token * static_cast<size_t>(case_.hidden)];
        const double p = std::exp(Logit(row, v) - log_sum_exps[token]);
        const double factor = Scale() * (p - (rows_.labels[static_cast<size_t>(r)] == v ? 1.0 : 0.0));
        for (size_t h = 0; h < expected.size(); ++h) expected[h] += factor * row[h];
      }
      for (size_t h = 0; h < expected.size(); ++h) error.Add(dw[h], expected[h]);
    }
    result_.relative_error.dw = error.Relative();
    return {};
  }

  // --- Timing

  Result Milliseconds(const std::function<Result()>& work, double* milliseconds) {
    LOSSD_CUDA_TRY(cudaEventRecord(begin_.get(), nullptr));
    LOSSD_CUDA_PASS_ON(work());
    LOSSD_CUDA_TRY(cudaEventRecord(end_.get(), nullptr));
    LOSSD_CUDA_TRY(cudaEventSynchronize(end_.get()));
    float elapsed = 0;
    LOSSD_CUDA_TRY(cudaEventElapsedTime(&elapsed, begin_.get(), end_.get()));
    *milliseconds = static_cast<double>(elapsed);
    return {};
  }

  Result LogitsProduct() {
    const BlasOperand x{x_.data(), case_.dtype, case_.hidden, false};
    const BlasOperand weight{weight_.data(), case_.dtype, padded_, true};
    return library_->Multiply(case_.tokens, case_.vocab, case_.hidden, x, weight, logits_.data(), case_.dtype,
                              stride_, {&kOne, &kZero, false}, library_memory_.data(), nullptr);
  }
  Result InputGradientProduct() {
    const BlasOperand z{logits_.data(), case_.dtype, stride_, false};
    const BlasOperand weight{weight_.data(), case_.dtype, padded_, false};
    return library_->Multiply(case_.tokens, case_.hidden, case_.vocab, z, weight, dx_.data(), case_.dtype,
                              case_.hidden, {&kOne, &kZero, false}, library_memory_.data(), nullptr);
  }
  Result WeightGradientProduct() {
    const BlasOperand z{logits_.data(), case_.dtype, stride_, true};
    const BlasOperand x{x_.data(), case_.dtype, case_.hidden, false};
    return library_->Multiply(case_.vocab, case_.hidden, case_.tokens, z, x, dw_.data(), DataType::kFloat32,
                              padded_, {&kOne, &kOne, false}, library_memory_.data(), nullptr);
  }
  Result Limit() {
    LOSSD_CUDA_PASS_ON(LogitsProduct());
    LOSSD_CUDA_PASS_ON(InputGradientProduct());
    return WeightGradientProduct();
  }

  Result Time() {
    stride_ = (case_.vocab + 7) / 8 * 8;
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(case_.tokens * stride_ * SizeOf(case_.dtype), &logits_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(CublasLt::kWorkspaceBytes, &library_memory_));
    LOSSD_CUDA_PASS_ON(Event::Create(&begin_, Event::Timing::kYes));
    LOSSD_CUDA_PASS_ON(Event::Create(&end_, Event::Timing::kYes));
    result_.limit_kind = "cuBLAS, in sequence";
    std::vector<double> ratios;
    std::vector<double> forward;
    std::vector<double> forward_limit;
    for (int64_t round = -2; round < case_.repetitions; ++round) {
      double step = 0;
      double limit = 0;
      double forward_only = 0;
      double logits = 0;
      // The card slows down as it heats up: whoever went first goes second in the next round.
      const auto time_limit = [&] { return Milliseconds([this] { return Limit(); }, &limit); };
      if (round % 2 == 0) LOSSD_CUDA_PASS_ON(time_limit());
      LOSSD_CUDA_PASS_ON(Milliseconds([this] { return Step(kernels::WeightGradient::kAccumulate); }, &step));
      if (round % 2 != 0) LOSSD_CUDA_PASS_ON(time_limit());
      LOSSD_CUDA_PASS_ON(Milliseconds([this] { return LogitsProduct(); }, &logits));
      LOSSD_CUDA_PASS_ON(Milliseconds(
          [this] { return step_->Run(Batch(kernels::WeightGradient::kNone, true), nullptr, nullptr); },
          &forward_only));
      if (round < 0) continue;
      result_.all_milliseconds.push_back(step);
      result_.all_limit_milliseconds.push_back(limit);
      ratios.push_back(step / limit);
      forward.push_back(forward_only);
      forward_limit.push_back(logits);
    }
    result_.milliseconds = Median(result_.all_milliseconds);
    result_.limit_milliseconds = Median(result_.all_limit_milliseconds);
    result_.ratio = Median(ratios);
    result_.stages.push_back({"forward only", Median(forward)});
    result_.stages.push_back({"bare logits product", Median(forward_limit)});
    return TimeStages();
  }

  struct Marks {
    std::vector<std::string> names;
    std::vector<Event> events;
    Result result;
  };
  static void Mark(void* context, const char* name) {
    auto& marks = *static_cast<Marks*>(context);
    Event event;
    if (marks.result.ok()) marks.result = Event::Create(&event, Event::Timing::kYes);
    if (marks.result.ok()) marks.result = {cudaEventRecord(event.get(), nullptr), "cudaEventRecord"};
    marks.names.emplace_back(name);
    marks.events.push_back(std::move(event));
  }

  // Sums over the tiles of one more step, stage by stage.
  Result TimeStages() {
    Marks marks;
    Mark(&marks, "");
    LOSSD_CUDA_PASS_ON(step_->Run(Batch(kernels::WeightGradient::kAccumulate, false), nullptr, nullptr,
                                  &CudaCase::Mark, &marks));
    LOSSD_CUDA_PASS_ON(marks.result);
    LOSSD_CUDA_TRY(cudaDeviceSynchronize());
    for (size_t i = 1; i < marks.events.size(); ++i) {
      float elapsed = 0;
      LOSSD_CUDA_TRY(cudaEventElapsedTime(&elapsed, marks.events[i - 1].get(), marks.events[i].get()));
      const auto same = [&](const StageTime& stage) { return stage.name == marks.names[i]; };
      auto stage = std::find_if(result_.stages.begin(), result_.stages.end(), same);
      if (stage == result_.stages.end()) {
        stage = result_.stages.insert(result_.stages.end(), {marks.names[i], 0.0});
      }
      stage->milliseconds += static_cast<double>(elapsed);
    }
    return {};
  }

  const KernelCase& case_;
  const Progress& progress_;
  KernelResult& result_;
  const int64_t padded_;
  const LinearCrossEntropy::Shape shape_;
  Path path_ = Path::kPortable;
  std::unique_ptr<CublasLt> library_;
  std::unique_ptr<LinearCrossEntropy> step_;
  std::vector<int64_t> token_labels_;
  BatchRows rows_;
  std::vector<float> host_weight_;
  size_t free_before_ = 0;
  int64_t stride_ = 0;
  DeviceBuffer weight_, x_, dx_, dw_, losses_, log_sum_exps_, largest_, redone_, workspace_, batch_rows_,
      labels_, by_label_, scales_, logits_, library_memory_;
  Event begin_, end_;
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
