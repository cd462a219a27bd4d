// What a tile holds beside its Workspace where there are soft targets.
#ifndef LOSSD_KERNELS_CPU_SOFT_TILE_H_
#define LOSSD_KERNELS_CPU_SOFT_TILE_H_

#include <cstdint>

#include "kernels/cpu/workspace.h"

namespace lossd::kernels::cpu {

// Sums for a row's divergence, over both heads' logits at temperature T.
struct SoftRow {
  bool finite = false;  // no logit of either is NaN or +∞, nor all of one -∞, and D is a number
  float largest = 0;    // s
  float teacher_largest = 0;
  float student = 0;  // q = e^((s − largest) / T) times this
  float teacher = 0;  // p likewise
  float shift = 0;    // log p − log q = (t − s) / T − shift
  float mean = 0;     // Σ q (s − t) / T of KL(q ‖ p); KL(q ‖ m) of a mixture
  double divergence = 0;
  double label_slope = 0;  // ∂D/∂s T of the label's entry
  double reach = 0;        // of the sum of all ∂D/∂s T's magnitudes: no more than that
  float factor = 0;        // of ∂D/∂s T in the tile
};

// Logits are before bias, scale and softcap, [blocks][padded_rows][block_columns] of the workspace that they
// belong to, in one segment.
struct SoftTile {
  Workspace teacher;  // without dx, sums and what else only a step takes
  float* teacher_logits = nullptr;
  float* logits = nullptr;
  SoftRow* rows = nullptr;  // [rows], those of all segments
};

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_SOFT_TILE_H_
