#include "kernels/blend.h"

#include <algorithm>

#include "kernels/cpu/parallel.h"
#include "kernels/rounding.h"

namespace lossd::kernels {
namespace {

// Elements that a thread takes at once.
constexpr int64_t kPiece = int64_t{1} << 16;
// Elements that fit into the first-level cache with all that is made of them.
constexpr int64_t kBlock = 1024;

// The elements from `first` on as fp32: where they are, or widened into `room`.
const float* Widened(DataType type, const void* values, int64_t first, int64_t count, float* room) {
  if (type == DataType::kFloat32) return static_cast<const float*>(values) + first;
  Convert(type, static_cast<const char*>(values) + first * SizeOf(type), DataType::kFloat32, room, count);
  return room;
}

void Update(const BlendFactors factors, const float* __restrict source, int64_t count,
            float* __restrict target) {
  for (int64_t i = 0; i < count; ++i) target[i] = Blended(factors, target[i], source[i]);
}

void BlendBlock(const BlendTarget& target, const BlendSource& source, const BlendFactors& factors,
                int64_t first, int64_t count) {
  float source_room[kBlock];
  float target_room[kBlock];
  const float* const from = Widened(source.type, source.values, first, count, source_room);
  char* const weight = static_cast<char*>(target.weight) + first * SizeOf(target.weight_type);
  float* worked_on = target_room;
  if (target.master != nullptr) {
    worked_on = target.master + first;
  } else if (target.weight_type == DataType::kFloat32) {
    worked_on = reinterpret_cast<float*>(weight);
  } else {
    Convert(target.weight_type, weight, DataType::kFloat32, target_room, count);
  }
  Update(factors, from, count, worked_on);
  if (target.weight_type != DataType::kFloat32) {
    Convert(DataType::kFloat32, worked_on, target.weight_type, weight, count);
  }
}

}  // namespace

void CpuBlend(const BlendTarget& target, const BlendSource& source, const BlendFactors& factors) {
  const int64_t pieces = CeilDivide(target.count, kPiece);
  const int64_t threads = std::min(cpu::AvailableThreads(), std::max<int64_t>(pieces, 1));
  cpu::ParallelFor(threads, pieces, [&](int64_t piece, int64_t /*thread*/) {
    const int64_t end = std::min((piece + 1) * kPiece, target.count);
    for (int64_t i = piece * kPiece; i < end; i += kBlock) {
      BlendBlock(target, source, factors, i, std::min(kBlock, end - i));
    }
  });
}

}  // namespace lossd::kernels
