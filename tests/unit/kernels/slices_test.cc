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

TEST(RowSpan, HasAndSharesRows) {
  const RowSpan rows{6, 4};
  EXPECT_TRUE(rows.Has({6, 4}));
  EXPECT_TRUE(rows.Has({8, 2}));
  EXPECT_TRUE(rows.Has({0, 0}));
  EXPECT_FALSE(rows.Has({5, 2}));
  EXPECT_FALSE(rows.Has({9, 2}));
  EXPECT_EQ(rows.Common({5, 3}), (RowSpan{6, 2}));
  EXPECT_EQ(rows.Common({8, 9}), (RowSpan{8, 2}));
  EXPECT_EQ(rows.Common({0, 3}).count, 0);
  EXPECT_EQ(rows.Common({10, 3}).count, 0);
}

// A vocabulary may be as large as memory: row numbers times replicas stay within 64 bits.
TEST(SliceLayout, LargeNumbersOfRowsDoNotOverflow) {
  const int64_t rows = int64_t{1} << 40;
  EXPECT_EQ(SliceLayout(rows, 1000).Slice(999).end(), rows);
}

}  // namespace
}  // namespace lossd::kernels::slices_test
