// The order in which what segments of the vocabulary found is added up: a binary tree of neighbours,
// ((0 + 1) + (2 + 3)) + ..., in which one that is left over moves up. It depends on their number alone, not
// on who computed them or on which device, and so do the bits of a sum.
#ifndef LOSSD_KERNELS_SEGMENT_TREE_H_
#define LOSSD_KERNELS_SEGMENT_TREE_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/host_device.h"
#include "kernels/shard.h"

namespace lossd::kernels {

// Something of each segment; there are never more.
template <class T>
using PerSegment = std::array<T, static_cast<size_t>(kFixedSegments)>;

// One addition of the tree: what is kept for `left` becomes the sum over segments [left, end).
struct SegmentSum {
  int32_t left = 0;
  int32_t right = 0;
  int32_t end = 0;

  // Whether a rank with segments [first, last) can make it by itself.
  constexpr bool IsWithin(int32_t first, int32_t last) const { return left >= first && end <= last; }
};

// All of them, operands first. Fewer segments leave out those whose right operand they have not. Device code
// has them one by one when it is compiled.
inline constexpr int32_t kSegmentSums = kFixedSegments - 1;
inline constexpr SegmentSum kSegmentTree[kSegmentSums] = {{0, 1, 2}, {2, 3, 4}, {4, 5, 6}, {6, 7, 8},
                                                          {0, 2, 4}, {4, 6, 8}, {0, 4, 8}};

// Calls add(SegmentSum) for every addition, operands first.
template <class Add>
constexpr void ForEachSegmentSum(int32_t segments, const Add& add) {
  for (const SegmentSum& sum : kSegmentTree) {
    if (sum.right < segments) add(SegmentSum{sum.left, sum.right, std::min(sum.end, segments)});
  }
}

// The sum of one number of each segment.
inline double SumOverSegments(int32_t segments, PerSegment<double> values) {
  ForEachSegmentSum(segments, [&](const SegmentSum& sum) {
    values[static_cast<size_t>(sum.left)] += values[static_cast<size_t>(sum.right)];
  });
  return values[0];
}

// Some of the segments, or some of the tree's additions: bit i is that of the i-th.
using SegmentBits = uint32_t;
LOSSD_HOST_DEVICE constexpr bool Has(SegmentBits bits, int32_t i) { return (bits >> i & 1) != 0; }

// The additions over `segments` that a rank with segments [first, last) can make by itself.
constexpr SegmentBits SumsWithin(int32_t segments, int32_t first, int32_t last) {
  SegmentBits sums = 0;
  for (int32_t i = 0; i < kSegmentSums; ++i) {
    SegmentSum sum = kSegmentTree[i];
    sum.end = std::min(sum.end, segments);
    if (sum.right < segments && sum.IsWithin(first, last)) sums |= SegmentBits{1} << i;
  }
  return sums;
}

// The segments whose parts it has left when these are made.
constexpr SegmentBits UnsummedWithin(int32_t segments, int32_t first, int32_t last) {
  SegmentBits unsummed = (SegmentBits{1} << last) - (SegmentBits{1} << first);
  const SegmentBits sums = SumsWithin(segments, first, last);
  for (int32_t i = 0; i < kSegmentSums; ++i) {
    if (Has(sums, i)) unsummed &= ~(SegmentBits{1} << kSegmentTree[i].right);
  }
  return unsummed;
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_SEGMENT_TREE_H_
