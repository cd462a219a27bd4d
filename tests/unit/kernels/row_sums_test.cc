// Sums over segments of the vocabulary: their tree, and rows counted in different units.
#include "kernels/cpu/segments/row_sums.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/segment_tree.h"

namespace lossd::kernels::row_sums_test {
namespace {

using cpu::InUnits;
using cpu::RowSums;
using cpu::RowTotals;

std::string TreeOf(int32_t segments) {
  std::vector<std::string> parts;
  for (int32_t i = 0; i < segments; ++i) parts.push_back(std::to_string(i));
  ForEachSegmentSum(segments, [&](const SegmentSum& sum) {
    parts[sum.left] = "(" + parts[sum.left] + "+" + parts[sum.right] + ")";
  });
  return parts[0];
}

TEST(SegmentTree, AddsNeighboursAndMovesUpWhatIsLeftOver) {
  EXPECT_EQ(TreeOf(1), "0");
  EXPECT_EQ(TreeOf(2), "(0+1)");
  EXPECT_EQ(TreeOf(3), "((0+1)+2)");
  EXPECT_EQ(TreeOf(5), "(((0+1)+(2+3))+4)");
  EXPECT_EQ(TreeOf(7), "(((0+1)+(2+3))+((4+5)+6))");
  EXPECT_EQ(TreeOf(8), "(((0+1)+(2+3))+((4+5)+(6+7)))");
}

// What each of so many ranks has left, as "0 2|4|5 6".
std::string UnsummedOf(int32_t ranks) {
  const ShardLayout layout(100000, ranks);
  const Shard shard = layout.ShardOf(0, Segments::kFixed, nullptr);
  std::string all;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    const SegmentBits unsummed =
        UnsummedWithin(kFixedSegments, shard.first_segment(rank), shard.first_segment(rank + 1));
    std::string own;
    for (int32_t i = 0; i < kFixedSegments; ++i) {
      if (Has(unsummed, i)) own += (own.empty() ? "" : " ") + std::to_string(i);
    }
    all += (rank == 0 ? "" : "|") + own;
  }
  return all;
}

TEST(SegmentTree, LeavesARankWhatOnlyOthersCanAddTo) {
  EXPECT_EQ(UnsummedOf(1), "0");
  EXPECT_EQ(UnsummedOf(2), "0|4");
  EXPECT_EQ(UnsummedOf(3), "0|2 4|5 6");
  EXPECT_EQ(UnsummedOf(4), "0|2|4|6");
  EXPECT_EQ(UnsummedOf(5), "0|1 2|3|4|6");
  EXPECT_EQ(UnsummedOf(6), "0|1|2|4|5|6");
  EXPECT_EQ(UnsummedOf(7), "0|1|2|3|4|5|6");
  EXPECT_EQ(UnsummedOf(8), "0|1|2|3|4|5|6|7");
}

// One that has segments of a pair but not all under it must not add what is missing one.
TEST(SegmentTree, AddsOnlyWhatIsWhole) {
  EXPECT_EQ(UnsummedWithin(8, 0, 3), SegmentBits{0b101});
  EXPECT_EQ(UnsummedWithin(8, 3, 8), SegmentBits{0b11000});
  EXPECT_EQ(UnsummedWithin(3, 0, 3), SegmentBits{0b1});
  EXPECT_EQ(SumsWithin(3, 0, 3), SegmentBits{0b10001});
}

// Whoever answers makes those sums that no other rank has made, each once.
TEST(SegmentTree, IsTheSameWhereverItsSumsAreMade) {
  for (int32_t ranks = 1; ranks <= kMostRanks; ++ranks) {
    const ShardLayout layout(100000, ranks);
    const Shard shard = layout.ShardOf(0, Segments::kFixed, nullptr);
    std::vector<std::string> parts;
    for (int32_t i = 0; i < kFixedSegments; ++i) parts.push_back(std::to_string(i));
    SegmentBits left = SumsWithin(kFixedSegments, 0, kFixedSegments);
    const auto add = [&](SegmentBits sums) {
      for (int32_t i = 0; i < kSegmentSums; ++i) {
        if (!Has(sums, i)) continue;
        const SegmentSum& sum = kSegmentTree[i];
        parts[sum.left] = "(" + parts[sum.left] + "+" + parts[sum.right] + ")";
        parts[sum.right] = "?";
      }
    };
    for (int32_t rank = 0; rank < ranks; ++rank) {
      const SegmentBits own =
          SumsWithin(kFixedSegments, shard.first_segment(rank), shard.first_segment(rank + 1));
      add(own);
      left &= ~own;
    }
    add(left);
    EXPECT_EQ(parts[0], TreeOf(kFixedSegments)) << ranks << " ranks";
  }
}

TEST(RowUnits, AreChangedExactlyWhereOffsetsAreTheSame) {
  EXPECT_EQ(InUnits(0.3, {1.5f, 7}, {1.5f, 9}), 0.3 / 4);
  EXPECT_EQ(InUnits(0.3, {1.5f, 7}, {1.5f, 7}), 0.3);
}

TEST(RowUnits, HoldWhereOffsetsAndExponentsAreLarge) {
  // e^(2^24 ln 2 + 3) is e^3 times 2^(2^24), but for the rounding of the offset.
  const float offset = 0x1p24f;
  const int32_t exponent = static_cast<int32_t>(std::lrint(offset / 0.693147180559945309417));
  const double rest = offset - exponent * 0.693147180559945309417;
  EXPECT_NEAR(InUnits(1.0, {offset, 0}, {0, exponent}), std::exp(rest), 1e-8);
  EXPECT_NEAR(InUnits(1.0, {0, exponent}, {offset, 0}), std::exp(-rest), 1e-8);
}

TEST(RowUnits, FarApartGiveZeroOrInfinity) {
  for (const float offset : {1e4f, 1e30f, 3e38f}) {
    EXPECT_EQ(InUnits(1.0, {0, 0}, {offset, 0}), 0);
    EXPECT_EQ(InUnits(1.0, {-offset, 40}, {offset, 40}), 0);
    EXPECT_EQ(InUnits(1.0, {offset, 0}, {-offset, 40}), std::numeric_limits<double>::infinity());
    EXPECT_EQ(InUnits(0.0, {offset, 0}, {-offset, 40}), 0);
  }
}

TEST(RowMerge, CountsInTheUnitsOfTheLargestPart) {
  const RowSums segments[] = {{.sum = 3.0, .units = {0, 10}, .target_logit = 2, .target_exponential = 0.5f},
                              {},  // no entries
                              {.sum = 5.0, .units = {0, 12}, .above = 2}};
  const RowTotals totals = cpu::Merge(segments, 0);
  EXPECT_EQ(totals.units.exponent, 12);
  EXPECT_EQ(totals.sum, 5.75);
  EXPECT_EQ(totals.target_exponential, 0.125);
  EXPECT_EQ(totals.above, 2);
  EXPECT_EQ(totals.smallest_sum, 5.75);  // in the first one's units it is four times that
}

TEST(RowMerge, OfOneSegmentIsThatSegment) {
  const RowSums segments[] = {{.sum = 0.7,
                               .weighted_logits = 0.1,
                               .moment = -0.3,
                               .units = {2.5f, 3},
                               .largest = 4.0f,
                               .target_exponential = 0.2f}};
  const RowTotals totals = cpu::Merge(segments, 0);
  EXPECT_EQ(totals.sum, 0.7);
  EXPECT_EQ(totals.moment, -0.3);
  EXPECT_EQ(totals.weighted_logits, 0.1);
  EXPECT_EQ(totals.target_exponential, 0.2f);
  EXPECT_EQ(totals.largest, 4.0f);
}

}  // namespace
}  // namespace lossd::kernels::row_sums_test
