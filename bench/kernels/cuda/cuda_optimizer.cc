#include <algorithm>

#include "bench/kernels/cuda/cuda_random.h"
#include "bench/kernels/cuda/cuda_timing.h"
#include "bench/kernels/measure.h"
#include "bench/kernels/optimizer_case.h"
#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/optimizer/optimizer.h"
#include "kernels/rounding.h"

namespace lossd::bench {
namespace {

using kernels::DataType;
using kernels::GradientTally;
using kernels::SizeOf;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::Result;

constexpr int64_t kAlignment = 8;                  // of rows in elements, as heads have it
constexpr int64_t kSampled = 64;                   // elements of a row that are checked
constexpr int64_t kOptimizerRows = 96;             // rows of which some are
constexpr int64_t kLeastCopy = int64_t{64} << 20;  // below that a copy is no measure of bandwidth

class CudaOptimizer {
 public:
  explicit CudaOptimizer(const OptimizerCase& of)
      : case_(of), stride_(kernels::RoundUp(of.hidden, kAlignment)) {}

  Result Create(OptimizerResult* result) {
    LOSSD_CUDA_TRY(cudaSetDevice(case_.cuda_index));
    cudaDeviceProp properties{};
    LOSSD_CUDA_TRY(cudaGetDeviceProperties(&properties, case_.cuda_index));
    result->hardware = properties.name;
    const int64_t elements = case_.vocab * stride_;
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(elements * 4, &gradient_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(elements * SizeOf(case_.dtype), &weight_));
    if (case_.has_master()) LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(elements * 4, &master_));
    for (DeviceBuffer* moment : {&first_, &second_}) {
      LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(elements * 4, moment));
      LOSSD_CUDA_TRY(cudaMemset(moment->data(), 0, static_cast<size_t>(elements * 4)));
    }
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(kernels::cuda::TallyScratchBytes(), &scratch_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(sizeof(GradientTally), &tally_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(sizeof(float), &largest_));
    LOSSD_CUDA_PASS_ON(FillNormal(DataType::kFloat32, gradient_.data(), elements, kGradientDeviation, 1));
    LOSSD_CUDA_PASS_ON(FillNormal(case_.dtype, weight_.data(), elements, kWeightDeviation, 2));
    if (case_.has_master()) {
      LOSSD_CUDA_PASS_ON(FillNormal(DataType::kFloat32, master_.data(), elements, kWeightDeviation, 2));
    }
    return CreateCopy(result);
  }

  // Bits of rows from all over the matrix after some steps, the first and the last among them.
  Result Check(OptimizerResult* result) {
    const int64_t rows = std::min(kOptimizerRows, case_.vocab);
    OptimizerSample expected(rows * Columns(), case_);
    OptimizerSample actual(rows * Columns(), case_);
    LOSSD_CUDA_PASS_ON(Sample(rows, &expected));
    for (int64_t step = 1; step <= kCheckedStep; ++step) {
      LOSSD_CUDA_PASS_ON(Step(step));
      expected.Apply(case_, step);
    }
    LOSSD_CUDA_PASS_ON(Sample(rows, &actual));
    result->checked = rows * Columns();
    const int64_t differences = Differences(actual, expected);
    if (differences != 0) {
      result->error = std::to_string(differences) + " of " + std::to_string(result->checked) +
                      " elements' values are not those of the CPU's step";
    }
    GradientTally tally;
    LOSSD_CUDA_TRY(cudaMemcpy(&tally, tally_.data(), sizeof(tally), cudaMemcpyDeviceToHost));
    if (result->error.empty()) CheckNorm(case_, tally, result);
    return {};
  }

  // Step and copy in turns; who goes first changes.
  Result Time(OptimizerResult* result) {
    std::vector<double> steps, copies, tallies, ratios;
    for (int64_t round = -2; round < case_.repetitions; ++round) {
      double step = 0;
      double copy = 0;
      double tally = 0;
      if (round % 2 == 0) LOSSD_CUDA_PASS_ON(TimeOnDevice([this] { return Step(kCheckedStep); }, &step));
      LOSSD_CUDA_PASS_ON(TimeOnDevice([this] { return Copy(); }, &copy));
      if (round % 2 != 0) LOSSD_CUDA_PASS_ON(TimeOnDevice([this] { return Step(kCheckedStep); }, &step));
      LOSSD_CUDA_PASS_ON(TimeOnDevice([this] { return Tally(); }, &tally));
      if (round < 0) continue;
      steps.push_back(step);
      copies.push_back(copy);
      tallies.push_back(tally);
      ratios.push_back(step / copy * static_cast<double>(result->copy_bytes) /
                       static_cast<double>(case_.step_bytes()));
    }
    result->step_ms = Median(steps);
    result->copy_ms = Median(copies);
    result->tally_ms = Median(tallies);
    result->ratio = Median(ratios);
    return {};
  }

 private:
  int64_t Columns() const { return std::min(kSampled, case_.hidden); }

  // As many bytes as the step moves, if there is room for them.
  Result CreateCopy(OptimizerResult* result) {
    size_t free = 0;
    size_t total = 0;
    LOSSD_CUDA_TRY(cudaMemGetInfo(&free, &total));
    const int64_t bytes = std::min(case_.step_bytes() / 2, static_cast<int64_t>(free) / 10 * 4) / 256 * 256;
    if (bytes < kLeastCopy) {
      result->error = "a copy of " + std::to_string(bytes) +
                      " bytes is no measure of the bandwidth; take larger --vocab and --hidden, or free "
                      "memory of the device";
      return {};
    }
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(bytes, &from_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(bytes, &to_));
    LOSSD_CUDA_PASS_ON(FillNormal(DataType::kFloat32, from_.data(), bytes / 4, 1.0f, 3));
    result->copy_bytes = 2 * bytes;
    return {};
  }

  Result Step(int64_t step) {
    kernels::cuda::StepTensor tensor;
    tensor.shape = {case_.vocab, case_.hidden, stride_};
    tensor.gradient.values = static_cast<const float*>(gradient_.data());
    tensor.weight_type = case_.dtype;
    tensor.weight = weight_.data();
    tensor.master = static_cast<float*>(master_.data());
    tensor.first_moment = static_cast<float*>(first_.data());
    tensor.second_moment = static_cast<float*>(second_.data());
    tensor.largest_weight = static_cast<float*>(largest_.data());
    return kernels::cuda::ApplyOptimizer(tensor, CoefficientsAt(case_, step), scratch_.data(),
                                         static_cast<GradientTally*>(tally_.data()), nullptr);
  }
  Result Tally() {
    kernels::cuda::GradientRows rows;
    rows.values = static_cast<const float*>(gradient_.data());
    return kernels::cuda::TallyGradient({case_.vocab, case_.hidden, stride_}, rows, 1.0f, scratch_.data(),
                                        static_cast<GradientTally*>(tally_.data()), nullptr);
  }
  Result Copy() {
    LOSSD_CUDA_TRY(cudaMemcpyAsync(to_.data(), from_.data(), static_cast<size_t>(from_.bytes()),
                                   cudaMemcpyDeviceToDevice, nullptr));
    return {};
  }

  Result SampleOf(const DeviceBuffer& buffer, int64_t element, int64_t rows, void* to) const {
    const int64_t columns = Columns();
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = rows == 1 ? 0 : i * (case_.vocab - 1) / (rows - 1);
      // The row's beginning and its end in turns.
      const int64_t column = i % 2 == 0 ? 0 : case_.hidden - columns;
      LOSSD_CUDA_TRY(cudaMemcpy(static_cast<char*>(to) + i * columns * element,
                                static_cast<const char*>(buffer.data()) + (row * stride_ + column) * element,
                                static_cast<size_t>(columns * element), cudaMemcpyDeviceToHost));
    }
    return {};
  }
  Result Sample(int64_t rows, OptimizerSample* sample) const {
    LOSSD_CUDA_PASS_ON(SampleOf(gradient_, 4, rows, sample->gradient.data()));
    LOSSD_CUDA_PASS_ON(SampleOf(weight_, SizeOf(case_.dtype), rows, sample->weight.data()));
    if (case_.has_master()) LOSSD_CUDA_PASS_ON(SampleOf(master_, 4, rows, sample->master.data()));
    LOSSD_CUDA_PASS_ON(SampleOf(first_, 4, rows, sample->first.data()));
    return SampleOf(second_, 4, rows, sample->second.data());
  }

  const OptimizerCase case_;
  const int64_t stride_;
  DeviceBuffer gradient_, weight_, master_, first_, second_, scratch_, tally_, largest_, from_, to_;
};

}  // namespace

OptimizerResult RunCudaOptimizerCase(const OptimizerCase& optimizer_case) {
  OptimizerResult result;
  CudaOptimizer optimizer(optimizer_case);
  Result status = optimizer.Create(&result);
  if (status.ok() && result.error.empty()) status = optimizer.Check(&result);
  if (status.ok() && result.error.empty()) status = optimizer.Time(&result);
  if (!status.ok()) result.error = status.message();
  return result;
}

}  // namespace lossd::bench
