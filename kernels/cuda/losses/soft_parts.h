// A row of a vocabulary that lies in parts, with soft targets: what each part finds of it, and what all of
// them make of that. Parts are numbered in the order of the vocabulary; one may be empty.
//
// For hosts and devices. Whoever merges the same numbers comes to the same bits.
#ifndef LOSSD_KERNELS_CUDA_LOSSES_SOFT_PARTS_H_
#define LOSSD_KERNELS_CUDA_LOSSES_SOFT_PARTS_H_

#include <cmath>
#include <cstdint>

#include "kernels/cuda/rows/row_parts.h"
#include "kernels/host_device.h"

namespace lossd::kernels::cuda {

// Sums over the entries but the label's, of exponentials of what is above a maximum; the maxima are those of
// all entries.
struct RowStatistics {
  float largest = -kInfinity;  // s
  float teacher_largest = -kInfinity;
  float most = -kInfinity;  // of s - t, but for logits that are ruled out
  float least = kInfinity;
  double others = 0;      // Σ e^(s - largest)
  double moment = 0;      // Σ e^(s - largest) (s - largest)
  double student = 0;     // Σ e^((s - largest) / T)
  double teacher = 0;     // Σ e^((t - teacher_largest) / T)
  double difference = 0;  // Σ e^((s - largest) / T) (s - t); of kReverseKl only

  LOSSD_HOST_DEVICE float spread() const { return most - least; }
};

// What one part finds in its logits, or all of them. It goes between ranks as it lies in memory.
struct SoftPart {
  RowStatistics sums;
  // The label's s and t, -infinity in parts that do not have it; and the slope f of its s.
  float logit = -kInfinity;
  float teacher_logit = -kInfinity;
  float slope = 1.0f;
  int32_t overflowed = 0;
  int32_t has_label = 0;
};

// `inverse`: 1 / T.
LOSSD_HOST_DEVICE inline SoftPart MergeSoftParts(const SoftPart (&parts)[kMostParts], int32_t count,
                                                 double inverse) {
  SoftPart row;
  RowStatistics& all = row.sums;
  for (int32_t p = 0; p < count; ++p) {
    const RowStatistics& sums = parts[p].sums;
    all.largest = fmaxf(all.largest, sums.largest);
    all.teacher_largest = fmaxf(all.teacher_largest, sums.teacher_largest);
    all.most = fmaxf(all.most, sums.most);
    all.least = fminf(all.least, sums.least);
    if (parts[p].overflowed != 0) row.overflowed = 1;
    if (parts[p].has_label == 0) continue;
    row.has_label = 1;
    row.logit = parts[p].logit;
    row.teacher_logit = parts[p].teacher_logit;
    row.slope = parts[p].slope;
  }
  double others[kMostParts] = {};
  double moments[kMostParts] = {};
  double student[kMostParts] = {};
  double teacher[kMostParts] = {};
  double difference[kMostParts] = {};
  for (int32_t p = 0; p < count; ++p) {
    const RowStatistics& sums = parts[p].sums;
    // A head that has no entries here, or none that is not ruled out, adds nothing.
    if (sums.teacher_largest > -kInfinity) {
      const double teacher_below =
          static_cast<double>(sums.teacher_largest) - static_cast<double>(all.teacher_largest);
      teacher[p] = sums.teacher * exp(teacher_below * inverse);
    }
    if (!(sums.largest > -kInfinity)) continue;
    const double below = static_cast<double>(sums.largest) - static_cast<double>(all.largest);
    const double ratio = exp(below * inverse);
    others[p] = sums.others * exp(below);
    moments[p] = (sums.moment + below * sums.others) * exp(below);
    student[p] = sums.student * ratio;
    difference[p] = sums.difference * ratio;
  }
  all.others = SumInTree(others, count);
  all.moment = SumInTree(moments, count);
  all.student = SumInTree(student, count);
  all.teacher = SumInTree(teacher, count);
  all.difference = SumInTree(difference, count);
  return row;
}

// What one part adds up once it knows the whole row's sums, without the label's entry, or all of them.
struct SoftTerms {
  double parts[2] = {0, 0};  // one or two sums that make up D
  double smoothing = 0;      // Σ C (largest - s); of smoothing only
  int32_t bad = 0;           // 1: an entry of the gradient was none
};

LOSSD_HOST_DEVICE inline SoftTerms MergeSoftTerms(const SoftTerms (&terms)[kMostParts], int32_t count) {
  SoftTerms row;
  double first[kMostParts] = {};
  double second[kMostParts] = {};
  double smoothing[kMostParts] = {};
  for (int32_t p = 0; p < count; ++p) {
    first[p] = terms[p].parts[0];
    second[p] = terms[p].parts[1];
    smoothing[p] = terms[p].smoothing;
    if (terms[p].bad != 0) row.bad = 1;
  }
  row.parts[0] = SumInTree(first, count);
  row.parts[1] = SumInTree(second, count);
  row.smoothing = SumInTree(smoothing, count);
  return row;
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_LOSSES_SOFT_PARTS_H_
