// What a head on the CPU keeps between batches: weights, gradients, the optimizer's state.
#include <algorithm>
#include <cstring>
#include <utility>

#include "server/engine/device/cpu/cpu_head.h"

namespace lossd::engine {

using kernels::DataType;
using kernels::GradientTally;
using kernels::OptimizerTensor;
using kernels::SizeOf;
using kernels::WeightGradient;

namespace {

absl::Status Take(int64_t bytes, HostBuffer* buffer) {
  absl::StatusOr<HostBuffer> taken = HostBuffer::Create(bytes, Commit::kNow);
  if (!taken.ok()) return taken.status();
  *buffer = *std::move(taken);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CpuGradient> CpuGradient::Create(const HeadConfig& config) {
  CpuGradient gradient;
  absl::Status status = Take(config.gradient_bytes(), &gradient.dw);
  status.Update(Take(config.bias_gradient_bytes(), &gradient.db));
  if (!status.ok()) return status;
  return gradient;
}

CpuBackend::CpuBackend(HeadConfig config, HostBuffer* workspace)
    : config_(std::move(config)), workspace_(workspace) {}

absl::Status CpuBackend::Allocate() {
  absl::StatusOr<CpuGradient> gradient = CpuGradient::Create(config_);
  if (!gradient.ok()) return gradient.status();
  own_ = *std::move(gradient);
  absl::Status status;
  if (config_.master_weights) status.Update(Take(config_.weight_bytes(), &weights_));
  for (int i = 0; i < config_.optimizer.moments(); ++i) {
    status.Update(Take(config_.elements() * 4, &moments_[static_cast<size_t>(i)]));
    status.Update(Take(config_.bias_bytes(), &bias_moments_[static_cast<size_t>(i)]));
  }
  return status;
}

MemoryPlan CpuBackend::MemoryReport() const {
  MemoryPlan plan = {{"weights", weights_.size() + bias_.size()}};
  if (config_.master_weights) plan.push_back({"master_weights", master_.size()});
  if (own_.dw.size() > 0) plan.push_back({"gradient", own_.dw.size() + own_.db.size()});
  int64_t state = 0;
  for (size_t i = 0; i < moments_.size(); ++i) state += moments_[i].size() + bias_moments_[i].size();
  if (state > 0) plan.push_back({"optimizer", state});
  return plan;
}

// Weights

absl::Status CpuBackend::PublishWeights(WeightBuffers staged) {
  bias_ = std::move(staged.bias);
  if (config_.master_weights) {
    master_ = std::move(staged.weights);
    NarrowMaster();
  } else {
    weights_ = std::move(staged.weights);
  }
  return absl::OkStatus();
}

void CpuBackend::NarrowMaster() {
  kernels::Convert(DataType::kFloat32, master_.data(), config_.weight_type, weights_.data(),
                   config_.elements());
}

absl::Status CpuBackend::ReadWeightRows(int64_t first_row, int64_t rows, DataType type, void* out) {
  const int64_t offset = first_row * config_.hidden_size;
  // The type of the weights returns exactly the weights that batches use; other types are converted from the
  // master if there is one, which is more exact.
  const bool from_master = config_.master_weights && type != config_.weight_type;
  const HostBuffer& from = from_master ? master_ : weights_;
  const DataType from_type = from_master ? DataType::kFloat32 : config_.weight_type;
  kernels::Convert(from_type, from.data() + offset * SizeOf(from_type), type, out,
                   rows * config_.hidden_size);
  return absl::OkStatus();
}

absl::Status CpuBackend::ReadBias(int64_t first_row, int64_t rows, float* out) {
  std::memcpy(out, Floats(bias_) + first_row, static_cast<size_t>(rows) * sizeof(float));
  return absl::OkStatus();
}

// Gradients

namespace {

void ReadFloats(const CpuGradient& gradient, const HostBuffer& buffer, int64_t first, int64_t count,
                float* out) {
  if (gradient.empty) {
    std::fill_n(out, count, 0.0f);
  } else {
    std::memcpy(out, reinterpret_cast<const float*>(buffer.data()) + first,
                static_cast<size_t>(count) * sizeof(float));
  }
}

}  // namespace

absl::Status CpuBackend::ReadGradient(const Gradient* of, int64_t first_row, int64_t rows, float* out) {
  const CpuGradient& gradient = Find(of);
  ReadFloats(gradient, gradient.dw, first_row * config_.hidden_size, rows * config_.hidden_size, out);
  return absl::OkStatus();
}

absl::Status CpuBackend::ReadBiasGradient(const Gradient* of, int64_t first_row, int64_t rows, float* out) {
  const CpuGradient& gradient = Find(of);
  ReadFloats(gradient, gradient.db, first_row, rows, out);
  return absl::OkStatus();
}

absl::Status CpuBackend::Fold(Gradient* from_gradient, Gradient* to_gradient) {
  CpuGradient& from = Find(from_gradient);
  CpuGradient& to = Find(to_gradient);
  if (from.empty) return absl::OkStatus();
  const WeightGradient store = to.empty ? WeightGradient::kOverwrite : WeightGradient::kAccumulate;
  kernels::CpuAddGradient(Floats(from.dw), config_.elements(), store, Floats(to.dw));
  if (config_.bias) kernels::CpuAddGradient(Floats(from.db), config_.vocab_size, store, Floats(to.db));
  to.empty = false;
  from.empty = true;
  return absl::OkStatus();
}

absl::Status CpuBackend::WriteGradient(Gradient* of, int64_t first_row, int64_t rows, const float* dw,
                                       const float* bias) {
  CpuGradient& gradient = Find(of);
  const int64_t offset = first_row * config_.hidden_size;
  std::memcpy(Floats(gradient.dw) + offset, dw,
              static_cast<size_t>(rows * config_.hidden_size) * sizeof(float));
  const auto bias_bytes = static_cast<size_t>(rows) * sizeof(float);
  if (bias != nullptr) {
    std::memcpy(Floats(gradient.db) + first_row, bias, bias_bytes);
  } else if (config_.bias) {
    std::memset(Floats(gradient.db) + first_row, 0, bias_bytes);
  }
  gradient.empty = false;
  return absl::OkStatus();
}

// The optimizer

absl::StatusOr<GradientStats> CpuBackend::Summarize(const Gradient* of, double scale) {
  const CpuGradient& gradient = Find(of);
  if (gradient.empty) return GradientStats{};
  const auto factor = static_cast<float>(scale);
  const GradientTally dw = kernels::CpuTallyGradient(Floats(gradient.dw), config_.elements(), factor);
  GradientTally db;
  if (config_.bias) db = kernels::CpuTallyGradient(Floats(gradient.db), config_.vocab_size, factor);
  return StatsOf(dw, db);
}

OptimizerTensor CpuBackend::MatrixOf(const CpuGradient& gradient) {
  return {.count = config_.elements(),
          .gradient = gradient.empty ? nullptr : Floats(gradient.dw),
          .weight_type = config_.weight_type,
          .weight = weights_.data(),
          .master = config_.master_weights ? Floats(master_) : nullptr,
          .first_moment = Floats(moments_[0]),
          .second_moment = Floats(moments_[1])};
}

OptimizerTensor CpuBackend::BiasOf(const CpuGradient& gradient) {
  return {.count = config_.vocab_size,
          .gradient = gradient.empty ? nullptr : Floats(gradient.db),
          .weight_type = DataType::kFloat32,
          .weight = bias_.data(),
          .first_moment = Floats(bias_moments_[0]),
          .second_moment = Floats(bias_moments_[1])};
}

absl::StatusOr<GradientStats> CpuBackend::ApplyStep(const Gradient* of, const StepArguments& arguments) {
  const absl::StatusOr<kernels::OptimizerCoefficients> coefficients = CoefficientsFor(config_, arguments);
  if (!coefficients.ok()) return coefficients.status();
  if (absl::Status taken = TakeWeights(); !taken.ok()) return taken;
  const CpuGradient& gradient = Find(of);
  const GradientTally dw = kernels::CpuApplyOptimizer(MatrixOf(gradient), *coefficients);
  GradientTally db;
  if (config_.bias) db = kernels::CpuApplyOptimizer(BiasOf(gradient), *coefficients);
  return StatsOf(dw, db);
}

// State

absl::Status CpuBackend::TakeWeights() {
  HostBuffer& weights = config_.master_weights ? master_ : weights_;
  absl::Status status;
  if (weights.size() == 0) status.Update(Take(config_.staged_bytes(), &weights));
  if (config_.bias && bias_.size() == 0) status.Update(Take(config_.bias_bytes(), &bias_));
  return status;
}

HostBuffer& CpuBackend::BufferOf(const StateEntry& entry) {
  const bool of_bias = entry.of == StateOf::kBias;
  switch (entry.part) {
    case StatePart::kWeight:
      return of_bias ? bias_ : weights_;
    case StatePart::kMaster:
      return master_;
    case StatePart::kFirstMoment:
      return of_bias ? bias_moments_[0] : moments_[0];
    case StatePart::kSecondMoment:
      return of_bias ? bias_moments_[1] : moments_[1];
  }
  return weights_;
}

absl::Status CpuBackend::ReadState(const std::string& tensor, int64_t first_row, int64_t rows, void* out) {
  const absl::StatusOr<StateEntry> entry = FindState(config_, tensor);
  if (!entry.ok()) return entry.status();
  if (absl::Status taken = TakeWeights(); !taken.ok()) return taken;
  const int64_t row_bytes = entry->tensor.columns * SizeOf(entry->tensor.type);
  std::memcpy(out, BufferOf(*entry).data() + first_row * row_bytes, static_cast<size_t>(rows * row_bytes));
  return absl::OkStatus();
}

absl::Status CpuBackend::WriteState(const std::string& tensor, int64_t first_row, int64_t rows,
                                    const void* in) {
  const absl::StatusOr<StateEntry> entry = FindState(config_, tensor);
  if (!entry.ok()) return entry.status();
  if (absl::Status taken = TakeWeights(); !taken.ok()) return taken;
  const int64_t row_bytes = entry->tensor.columns * SizeOf(entry->tensor.type);
  std::memcpy(BufferOf(*entry).data() + first_row * row_bytes, in, static_cast<size_t>(rows * row_bytes));
  return absl::OkStatus();
}

absl::Status CpuBackend::RestoreState() {
  if (config_.master_weights && master_.size() > 0) NarrowMaster();
  return absl::OkStatus();
}

}  // namespace lossd::engine
