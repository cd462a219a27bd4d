// Describes heads to the step: how large they are, which code they run, and the head that the soft targets
// come from.
#ifndef LOSSD_KERNELS_CUDA_MEMORY_HEADS_H_
#define LOSSD_KERNELS_CUDA_MEMORY_HEADS_H_

#include <cstdint>

#include "kernels/data_type.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/rounding.h"

namespace lossd::kernels::cuda {

class CublasLt;

// Two paths compute the same formulas: see linear_cross_entropy.h.
enum class Path { kHopper, kPortable };

// Rows of W, of its gradient and of what the step keeps of X are padded to this many elements.
inline constexpr int64_t kHiddenAlignment = 8;
constexpr int64_t PaddedHidden(int64_t hidden) { return RoundUp(hidden, kHiddenAlignment); }

struct HeadShape {
  int64_t vocab = 0;
  int64_t hidden = 0;
  DataType weight_type = DataType::kBFloat16;
};

// A teacher has the vocabulary of the head that learns from it; the rest is its own, its path too.
struct TeacherShape {
  int64_t hidden = 0;
  DataType weight_type = DataType::kBFloat16;
  Path path = Path::kPortable;

  bool operator==(const TeacherShape&) const = default;
};

// A teacher of one batch.
struct TeacherHead {
  // Device memory: weight [vocab, PaddedHidden(hidden)], padding zero, 16-byte aligned; hidden_states [*,
  // hidden], not padded, whose rows are those of the batch's own hidden states; bias [vocab] or null.
  Teacher head;
  const float* weight_largest = nullptr;  // one value, of LargestMagnitude(weight)
  const float* bias_largest = nullptr;    // one value, of LargestShift(bias); needed with a bias
  Path path = Path::kPortable;
  CublasLt* library = nullptr;  // needed where `path` is kPortable; may be the learning head's own

  TeacherShape shape() const { return {head.hidden, head.weight_type, path}; }
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_MEMORY_HEADS_H_
