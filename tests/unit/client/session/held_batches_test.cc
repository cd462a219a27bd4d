// What a client thinks that the server holds: as that forgets it.
#include "client/src/session/held_batches.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "lossd/client.h"

namespace lossd::internal::held_batches_test {
namespace {

constexpr int64_t kHidden = 32;
constexpr int64_t kRowBytes = kHidden * 4;

const HeadConfig kHead{.name = "h", .vocab_size = 10, .hidden_size = kHidden};

class HeldBatchesTest : public ::testing::Test {
 protected:
  Batch BatchOf(uint64_t number) const { return {.labels = labels_, .hold = number}; }
  // The server holds so many of the four tokens, and of all batches so many rows.
  void Note(uint64_t number, int64_t tokens = 4, int64_t rows = 10) {
    held_.Note("s", kHead, BatchOf(number), tokens, rows * kRowBytes);
  }
  bool HasAll(uint64_t number) const { return held_.HasAll("s", BatchOf(number)); }

  std::vector<int64_t> labels_ = {1, 2, -100, 3, 4};
  HeldBatches held_;
};

TEST_F(HeldBatchesTest, TheOldestGoesWhenThereIsNoRoom) {
  Note(1);
  Note(2);
  EXPECT_TRUE(HasAll(1));
  Note(3);
  EXPECT_FALSE(HasAll(1));
  EXPECT_TRUE(HasAll(2));
  EXPECT_TRUE(HasAll(3));
}

TEST_F(HeldBatchesTest, APartOfABatchTakesRoomAndIsNotAll) {
  Note(1);
  Note(2);
  Note(3, 3);
  EXPECT_FALSE(HasAll(1));
  EXPECT_TRUE(HasAll(2));
  EXPECT_FALSE(HasAll(3));
}

TEST_F(HeldBatchesTest, ABatchThatComesAgainCountsOnceAndAnew) {
  Note(1);
  Note(1);
  Note(2);
  EXPECT_TRUE(HasAll(1));
  Note(1, 0);
  EXPECT_FALSE(HasAll(1));
  Note(3);
  EXPECT_TRUE(HasAll(2));
}

TEST_F(HeldBatchesTest, WhatIsForgottenMakesRoom) {
  Note(1);
  Note(2);
  held_.Forget(2);
  EXPECT_FALSE(HasAll(2));
  Note(3);
  EXPECT_TRUE(HasAll(1));
}

TEST_F(HeldBatchesTest, OtherLabelsAreNotHeld) {
  Note(1);
  labels_[2] = 5;
  EXPECT_FALSE(HasAll(1));
  labels_[2] = -100;
  Batch batch = BatchOf(1);
  EXPECT_TRUE(held_.HasAll("s", batch));
  batch.ignore_index = 1;
  EXPECT_FALSE(held_.HasAll("s", batch));
  batch = BatchOf(1);
  batch.hidden_type = DataType::kBFloat16;
  EXPECT_FALSE(held_.HasAll("s", batch));
}

TEST_F(HeldBatchesTest, AnotherSessionHoldsNothing) {
  Note(1);
  EXPECT_FALSE(held_.HasAll("t", BatchOf(1)));
  held_.Note("t", kHead, BatchOf(2), 4, 10 * kRowBytes);
  EXPECT_FALSE(held_.HasAll("t", BatchOf(1)));
  EXPECT_FALSE(HasAll(1));
}

TEST_F(HeldBatchesTest, ATokenCountsAsAtTheServer) {
  EXPECT_EQ(HeldBatches::BytesOf(kHead, BatchOf(1)), 4 * kRowBytes);
  HeadConfig narrow = kHead;
  narrow.hidden_size = 3;
  EXPECT_EQ(HeldBatches::BytesOf(narrow, BatchOf(1)), 4 * 64);
}

}  // namespace
}  // namespace lossd::internal::held_batches_test
