// Computes a row's loss, outputs and gradient factors from its sums (docs/numerics.md).
#ifndef LOSSD_KERNELS_CPU_ROW_FINISH_H_
#define LOSSD_KERNELS_CPU_ROW_FINISH_H_

#include <cstdint>

#include "kernels/cpu/logit_rows.h"
#include "kernels/cpu/row_order.h"
#include "kernels/cpu/segments/row_sums.h"
#include "kernels/cpu/segments/vocabulary.h"
#include "kernels/cpu/simd_kernels.h"
#include "kernels/cpu/soft_tile.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/target_shares.h"

namespace lossd::kernels::cpu {

// Sum of C: of the class weights of the whole vocabulary, or of ones. Used by label smoothing only; 0
// without.
double SumOfClassWeights(const LinearCrossEntropyParams& params, const Vocabulary& vocabulary);

// Sets every return of row `index`: to `token` if it is a token or a rank, otherwise to `number`.
void FillReturns(const RowReturns& returns, int64_t index, float number, int32_t token);

// Whether the row is ignored, or has factors of 0 alone and nothing is wanted that has none: then nothing of
// it can be anything but 0.
bool IsDropped(const LinearCrossEntropyParams& params, int64_t row);
// Writes the results of all such rows.
void ClearDroppedRows(const LinearCrossEntropyParams& params);

// A row of which everything is known.
struct KnownRow {
  int64_t index = 0;  // in the batch
  int64_t label = 0;  // in the whole vocabulary
  float largest = 0;  // magnitude in X, rounded to the weight's type
  const RowTotals& totals;
  SoftRow* soft = nullptr;              // with a teacher; gets its factor
  const TargetSums* targets = nullptr;  // with soft targets on lists
  const TopEntry* top = nullptr;        // the largest logits that returns want, best first
};

// What all segments make a row's gradient of.
struct RowFactors {
  bool overflowed = false;
  bool weightless = false;  // the gradient is 0
  double numerator = 0;     // over S in a segment's units: the scale of its E, or their slope
  float scale = 0;          // of gradients that are formed element by element
  float level = 0;          // of those
  double spread = 0;        // of those, over S as the numerator is
  float largest = 0;        // s, with a spread
  float mean = 0;           // Σ p (s - largest), with a spread
  // With soft targets on a list the numerator is that of all tokens outside it. These are the list's own,
  // and what q is multiplied by.
  double listed_numerator = 0;
  float target = 0;
  float target_gradient = 0;  // of the label's entry
};

class RowFinish {
 public:
  // All references outlive it.
  RowFinish(const LinearCrossEntropyParams& params, const Vocabulary& vocabulary, const SimdKernels& kernels,
            GradientForm form, double class_weight_sum);

  // Writes the row's loss and returns, if this rank answers. If it turns out to have overflowed, they and the
  // factors say so.
  RowFactors Finish(const KnownRow& row) const;

 private:
  double RowWeight(int64_t index) const;
  float ClassWeight(int64_t label) const;
  double SmoothingCost(const RowTotals& row, double cost) const;
  double Entropy(const RowTotals& row) const;
  void WriteReturns(const KnownRow& row, double log_sum_exp, double cost, double z_loss,
                    double divergence) const;
  void WriteOrder(const KnownRow& row, double log_sum_exp) const;
  double LabelWeight() const;
  double EntropyGradient(int64_t index) const;
  // What soft targets make of a row's gradient.
  struct SoftPart {
    double factor = 0;  // of D's slopes; of a teacher's times T
    double others = 0;  // what p is multiplied by, of tokens outside a list
    double listed = 0;  // and of those in it
    double label = 0;   // the label's part
    double reach = 0;   // the most that all entries can add up to
  };
  SoftPart SoftPartOf(const KnownRow& row, const TargetShares& shares) const;
  bool FindFactors(const KnownRow& row, double log_sum_exp, const SoftPart& soft, RowFactors* factors) const;
  RowFactors FinishOverflowed(int64_t index) const;
  bool has_teacher() const { return params_.teacher != nullptr; }
  bool has_lists() const { return params_.target_lists.given(); }
  bool distils() const { return has_teacher() || has_lists(); }

  const LinearCrossEntropyParams& params_;
  const Vocabulary& vocabulary_;
  const SimdKernels& kernels_;
  const GradientForm form_;
  const double class_weight_sum_;
};

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_ROW_FINISH_H_
