#include "server/engine/device/hold_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lossd::engine::hold_table_test {
namespace {

using ::testing::ElementsAre;

constexpr HoldTerms kTerms = {};

// Of the session's batch `number`: `labels` from token `first` on.
HoldTable::Tokens Of(const std::string& session, uint64_t number, int64_t first,
                     const std::vector<int64_t>& labels) {
  return {.name = {session, {number, first}}, .labels = labels, .ignore_index = -100};
}

bool Finds(const HoldTable& table, const HoldTable::Tokens& tokens, std::vector<int32_t>* rows,
           const HoldTerms& terms = kTerms, bool needs_moments = false) {
  rows->clear();
  return table.Find(tokens, std::vector<bool>(tokens.labels.size(), true), terms, needs_moments, rows);
}

TEST(HoldTable, FindsRowsHoweverTheSecondPhaseIsCut) {
  HoldTable table(10);
  const std::vector<int64_t> first = {5, 6, 7};
  const std::vector<int64_t> second = {8, 9};
  ASSERT_EQ(table.Allocate(5), 0);
  table.Add(Of("a", 1, 0, first), 0, kTerms, false);
  table.Add(Of("a", 1, 3, second), 3, kTerms, false);
  const std::vector<int64_t> all = {6, 7, 8, 9};
  std::vector<int32_t> rows;
  EXPECT_TRUE(Finds(table, Of("a", 1, 1, all), &rows));
  EXPECT_THAT(rows, ElementsAre(1, 2, 3, 4));
  rows.clear();
  EXPECT_TRUE(table.Find(Of("a", 1, 1, all), {false, true, false, true}, kTerms, false, &rows));
  EXPECT_THAT(rows, ElementsAre(2, 4));
}

TEST(HoldTable, FindsNothingOfAnotherSessionBatchLabelOrTerms) {
  HoldTable table(10);
  const std::vector<int64_t> labels = {5, -100, 7};
  ASSERT_EQ(table.Allocate(2), 0);
  table.Add(Of("a", 1, 0, labels), 0, kTerms, false);
  const std::vector<int64_t> ends = {7};
  std::vector<int32_t> rows;
  EXPECT_TRUE(Finds(table, Of("a", 1, 2, ends), &rows));
  EXPECT_THAT(rows, ElementsAre(1));
  EXPECT_FALSE(Finds(table, Of("b", 1, 2, ends), &rows));
  EXPECT_FALSE(Finds(table, Of("a", 2, 2, ends), &rows));
  EXPECT_FALSE(Finds(table, Of("a", 1, 3, ends), &rows));
  EXPECT_FALSE(Finds(table, Of("a", 1, 1, ends), &rows)) << "a token that was ignored";
  const std::vector<int64_t> others = {6};
  EXPECT_FALSE(Finds(table, Of("a", 1, 2, others), &rows)) << "another label";
  EXPECT_FALSE(Finds(table, Of("a", 1, 2, ends), &rows, {.logit_scale = 2}));
  EXPECT_FALSE(Finds(table, Of("a", 1, 2, ends), &rows, {.softcap = 2}));
  EXPECT_FALSE(Finds(table, Of("a", 1, 2, ends), &rows, {.bias = Bias::kUse}));
  EXPECT_FALSE(Finds(table, Of("a", 1, 2, ends), &rows, kTerms, true)) << "no moments";
}

TEST(HoldTable, WhatIsHeldAnewTakesThePlaceOfTheOldest) {
  HoldTable table(5);
  const std::vector<int64_t> two = {1, 2};
  std::vector<int32_t> rows;
  for (uint64_t batch = 1; batch <= 3; ++batch) {
    const auto first = table.Allocate(2);
    ASSERT_TRUE(first.has_value());
    table.Add(Of("a", batch, 0, two), *first, kTerms, false);
  }
  EXPECT_FALSE(Finds(table, Of("a", 1, 0, two), &rows));
  EXPECT_TRUE(Finds(table, Of("a", 2, 0, two), &rows));
  EXPECT_THAT(rows, ElementsAre(2, 3));
  EXPECT_TRUE(Finds(table, Of("a", 3, 0, two), &rows));
  EXPECT_THAT(rows, ElementsAre(0, 1));
  EXPECT_FALSE(table.Allocate(6).has_value());
  EXPECT_EQ(table.held_rows(), 4);
}

TEST(HoldTable, WhatWasReleasedOrIsOfOtherWeightsIsGone) {
  HoldTable table(8);
  const std::vector<int64_t> labels = {1, 2, 3};
  const std::vector<int64_t> part = {1, 2};
  std::vector<int32_t> rows;
  table.Add(Of("a", 1, 0, labels), *table.Allocate(3), kTerms, true);
  table.Release(Of("a", 1, 0, part));
  EXPECT_TRUE(Finds(table, Of("a", 1, 0, labels), &rows, kTerms, true)) << "a part is still needed";
  const std::vector<int64_t> rest = {3};
  table.Release(Of("a", 1, 2, rest));
  EXPECT_FALSE(Finds(table, Of("a", 1, 0, labels), &rows));
  table.Add(Of("a", 1, 0, labels), *table.Allocate(3), kTerms, true);
  table.Clear();
  EXPECT_FALSE(Finds(table, Of("a", 1, 0, labels), &rows));
}

TEST(HoldTable, AChunkThatIsSentAgainIsHeldOnce) {
  HoldTable table(8);
  const std::vector<int64_t> labels = {1, 2, 3};
  table.Add(Of("a", 1, 0, labels), *table.Allocate(3), kTerms, false);
  table.Add(Of("a", 1, 0, labels), *table.Allocate(3), kTerms, false);
  EXPECT_EQ(table.held_rows(), 3);
  std::vector<int32_t> rows;
  EXPECT_TRUE(Finds(table, Of("a", 1, 0, labels), &rows));
  EXPECT_THAT(rows, ElementsAre(3, 4, 5));
}

}  // namespace
}  // namespace lossd::engine::hold_table_test
