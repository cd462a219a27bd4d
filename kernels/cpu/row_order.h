// What depends on the order of a row's logits: how many are above the label's, and which are the largest.
//
// The blocks of a row come from any thread in any order. Neither result depends on it: the one is a count,
// the other the head of one total order, by logit and then by token.
#ifndef LOSSD_KERNELS_CPU_ROW_ORDER_H_
#define LOSSD_KERNELS_CPU_ROW_ORDER_H_

#include <cstdint>

#include "kernels/cpu/workspace.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels::cpu {

// One of a row's largest logits.
struct TopEntry {
  float logit = 0;
  int32_t token = -1;  // in the whole vocabulary; negative: none
};

// How many of a row's largest logits `returns` want.
int32_t WantedTop(const RowReturns& returns);

// Copies the best `kept` of a row's list; what it lacks of them becomes none. `first` is the first entry of
// the segment that the tile is of.
void CopyTop(const Workspace& tile, int64_t r, int64_t first, int32_t kept, TopEntry* to);

// Puts `more` into the list `top`: both have `kept` entries, best first.
void MergeTop(const TopEntry* more, int32_t kept, TopEntry* top);

class RowOrder {
 public:
  // Keeps what `returns` ask for in `tile`, which outlives it and is of RowRecord::kFull if they ask for any.
  RowOrder(const RowReturns& returns, const Workspace& tile);

  bool wants_rank() const { return wants_rank_; }
  bool wants_any() const { return wants_rank_ || kept_ > 0; }

  // Takes logits [first, first + columns) of row `r`, whose largest is `largest` (NaN if any of them is).
  void Add(int64_t r, int64_t first, const float* logits, int64_t columns, float largest) const;

 private:
  void CountAbove(int64_t r, int64_t first, const float* logits, int64_t columns) const;
  void List(int64_t r, int64_t first, const float* logits, int64_t columns) const;
  void Insert(int64_t r, float logit, int32_t token) const;

  const Workspace& tile_;
  const bool wants_rank_;
  const int32_t kept_;  // entries of the list
};

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_ROW_ORDER_H_
