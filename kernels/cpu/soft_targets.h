// Soft targets of a tile's rows in one segment: the teacher's logits, each row's divergence, and its part of
// the gradient.
// Formulas: "Soft targets" in docs/numerics.md.
#ifndef LOSSD_KERNELS_CPU_SOFT_TARGETS_H_
#define LOSSD_KERNELS_CPU_SOFT_TARGETS_H_

#include <cstdint>

#include "kernels/cpu/products.h"
#include "kernels/cpu/segments/soft_sums.h"
#include "kernels/cpu/simd_kernels.h"
#include "kernels/cpu/soft_tile.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels::cpu {

class SoftTargets {
 public:
  // params.teacher is there. All references outlive it.
  SoftTargets(const LinearCrossEntropyParams& params, const SimdKernels& kernels, const Workspace& tile,
              const SoftTile& soft);

  // Stores the teacher's hidden states of the tile, for all segments.
  void PackTeacherRows(int64_t threads) const;
  // Fills soft.teacher_logits. False if the math library failed.
  bool MultiplyTeacherLogits(int64_t threads) const;

  // Keeps the product's values of these rows and block for later, and gives them back.
  void Keep(int64_t block, Range rows, const float* values) const;
  void CopyKept(int64_t block, Range rows, float* values) const;

  // Fills in what a pass finds of row `r`, once the logits of both heads are there and the row has what the
  // pass before found in all segments.
  void Summarise(SoftPass pass, int64_t r, SoftSums* sums) const;

  // Adds the row's factor times ∂D/∂s T to the values of one block. `logits`: s.
  void AddGradient(int64_t block, int64_t r, const float* logits, float* values) const;

  SoftRow& row(int64_t r) const { return soft_.rows[r]; }
  const Distillation& options() const { return params_.distillation; }

 private:
  struct Piece;  // a few entries of a row, of both heads

  template <class Function>
  void ForEachPiece(int64_t r, Function function) const;
  void ReadTeacher(int64_t r, int64_t first, int64_t count, float* logits) const;
  void FindLargest(int64_t r, SoftSums* sums) const;
  void SumExponentials(int64_t r, SoftSums* sums) const;
  void SumDivergence(int64_t r, SoftSums* sums) const;
  template <class Function>
  auto WithTeacherProducts(const Function& function) const;
  void Probabilities(const SoftRow& row, const float* s, const float* t, int64_t count, float* p,
                     float* q) const;

  const LinearCrossEntropyParams& params_;
  const Teacher& teacher_;
  const SimdKernels& kernels_;
  const Workspace& tile_;
  const SoftTile& soft_;
  const float inverse_;  // 1 / T
};

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_SOFT_TARGETS_H_
