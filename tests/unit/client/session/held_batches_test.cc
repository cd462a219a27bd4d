// What a client thinks that the server holds: as that forgets it.
#include "client/src/session/held_batches.h"

#include <gtest/gtest.h>

namespace lossd::internal::held_batches_test {
namespace {

TEST(HeldBatches, TheOldestGoesWhenThereIsNoRoom) {
  HeldBatches held;
  held.Note("s", 1, 40, true, 100);
  held.Note("s", 2, 40, true, 100);
  EXPECT_TRUE(held.HasAll("s", 1));
  held.Note("s", 3, 40, true, 100);
  EXPECT_FALSE(held.HasAll("s", 1));
  EXPECT_TRUE(held.HasAll("s", 2));
  EXPECT_TRUE(held.HasAll("s", 3));
}

TEST(HeldBatches, APartOfABatchTakesRoomAndIsNotAll) {
  HeldBatches held;
  held.Note("s", 1, 40, true, 100);
  held.Note("s", 2, 80, false, 100);
  EXPECT_FALSE(held.HasAll("s", 1));
  EXPECT_FALSE(held.HasAll("s", 2));
}

TEST(HeldBatches, ABatchThatComesAgainCountsOnce) {
  HeldBatches held;
  held.Note("s", 1, 60, true, 100);
  held.Note("s", 1, 60, true, 100);
  held.Note("s", 2, 40, true, 100);
  EXPECT_TRUE(held.HasAll("s", 1));
  EXPECT_TRUE(held.HasAll("s", 2));
}

TEST(HeldBatches, AnotherSessionHoldsNothing) {
  HeldBatches held;
  held.Note("s", 1, 60, true, 100);
  EXPECT_FALSE(held.HasAll("t", 1));
  held.Note("t", 2, 60, true, 100);
  EXPECT_FALSE(held.HasAll("t", 1));
  EXPECT_FALSE(held.HasAll("s", 1));
}

}  // namespace
}  // namespace lossd::internal::held_batches_test
