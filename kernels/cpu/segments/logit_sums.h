// A row's log-sum-exp from what blocks and segments of the vocabulary have of it.
#ifndef LOSSD_KERNELS_CPU_SEGMENTS_LOGIT_SUMS_H_
#define LOSSD_KERNELS_CPU_SEGMENTS_LOGIT_SUMS_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "kernels/segment_tree.h"

namespace lossd::kernels::cpu {

// A row in one segment, or in all of them. It goes between ranks as it lies in memory.
struct LogitSums {
  double largest = -std::numeric_limits<double>::infinity();
  double sum = 0;      // of e^(s - largest)
  bool finite = true;  // none is NaN or +∞
};

inline LogitSums Merge(std::span<const LogitSums> segments) {
  LogitSums all;
  for (const LogitSums& segment : segments) {
    all.finite = all.finite && segment.finite;
    all.largest = std::fmax(all.largest, segment.largest);
  }
  PerSegment<double> sums{};
  for (size_t i = 0; i < segments.size(); ++i) {
    if (segments[i].sum > 0) sums[i] = segments[i].sum * std::exp(segments[i].largest - all.largest);
  }
  all.sum = SumOverSegments(static_cast<int32_t>(segments.size()), sums);
  return all;
}

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_SEGMENTS_LOGIT_SUMS_H_
