// What a head on the CPU takes of another one.
#include <cstring>

#include "kernels/blend.h"
#include "server/engine/device/cpu/cpu_head.h"

namespace lossd::engine {

using kernels::DataType;

namespace {

void Copy(const HostBuffer& from, HostBuffer* to) {
  if (from.size() > 0) std::memcpy(to->data(), from.data(), static_cast<size_t>(from.size()));
}

}  // namespace

void CpuBackend::CopyWeights(const CpuBackend& source) {
  Copy(source.weights_, &weights_);
  if (!config_.master_weights) return;
  if (source.config_.master_weights) return Copy(source.master_, &master_);
  kernels::Convert(config_.weight_type, source.weights_.data() + stepped_.first * WeightRowBytes(),
                   DataType::kFloat32, master_.data(), stepped_.count * config_.hidden_size);
}

absl::Status CpuBackend::BlendWeights(const HeadBackend& other, double decay) {
  const auto& source = static_cast<const CpuBackend&>(other);  // of the same device
  if (absl::Status taken = TakeWeights(); !taken.ok()) return taken;
  if (decay == 0) {
    CopyWeights(source);
    Copy(source.bias_, &bias_);
    return absl::OkStatus();
  }
  const kernels::BlendFactors factors = kernels::BlendFactorsOf(decay);
  const bool from_master = source.config_.master_weights;
  const kernels::RowSpan rows = from_master || config_.master_weights ? stepped_ : AllRows();
  const int64_t first = rows.first * WeightRowBytes();
  kernels::CpuBlend({.count = rows.count * config_.hidden_size,
                     .weight_type = config_.weight_type,
                     .weight = weights_.data() + first,
                     .master = config_.master_weights ? Floats(master_) : nullptr},
                    {.type = from_master ? DataType::kFloat32 : config_.weight_type,
                     .values = from_master ? source.master_.data() : source.weights_.data() + first},
                    factors);
  if (!config_.bias) return absl::OkStatus();
  kernels::CpuBlend({.count = config_.vocab_size, .weight = bias_.data()}, {.values = source.bias_.data()},
                    factors);
  return absl::OkStatus();
}

absl::Status CpuBackend::CopyOptimizer(const HeadBackend& other) {
  const auto& source = static_cast<const CpuBackend&>(other);
  for (size_t i = 0; i < moments_.size(); ++i) {
    Copy(source.moments_[i], &moments_[i]);
    Copy(source.bias_moments_[i], &bias_moments_[i]);
  }
  return absl::OkStatus();
}

}  // namespace lossd::engine
