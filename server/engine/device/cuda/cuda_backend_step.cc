// The steps of a head's optimizer on a CUDA device, and what else is done to whole gradients there.
#include "kernels/cuda/losses/smoothing.h"
#include "kernels/cuda/optimizer/optimizer.h"
#include "kernels/cuda/rows/bias.h"
#include "server/engine/device/cuda/cuda_backend.h"
#include "server/engine/device/cuda/cuda_status.h"
#include "server/engine/device/slice_checks.h"

namespace lossd::engine {

using kernels::DataType;
using kernels::GradientTally;
using kernels::OptimizerCoefficients;
using kernels::RowSpan;
using kernels::WeightGradient;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::PaddedRows;
using kernels::cuda::Result;
using kernels::cuda::StepTensor;

GradientTallies WholeOf(const CudaTallies& tallies) {
  GradientTallies whole;
  whole.dw.front() = tallies[0];
  whole.db.front() = tallies[1];
  return whole;
}

int64_t TallyBytes() {
  return kernels::cuda::TallyScratchBytes() + static_cast<int64_t>(sizeof(CudaTallies));
}

GradientTally* TalliesIn(const DeviceBuffer& buffer) {
  return reinterpret_cast<GradientTally*>(static_cast<char*>(buffer.data()) +
                                          kernels::cuda::TallyScratchBytes());
}

PaddedRows CudaBackend::MatrixShape(int64_t rows) const {
  return {rows, config_.hidden_size, padded_hidden_};
}

CudaBackend::GradientParts CudaBackend::PartsOf(const CudaGradient& gradient) const {
  GradientParts parts{.rows = AllRows()};
  if (gradient.empty) return parts;
  parts.dw.values = Floats(gradient.dw);
  const CudaGradient::Smoothing& uniform = gradient.smoothings[kUniform];
  const CudaGradient::Smoothing& weighted = gradient.smoothings[kWeighted];
  if (!uniform.empty) parts.dw.uniform_smoothing = Floats(uniform.t);
  if (!weighted.empty) parts.dw.weighted_smoothing = Floats(weighted.t);
  parts.dw.class_weights = ClassWeightRows();
  parts.db.values = Floats(gradient.db);
  return parts;
}

const float* CudaBackend::ClassWeightRows() const {
  return config_.class_weights == nullptr ? nullptr : Floats(class_weights_) + shard_.first_row();
}

// Fold

absl::Status CudaBackend::Fold(Gradient* from, Gradient* to) {
  CudaGradient& source = Find(from);
  if (source.empty) return absl::OkStatus();
  const Result result = AddTo(source, Find(to));
  Reset(from);
  return DeviceFailed(result);
}

Result CudaBackend::AddTo(const CudaGradient& from, CudaGradient& to) const {
  LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
  cudaStream_t stream = device_->pipeline.computing();
  const auto store = [](bool empty) {
    return empty ? WeightGradient::kOverwrite : WeightGradient::kAccumulate;
  };
  const int64_t elements = config_.vocab_size * padded_hidden_;
  LOSSD_CUDA_PASS_ON(
      kernels::cuda::AddGradient(Floats(from.dw), elements, store(to.empty), Floats(to.dw), stream));
  if (config_.bias) {
    LOSSD_CUDA_PASS_ON(kernels::cuda::AddGradient(Floats(from.db), config_.vocab_size, store(to.empty),
                                                  Floats(to.db), stream));
  }
  to.empty = false;
  for (size_t i = 0; i < to.smoothings.size(); ++i) {
    if (from.smoothings[i].empty) continue;
    CudaGradient::Smoothing& sum = to.smoothings[i];
    LOSSD_CUDA_PASS_ON(kernels::cuda::AddGradient(Floats(from.smoothings[i].t), padded_hidden_,
                                                  store(sum.empty), Floats(sum.t), stream));
    sum.empty = false;
  }
  return {};
}

// Tallies and steps

absl::StatusOr<GradientTallies> CudaBackend::Summarize(const Gradient* of, double scale) {
  const CudaGradient& gradient = Find(of);
  if (gradient.empty) return GradientTallies{};
  CudaTallies tallies;
  Result result = Tally(PartsOf(gradient), static_cast<float>(scale));
  if (result.ok()) result = ReadTallies(&tallies);
  if (!result.ok()) return DeviceFailed(result);
  return WholeOf(tallies);
}

Result CudaBackend::Tally(const GradientParts& gradient, float scale) const {
  LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
  LOSSD_CUDA_PASS_ON(kernels::cuda::TallyGradient(MatrixShape(gradient.rows.count), gradient.dw, scale,
                                                  device_->tallies.data(), TalliesIn(device_->tallies),
                                                  device_->pipeline.computing()));
  return TallyBias(gradient, scale);
}

Result CudaBackend::TallyBias(const GradientParts& gradient, float scale) const {
  if (!config_.bias) return {};
  LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
  return kernels::cuda::TallyGradient(BiasShape(gradient.rows.count), gradient.db, scale,
                                      device_->tallies.data(), TalliesIn(device_->tallies) + 1,
                                      device_->pipeline.computing());
}

// The second stays as it is if the head has no bias.
Result CudaBackend::ReadTallies(CudaTallies* tallies) const {
  const size_t count = config_.bias ? 2 : 1;
  cudaStream_t stream = device_->pipeline.computing();
  LOSSD_CUDA_TRY(cudaMemcpyAsync(tallies->data(), TalliesIn(device_->tallies), count * sizeof(GradientTally),
                                 cudaMemcpyDeviceToHost, stream));
  LOSSD_CUDA_TRY(cudaStreamSynchronize(stream));
  return {};
}

absl::StatusOr<GradientTallies> CudaBackend::ApplyStep(const Gradient* of, const StepArguments& arguments) {
  if (over_replicas()) return SteppedBySlices();
  const absl::StatusOr<OptimizerCoefficients> coefficients = CoefficientsFor(config_, arguments);
  if (!coefficients.ok()) return coefficients.status();
  CudaTallies tallies;
  const GradientParts gradient = PartsOf(Find(of));
  Result result = StepMatrix(gradient, *coefficients, Floats(weight_largest_));
  if (result.ok() && config_.bias) result = StepBias(gradient, *coefficients);
  if (result.ok()) result = ReadTallies(&tallies);
  if (!result.ok()) return DeviceFailed(result);
  return WholeOf(tallies);
}

namespace {

float* At(const DeviceBuffer& buffer, int64_t first) {
  return buffer.data() == nullptr ? nullptr : static_cast<float*>(buffer.data()) + first;
}

}  // namespace

Result CudaBackend::StepMatrix(const GradientParts& gradient, const OptimizerCoefficients& coefficients,
                               float* largest) {
  LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
  LOSSD_CUDA_PASS_ON(AwaitCopies());
  ForgetWeights();
  const RowSpan& rows = gradient.rows;
  const int64_t kept = (rows.first - stepped_.first) * padded_hidden_;
  const StepTensor matrix{.shape = MatrixShape(rows.count),
                          .gradient = gradient.dw,
                          .weight_type = config_.weight_type,
                          .weight = WeightRow(rows.first),
                          .master = At(master_, kept),
                          .first_moment = At(moments_[0], kept),
                          .second_moment = At(moments_[1], kept),
                          .largest_weight = largest};
  return kernels::cuda::ApplyOptimizer(matrix, coefficients, device_->tallies.data(),
                                       TalliesIn(device_->tallies), device_->pipeline.computing());
}

Result CudaBackend::StepBias(const GradientParts& gradient, const OptimizerCoefficients& coefficients) {
  const RowSpan& rows = gradient.rows;
  const int64_t kept = rows.first - stepped_.first;
  const StepTensor bias{.shape = BiasShape(rows.count),
                        .gradient = gradient.db,
                        .weight_type = DataType::kFloat32,
                        .weight = At(bias_, rows.first),
                        .first_moment = At(bias_moments_[0], kept),
                        .second_moment = At(bias_moments_[1], kept),
                        .largest_weight = Floats(bias_largest_),
                        .is_bias = true};
  return kernels::cuda::ApplyOptimizer(bias, coefficients, device_->tallies.data(),
                                       TalliesIn(device_->tallies) + 1, device_->pipeline.computing());
}

// What label smoothing needs of weights

Result CudaBackend::RefreshSums(const BatchKey& kind, const kernels::Shard& shard) {
  if (kind.teacher.backend != nullptr) return {};
  if (kernels::cuda::SmoothingOf(kind.options) != kernels::cuda::Smoothing::kRankOne) return {};
  const size_t which = UsesClassWeights(kind) ? kWeighted : kUniform;
  if (sums_of_[which] == kind.segments) return {};
  LOSSD_CUDA_PASS_ON(kernels::cuda::SumSegments(
      shape_, shard, weights_.data(), Floats(bias_), which == kWeighted ? Floats(class_weights_) : nullptr,
      Floats(vocabulary_sums_[which]), static_cast<double*>(bias_sums_[which].data()),
      device_->pipeline.computing()));
  sums_of_[which] = kind.segments;
  return {};
}

}  // namespace lossd::engine
