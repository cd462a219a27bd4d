// What each segment of the vocabulary finds out of a row of both heads, in three passes, each of which needs
// what all segments found in the one before.
#ifndef LOSSD_KERNELS_CPU_SEGMENTS_SOFT_SUMS_H_
#define LOSSD_KERNELS_CPU_SEGMENTS_SOFT_SUMS_H_

#include <cstdint>
#include <span>

#include "kernels/cpu/constants.h"
#include "kernels/cpu/divergence.h"
#include "kernels/cpu/soft_tile.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels::cpu {

// A row in one segment. It goes between ranks as it lies in memory.
struct SoftSums {
  // 1: the logits.
  float largest = -kInfinity;  // s
  float teacher_largest = -kInfinity;
  float most = -kInfinity;  // of s - t, but for logits that are ruled out
  float least = kInfinity;
  bool finite = true;
  // 2: their exponentials at temperature T.
  double student = 0;
  double teacher = 0;
  double difference = 0;  // sum of e^(s / T) (s - t)
  // 3: one or two sums of parts of D, and the label's entry where the segment has it.
  double parts = 0;
  double more_parts = 0;
  EntryPair<double> label{};
  double label_difference = 0;  // (s - t) / T
};

enum class SoftPass { kLogits, kExponentials, kDivergence };

// Puts into the row what a pass found in all segments. Every rank merges the same records and so gets the
// same bits. `owner` is the segment that has the label.
void MergeSoft(SoftPass pass, const Distillation& options, std::span<const SoftSums> segments, int32_t owner,
               SoftRow* row);

// T times the derivative of D by s of an entry; `difference` is (s − t) / T.
template <class Real>
Real Slope(const Distillation& options, const EntryPair<Real>& e, Real difference, Real mean) {
  switch (options.divergence) {
    case Divergence::kForwardKl:
      return Difference(e);
    case Divergence::kReverseKl:
      return e.q > 0 ? e.q * (difference - mean) : 0;
    case Divergence::kJensenShannon:
      break;
  }
  const auto beta = static_cast<Real>(options.beta);
  return e.q > 0 ? (1 - beta) * e.q * (MixtureOf(e, beta).log_q - mean) : 0;
}

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_SEGMENTS_SOFT_SUMS_H_
