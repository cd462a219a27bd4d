// What a head on the CPU keeps between batches: weights, gradients, the optimizer's state.
#include <algorithm>
#include <cstring>
#include <utility>

#include "server/engine/device/cpu/cpu_head.h"
#include "server/engine/device/slice_checks.h"

namespace lossd::engine {

using kernels::DataType;
using kernels::OptimizerTensor;
using kernels::RowSpan;
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
  return Create(config, config.vocab_size);
}

absl::StatusOr<CpuGradient> CpuGradient::Create(const HeadConfig& config, int64_t rows) {
  const HeadConfig part = WithRows(config, rows);
  CpuGradient gradient;
  absl::Status status = Take(part.gradient_bytes(), &gradient.dw);
  status.Update(Take(part.bias_gradient_bytes(), &gradient.db));
  if (!status.ok()) return status;
  return gradient;
}

CpuBackend::CpuBackend(HeadConfig config, const HeadShard& shard, HostBuffer* workspace)
    : config_(std::move(config)), shard_(shard), workspace_(workspace), stepped_(shard_.stepped()) {}

absl::Status CpuBackend::Allocate() {
  absl::StatusOr<CpuGradient> gradient = CpuGradient::Create(config_);
  if (!gradient.ok()) return gradient.status();
  own_ = *std::move(gradient);
  absl::Status status;
  if (config_.master_weights) status.Update(Take(config_.weight_bytes(), &weights_));
  for (int i = 0; i < config_.optimizer.moments(); ++i) {
    status.Update(Take(stepped_.count * config_.hidden_size * kFloat, &moments_[static_cast<size_t>(i)]));
    if (config_.bias) status.Update(Take(stepped_.count * kFloat, &bias_moments_[static_cast<size_t>(i)]));
  }
  if (over_replicas()) status.Update(AllocateSlices());
  if (!shard_.whole() || over_replicas()) status.Update(TakeWeights());
  return status;
}

// Nothing of this is left for later: a replica that had no memory then would keep all of them waiting.
absl::Status CpuBackend::AllocateSlices() {
  absl::StatusOr<CpuGradient> sum = CpuGradient::Create(config_, stepped_.count);
  if (!sum.ok()) return sum.status();
  sum_ = *std::move(sum);
  return Take(ScratchBytes(config_, shard_), &sum_scratch_);
}

MemoryPlan CpuBackend::MemoryReport() const {
  MemoryPlan plan = {{"weights", weights_.size() + bias_.size()}};
  if (config_.master_weights) plan.push_back({"master_weights", master_.size()});
  if (own_.dw.size() > 0) plan.push_back({"gradient", own_.dw.size() + own_.db.size()});
  int64_t state = 0;
  for (size_t i = 0; i < moments_.size(); ++i) state += moments_[i].size() + bias_moments_[i].size();
  if (state > 0) plan.push_back({"optimizer", state});
  if (over_replicas()) {
    plan.push_back({"replica_sums", sum_.dw.size() + sum_.db.size() + sum_scratch_.size()});
  }
  return plan;
}

// Weights

absl::Status CpuBackend::PublishWeights(WeightBuffers staged) {
  bias_ = std::move(staged.bias);
  if (!config_.master_weights) {
    weights_ = std::move(staged.weights);
    return absl::OkStatus();
  }
  if (over_replicas()) {
    WriteMaster(staged.weights.data(), AllRows());
    return absl::OkStatus();
  }
  kernels::Convert(DataType::kFloat32, staged.weights.data(), config_.weight_type, weights_.data(),
                   config_.elements());
  master_ = std::move(staged.weights);
  return absl::OkStatus();
}

// All of them become weights; of the master there are only those that are stepped here.
void CpuBackend::WriteMaster(const void* in, const RowSpan& rows) {
  const int64_t first = rows.first * config_.hidden_size;
  kernels::Convert(DataType::kFloat32, in, config_.weight_type,
                   weights_.data() + first * SizeOf(config_.weight_type), rows.count * config_.hidden_size);
  CopyStepped(in, config_.hidden_size * kFloat, rows, &master_);
}

void CpuBackend::NarrowMaster() {
  const int64_t first = stepped_.first * config_.hidden_size;
  kernels::Convert(DataType::kFloat32, master_.data(), config_.weight_type,
                   weights_.data() + first * SizeOf(config_.weight_type),
                   stepped_.count * config_.hidden_size);
}

absl::Status CpuBackend::ReadWeightRows(int64_t first_row, int64_t rows, DataType type, void* out) {
  const int64_t offset = first_row * config_.hidden_size;
  // The type of the weights returns exactly the weights that batches use; other types are converted from the
  // master if there is one, which is more exact.
  if (!config_.master_weights || type == config_.weight_type) {
    kernels::Convert(config_.weight_type, weights_.data() + offset * SizeOf(config_.weight_type), type, out,
                     rows * config_.hidden_size);
    return absl::OkStatus();
  }
  const RowSpan span{first_row, rows};
  if (absl::Status checked = CheckStepped(span, stepped_); !checked.ok()) return checked;
  kernels::Convert(DataType::kFloat32, Floats(master_) + (first_row - stepped_.first) * config_.hidden_size,
                   type, out, rows * config_.hidden_size);
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

void CpuBackend::ForEachSegment(const RowSpan& of,
                                absl::FunctionRef<void(size_t segment, RowSpan rows)> work) const {
  const kernels::Shard shard = shard_.For(kernels::Segments::kFixed);
  for (int32_t segment = shard.first_segment(shard.rank); segment < shard.first_segment(shard.rank + 1);
       ++segment) {
    const int64_t first = std::max(of.first, shard.border(segment) - shard.first());
    const int64_t end = std::min(of.end(), shard.border(segment + 1) - shard.first());
    if (first < end) work(static_cast<size_t>(segment), {first, end - first});
  }
}

absl::StatusOr<GradientTallies> CpuBackend::Summarize(const Gradient* of, double scale) {
  const CpuGradient& gradient = Find(of);
  if (gradient.empty) return GradientTallies{};
  return Tally(gradient, AllRows(), static_cast<float>(scale));
}

GradientTallies CpuBackend::Tally(const CpuGradient& gradient, const RowSpan& of, float scale) const {
  GradientTallies tallies;
  const auto tally = [&](const HostBuffer& values, int64_t columns, const RowSpan& rows) {
    return kernels::CpuTallyGradient(Floats(values) + (rows.first - of.first) * columns, rows.count * columns,
                                     scale);
  };
  ForEachSegment(of, [&](size_t segment, const RowSpan& rows) {
    tallies.dw[segment] = tally(gradient.dw, config_.hidden_size, rows);
    if (config_.bias) tallies.db[segment] = tally(gradient.db, 1, rows);
  });
  return tallies;
}

namespace {

template <class Float>
Float* At(Float* values, int64_t first) {
  return values == nullptr ? nullptr : values + first;
}

}  // namespace

OptimizerTensor CpuBackend::MatrixOf(const float* dw, const RowSpan& rows) {
  const int64_t first = rows.first * config_.hidden_size;
  const int64_t kept = (rows.first - stepped_.first) * config_.hidden_size;
  return {.count = rows.count * config_.hidden_size,
          .gradient = dw,
          .weight_type = config_.weight_type,
          .weight = weights_.data() + first * SizeOf(config_.weight_type),
          .master = config_.master_weights ? Floats(master_) + kept : nullptr,
          .first_moment = At(Floats(moments_[0]), kept),
          .second_moment = At(Floats(moments_[1]), kept)};
}

OptimizerTensor CpuBackend::BiasOf(const float* db, const RowSpan& rows) {
  const int64_t kept = rows.first - stepped_.first;
  return {.count = rows.count,
          .gradient = db,
          .weight_type = DataType::kFloat32,
          .weight = Floats(bias_) + rows.first,
          .first_moment = At(Floats(bias_moments_[0]), kept),
          .second_moment = At(Floats(bias_moments_[1]), kept)};
}

absl::StatusOr<GradientTallies> CpuBackend::ApplyStep(const Gradient* of, const StepArguments& arguments) {
  if (over_replicas()) return SteppedBySlices();
  const absl::StatusOr<kernels::OptimizerCoefficients> coefficients = CoefficientsFor(config_, arguments);
  if (!coefficients.ok()) return coefficients.status();
  if (absl::Status taken = TakeWeights(); !taken.ok()) return taken;
  const CpuGradient& gradient = Find(of);
  const float* const dw = gradient.empty ? nullptr : Floats(gradient.dw);
  const float* const db = gradient.empty ? nullptr : Floats(gradient.db);
  GradientTallies tallies;
  ForEachSegment(AllRows(), [&](size_t segment, const RowSpan& rows) {
    tallies.dw[segment] =
        kernels::CpuApplyOptimizer(MatrixOf(At(dw, rows.first * config_.hidden_size), rows), *coefficients);
    if (!config_.bias) return;
    tallies.db[segment] = kernels::CpuApplyOptimizer(BiasOf(At(db, rows.first), rows), *coefficients);
  });
  return tallies;
}

// State

absl::Status CpuBackend::TakeWeights() {
  absl::Status status;
  if (config_.master_weights) {
    if (master_.size() == 0) status.Update(Take(stepped_.count * config_.hidden_size * kFloat, &master_));
  } else if (weights_.size() == 0) {
    status.Update(Take(config_.weight_bytes(), &weights_));
  }
  if (config_.bias && bias_.size() == 0) status.Update(Take(config_.bias_bytes(), &bias_));
  return status;
}

absl::Status CpuBackend::ReadStepped(const HostBuffer& from, int64_t row_bytes, const RowSpan& rows,
                                     void* out) const {
  if (absl::Status checked = CheckStepped(rows, stepped_); !checked.ok()) return checked;
  if (rows.count == 0) return absl::OkStatus();  // whose memory may be null
  std::memcpy(out, from.data() + (rows.first - stepped_.first) * row_bytes,
              static_cast<size_t>(rows.count * row_bytes));
  return absl::OkStatus();
}

absl::Status CpuBackend::WriteStepped(const void* in, int64_t row_bytes, const RowSpan& rows,
                                      HostBuffer* to) {
  if (absl::Status checked = CheckStepped(rows, stepped_); !checked.ok()) return checked;
  CopyStepped(in, row_bytes, rows, to);
  return absl::OkStatus();
}

void CpuBackend::CopyStepped(const void* in, int64_t row_bytes, const RowSpan& rows, HostBuffer* to) const {
  const RowSpan here = rows.Common(stepped_);
  if (here.count == 0) return;
  std::memcpy(to->data() + (here.first - stepped_.first) * row_bytes,
              static_cast<const std::byte*>(in) + (here.first - rows.first) * row_bytes,
              static_cast<size_t>(here.count * row_bytes));
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
  if (rows == 0) return absl::OkStatus();
  const int64_t row_bytes = entry->tensor.columns * SizeOf(entry->tensor.type);
  if (entry->part != StatePart::kWeight) {
    return ReadStepped(BufferOf(*entry), row_bytes, {first_row, rows}, out);
  }
  std::memcpy(out, BufferOf(*entry).data() + first_row * row_bytes, static_cast<size_t>(rows * row_bytes));
  return absl::OkStatus();
}

absl::Status CpuBackend::WriteState(const std::string& tensor, int64_t first_row, int64_t rows,
                                    const void* in) {
  const absl::StatusOr<StateEntry> entry = FindState(config_, tensor);
  if (!entry.ok()) return entry.status();
  if (absl::Status taken = TakeWeights(); !taken.ok()) return taken;
  if (rows == 0) return absl::OkStatus();
  const int64_t row_bytes = entry->tensor.columns * SizeOf(entry->tensor.type);
  if (entry->part == StatePart::kMaster && over_replicas()) {
    WriteMaster(in, {first_row, rows});
    return absl::OkStatus();
  }
  if (entry->part != StatePart::kWeight) {
    return WriteStepped(in, row_bytes, {first_row, rows}, &BufferOf(*entry));
  }
  std::memcpy(BufferOf(*entry).data() + first_row * row_bytes, in, static_cast<size_t>(rows * row_bytes));
  return absl::OkStatus();
}

absl::Status CpuBackend::RestoreState() {
  if (config_.master_weights && master_.size() > 0) NarrowMaster();
  return absl::OkStatus();
}

}  // namespace lossd::engine
