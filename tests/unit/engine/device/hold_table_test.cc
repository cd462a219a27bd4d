#include "server/engine/device/hold_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace lossd::engine::hold_table_test {
namespace {

using ::testing::ElementsAre;

constexpr HoldTerms kTerms = {};

// Tokens of a session's batch `number`, from token `first` on.
HoldTable::Tokens Of(const std::string& session, uint64_t number, int64_t first,
                     const std::vector<int32_t>& labels) {
  return {.name = {session, {number, first}}, .labels = labels};
}

// Holds all of the tokens, one after the other.
void Keep(HoldTable& table, const HoldTable::Tokens& tokens, Moments moments = Moments::kNo) {
  const auto first = table.Allocate(static_cast<int64_t>(tokens.labels.size()));
  ASSERT_TRUE(first.has_value());
  std::vector<int32_t> rows(tokens.labels.size());
  std::iota(rows.begin(), rows.end(), static_cast<int32_t>(*first));
  table.Add(tokens, rows, kTerms, moments);
}

// Finds all of them.
bool Finds(const HoldTable& table, const HoldTable::Tokens& tokens, std::vector<int32_t>* rows,
           const HoldTerms& terms = kTerms, Moments needed = Moments::kNo) {
  rows->clear();
  return table.Find(tokens, std::vector<bool>(tokens.labels.size(), true), terms, needed, rows);
}

TEST(HoldTable, FindsRowsHoweverTheSecondPhaseIsCut) {
  HoldTable table(10);
  Keep(table, Of("a", 1, 0, {5, 6, 7}));
  Keep(table, Of("a", 1, 3, {8, 9}));
  std::vector<int32_t> rows;
  EXPECT_TRUE(Finds(table, Of("a", 1, 1, {6, 7, 8, 9}), &rows));
  EXPECT_THAT(rows, ElementsAre(1, 2, 3, 4));
  rows.clear();
  const std::vector<bool> wanted = {false, true, false, true};
  EXPECT_TRUE(table.Find(Of("a", 1, 1, {6, 7, 8, 9}), wanted, kTerms, Moments::kNo, &rows));
  EXPECT_THAT(rows, ElementsAre(2, 4));
}

TEST(HoldTable, FindsNothingOfAnotherSessionBatchLabelOrTerms) {
  HoldTable table(10);
  Keep(table, Of("a", 1, 0, {5, 7}));
  std::vector<int32_t> rows;
  EXPECT_TRUE(Finds(table, Of("a", 1, 1, {7}), &rows));
  EXPECT_THAT(rows, ElementsAre(1));
  EXPECT_FALSE(Finds(table, Of("b", 1, 1, {7}), &rows));
  EXPECT_FALSE(Finds(table, Of("a", 2, 1, {7}), &rows));
  EXPECT_FALSE(Finds(table, Of("a", 1, 2, {7}), &rows));
  EXPECT_FALSE(Finds(table, Of("a", 1, 1, {6}), &rows)) << "another label";
  EXPECT_FALSE(Finds(table, Of("a", 1, 1, {7}), &rows, {.logit_scale = 2}));
  EXPECT_FALSE(Finds(table, Of("a", 1, 1, {7}), &rows, {.softcap = 2}));
  EXPECT_FALSE(Finds(table, Of("a", 1, 1, {7}), &rows, {.bias = Bias::kUse}));
  EXPECT_FALSE(Finds(table, Of("a", 1, 1, {7}), &rows, kTerms, Moments::kYes)) << "no moments";
}

TEST(HoldTable, ATokenThatWasNotComputedIsNotFoundAndOthersAre) {
  HoldTable table(10);
  ASSERT_EQ(table.Allocate(2), 0);
  table.Add(Of("a", 1, 0, {5, 6, 7}), {0, HoldTable::kNoRow, 1}, kTerms, Moments::kNo);
  std::vector<int32_t> rows;
  EXPECT_FALSE(Finds(table, Of("a", 1, 0, {5, 6, 7}), &rows));
  rows.clear();
  EXPECT_TRUE(table.Find(Of("a", 1, 0, {5, 6, 7}), {true, false, true}, kTerms, Moments::kNo, &rows));
  EXPECT_THAT(rows, ElementsAre(0, 1));
}

TEST(HoldTable, WhatIsHeldAnewTakesThePlaceOfTheOldest) {
  HoldTable table(5);
  std::vector<int32_t> rows;
  for (uint64_t batch = 1; batch <= 3; ++batch) Keep(table, Of("a", batch, 0, {1, 2}));
  EXPECT_FALSE(Finds(table, Of("a", 1, 0, {1, 2}), &rows));
  EXPECT_TRUE(Finds(table, Of("a", 2, 0, {1, 2}), &rows));
  EXPECT_THAT(rows, ElementsAre(2, 3));
  EXPECT_TRUE(Finds(table, Of("a", 3, 0, {1, 2}), &rows));
  EXPECT_THAT(rows, ElementsAre(0, 1));
  EXPECT_FALSE(table.Allocate(6).has_value());
  EXPECT_EQ(table.held_rows(), 4);
}

TEST(HoldTable, WhatWasReleasedOrIsOfOtherWeightsIsGone) {
  HoldTable table(8);
  std::vector<int32_t> rows;
  Keep(table, Of("a", 1, 0, {1, 2, 3}), Moments::kYes);
  table.Release(Of("a", 1, 0, {1, 2}));
  EXPECT_TRUE(Finds(table, Of("a", 1, 0, {1, 2, 3}), &rows, kTerms, Moments::kYes))
      << "a part is still needed";
  table.Release(Of("a", 1, 2, {3}));
  EXPECT_FALSE(Finds(table, Of("a", 1, 0, {1, 2, 3}), &rows));
  Keep(table, Of("a", 1, 0, {1, 2, 3}));
  table.Clear();
  EXPECT_FALSE(Finds(table, Of("a", 1, 0, {1, 2, 3}), &rows));
}

// Otherwise clients could fill the host's memory with tokens that take no row.
TEST(HoldTable, TokensWithoutRowsTakeNothing) {
  HoldTable table(8);
  table.Add(Of("a", 1, 0, {}), {}, kTerms, Moments::kNo);
  table.Add(Of("a", 2, 0, {1}), {HoldTable::kNoRow}, kTerms, Moments::kNo);
  EXPECT_EQ(table.held_rows(), 0);
  std::vector<int32_t> rows;
  EXPECT_FALSE(Finds(table, Of("a", 2, 0, {1}), &rows));
}

TEST(HoldTable, AChunkThatIsSentAgainIsHeldOnce) {
  HoldTable table(8);
  Keep(table, Of("a", 1, 0, {1, 2, 3}));
  Keep(table, Of("a", 1, 0, {1, 2, 3}));
  EXPECT_EQ(table.held_rows(), 3);
  std::vector<int32_t> rows;
  EXPECT_TRUE(Finds(table, Of("a", 1, 0, {1, 2, 3}), &rows));
  EXPECT_THAT(rows, ElementsAre(3, 4, 5));
}

}  // namespace
}  // namespace lossd::engine::hold_table_test
