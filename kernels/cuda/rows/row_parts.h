// A row of a vocabulary that lies in parts: what each part finds of it for the returns that need whole rows,
// and what all of them make of that. Parts are numbered in the order of the vocabulary; one may be empty.
//
// For hosts and devices. Whoever merges the same numbers comes to the same bits.
#ifndef LOSSD_KERNELS_CUDA_ROWS_ROW_PARTS_H_
#define LOSSD_KERNELS_CUDA_ROWS_ROW_PARTS_H_

#include <cmath>
#include <cstdint>

#include "kernels/host_device.h"
#include "kernels/shard.h"

namespace lossd::kernels::cuda {

inline constexpr int32_t kMostParts = kFixedSegments;
inline constexpr float kInfinity = __builtin_huge_valf();

// ((0 + 1) + (2 + 3)) + ... of the first `count`; the others are not looked at.
template <int kMost>
LOSSD_HOST_DEVICE double SumInTree(double (&values)[kMost], int32_t count) {
  for (int step = 1; step < kMost; step *= 2) {
    for (int i = 0; i + step < count; i += 2 * step) values[i] = values[i] + values[i + step];
  }
  return values[0];
}

// What one part finds of a row, or all of them. It goes between ranks as it lies in memory.
struct RowPart {
  double sum = 0;     // of e^(s - largest)
  double moment = 0;  // of e^(s - largest) (s - largest)
  float largest = -kInfinity;
  int32_t token = -1;  // of the largest, numbered by the whole vocabulary; the first of equal ones
  int32_t above = 0;   // logits above the label's
};

LOSSD_HOST_DEVICE inline RowPart MergeRowParts(const RowPart (&parts)[kMostParts], int32_t count) {
  RowPart row;
  for (int32_t p = 0; p < count; ++p) {
    row.above += parts[p].above;
    if (parts[p].largest > row.largest) {
      row.largest = parts[p].largest;
      row.token = parts[p].token;
    }
  }
  double sums[kMostParts] = {};
  double moments[kMostParts] = {};
  for (int32_t p = 0; p < count; ++p) {
    const RowPart& part = parts[p];
    if (!(part.sum > 0)) continue;
    const double below = static_cast<double>(part.largest) - static_cast<double>(row.largest);
    const double ratio = exp(below);
    sums[p] = ratio * part.sum;
    // Terms of one sign.
    moments[p] = ratio * (part.moment + below * part.sum);
  }
  row.sum = SumInTree(sums, count);
  row.moment = SumInTree(moments, count);
  return row;
}

LOSSD_HOST_DEVICE inline double EntropyOf(const RowPart& row) { return log(row.sum) - row.moment / row.sum; }

// A logit and its token: larger ones are better, and no two of a row are the same (largest_logits.cuh).
using Key = uint64_t;

// The place of a part's key number `i` among the keys of all parts, 0 the best. A row has `count` keys of
// each part, part p's at keys + p * stride, best first, and 0 where a part has fewer entries.
LOSSD_HOST_DEVICE inline int32_t PlaceOfKey(const Key* keys, int64_t stride, int32_t parts, int32_t count,
                                            int32_t part, int32_t i) {
  const Key own = keys[part * stride + i];
  int32_t place = i;
  for (int32_t p = 0; p < parts; ++p) {
    if (p == part) continue;
    const Key* others = keys + p * stride;
    int32_t better = 0;
    for (int32_t end = count; better < end;) {
      const int32_t middle = better + (end - better) / 2;
      if (others[middle] > own) {
        better = middle + 1;
      } else {
        end = middle;
      }
    }
    place += better;
  }
  return place;
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_ROW_PARTS_H_
