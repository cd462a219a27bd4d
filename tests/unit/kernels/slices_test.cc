#include "kernels/slices.h"

#include <gtest/gtest.h>

namespace lossd::kernels::slices_test {
namespace {

TEST(SliceLayout, SlicesAndTheirPiecesCoverEveryRowOnceInOrder) {
  for (const int64_t rows : {0, 1, 7, 8, 100, 131072}) {
    for (const int32_t replicas : {1, 2, 3, 8}) {
      for (const int32_t pieces : {1, 2, 5}) {
        const SliceLayout layout(rows, replicas);
        int64_t next = 0;
        for (int32_t slice = 0; slice < replicas; ++slice) {
          EXPECT_EQ(layout.Slice(slice).first, next);
          for (int32_t piece = 0; piece < pieces; ++piece) {
            const RowSpan span = layout.Piece(slice, piece, pieces);
            EXPECT_EQ(span.first, next);
            EXPECT_GE(span.count, 0);
            EXPECT_LE(span.count, rows / replicas / pieces + 2);
            next = span.end();
          }
          EXPECT_EQ(layout.Slice(slice).end(), next);
        }
        EXPECT_EQ(next, rows);
      }
    }
  }
}

TEST(SliceLayout, ASliceIsSteppedByItsOwnerAndTheNextReplica) {
  const SliceLayout layout(100, 3);
  EXPECT_EQ(layout.MirrorOf(2), 0);
  EXPECT_EQ(layout.MirroredBy(0), 2);
  for (int32_t slice = 0; slice < 3; ++slice) {
    EXPECT_EQ(layout.MirroredBy(layout.MirrorOf(slice)), slice);
    EXPECT_TRUE(layout.Steps(slice, slice));
    EXPECT_TRUE(layout.Steps(layout.MirrorOf(slice), slice));
    EXPECT_FALSE(layout.Steps(layout.MirroredBy(slice), slice));
  }
  EXPECT_FALSE(SliceLayout(100, 1).HasMirrors());
}

TEST(SteppedRows, LieOneAfterTheOtherOwnOnesFirst) {
  const SteppedRows last(SliceLayout(10, 3), 2);  // rows 6 to 10, and 3 to 6 of replica 1
  EXPECT_EQ(last.own(), (RowSpan{6, 4}));
  EXPECT_EQ(last.mirrored(), (RowSpan{3, 3}));
  EXPECT_EQ(last.PlaceOf(6), 0);
  EXPECT_EQ(last.PlaceOf(3), 4);
  EXPECT_EQ(last.count(), 7);
  const auto parts = last.PartsOf({5, 3});
  EXPECT_EQ(parts[0].rows, (RowSpan{6, 2}));
  EXPECT_EQ(parts[0].place, 0);
  EXPECT_EQ(parts[1].rows, (RowSpan{5, 1}));
  EXPECT_EQ(parts[1].place, 6);
  EXPECT_TRUE(last.HasAll({3, 7}));
  EXPECT_FALSE(last.HasAll({2, 2}));
  EXPECT_TRUE(SteppedRows(SliceLayout(10, 1), 0).HasAll({0, 10}));
}

// A vocabulary may be as large as memory: row numbers times replicas stay within 64 bits.
TEST(SliceLayout, LargeNumbersOfRowsDoNotOverflow) {
  const int64_t rows = int64_t{1} << 40;
  EXPECT_EQ(SliceLayout(rows, 1000).Slice(999).end(), rows);
}

}  // namespace
}  // namespace lossd::kernels::slices_test
