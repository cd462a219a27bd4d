// A moving average of weights: target = decay * target + (1 - decay) * source, element by element in fp32, as
// torch.lerp(target, source, 1 - decay) has it. Rounding points: docs/numerics.md, "Moving averages". Every
// device performs the same operations in the same order, each rounded by itself, so the bits are the same on
// all of them.
#ifndef LOSSD_KERNELS_BLEND_H_
#define LOSSD_KERNELS_BLEND_H_

#include <cstdint>

#include "kernels/data_type.h"
#include "kernels/host_device.h"

namespace lossd::kernels {

// Computed in fp64, each rounded once.
struct BlendFactors {
  float kept = 1;   // decay
  float taken = 0;  // 1 - decay
};
inline BlendFactors BlendFactorsOf(double decay) {
  return {static_cast<float>(decay), static_cast<float>(1 - decay)};
}

// From the end that is nearer. Two that are equal stay what they are, so that an average neither drifts nor
// moves where its source does not. What includes it is compiled without contraction into fused multiply-adds.
LOSSD_HOST_DEVICE inline float Blended(const BlendFactors& factors, float target, float source) {
  const float difference = source - target;
  return factors.taken < 0.5f ? target + factors.taken * difference : source - factors.kept * difference;
}

// What is blended into: 16-bit weights with an fp32 master, which is worked on, or weights that are.
struct BlendTarget {
  int64_t count = 0;  // elements
  DataType weight_type = DataType::kFloat32;
  void* weight = nullptr;
  float* master = nullptr;  // null: the weight itself, widened for the time being, and rounded once
};
// As many elements of the other head's master, in fp32, or of its weights.
struct BlendSource {
  DataType type = DataType::kFloat32;
  const void* values = nullptr;
};

// On the CPU, with its threads. `source` may not overlap the target.
void CpuBlend(const BlendTarget& target, const BlendSource& source, const BlendFactors& factors);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_BLEND_H_
