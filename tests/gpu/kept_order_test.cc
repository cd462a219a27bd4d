// How the rows of a batch with lists are arranged. Needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "kernels/cuda/kept_step.h"
#include "kernels/cuda/rows/batch_rows.h"

namespace lossd::kernels::cuda::kept_order_test {
namespace {

constexpr int64_t kVocab = 50;
constexpr int64_t kIgnore = -100;

struct Lists {
  std::vector<int64_t> labels;
  std::vector<int64_t> offsets = {0};
  std::vector<int32_t> tokens;

  explicit Lists(int64_t rows, uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int64_t r = 0; r < rows; ++r) {
      const auto label = static_cast<int32_t>(random() % kVocab);
      std::vector<int32_t> list = {label};
      for (int32_t v = 0; v < kVocab; ++v) {
        if (v != label && random() % 5 == 0) list.push_back(v);
      }
      std::shuffle(list.begin(), list.end(), random);
      labels.push_back(r % 4 == 1 ? kIgnore : label);
      tokens.insert(tokens.end(), list.begin(), list.end());
      offsets.push_back(static_cast<int64_t>(tokens.size()));
    }
  }
  LabelledRows Part() const {
    return {.labels = labels.data(),
            .tokens = static_cast<int64_t>(labels.size()),
            .kept_tokens = {offsets.data(), tokens.data()}};
  }
};

// Every entry of the tile once, by token and then by row; every start where another token begins.
void ExpectOrder(const KeptRows& kept, const KeptTile& tile) {
  std::vector<bool> seen(static_cast<size_t>(tile.entries));
  int64_t starts = 0;
  int32_t before = -1;
  int32_t entry_before = -1;
  for (int64_t i = tile.first_entry; i < tile.first_entry + tile.entries; ++i) {
    const int32_t entry = kept.by_token[static_cast<size_t>(i)];
    ASSERT_GE(entry, tile.first_entry);
    ASSERT_LT(entry, tile.first_entry + tile.entries);
    seen[static_cast<size_t>(entry - tile.first_entry)] = true;
    const int32_t token = kept.tokens[static_cast<size_t>(entry)];
    ASSERT_GE(token, before);
    if (token != before) {
      ASSERT_LT(starts, tile.tokens);
      EXPECT_EQ(kept.token_starts[static_cast<size_t>(tile.first_token + starts++)], i);
    } else {
      EXPECT_GT(entry, entry_before);
    }
    before = token;
    entry_before = entry;
  }
  EXPECT_EQ(starts, tile.tokens);
  EXPECT_EQ(kept.token_starts[static_cast<size_t>(tile.first_token + starts)],
            tile.first_entry + tile.entries);
  EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](bool value) { return value; }));
}

TEST(KeptOrder, HasTheListsOfValidRowsInOrderOfTokens) {
  const Lists first(30, 1);
  const Lists second(17, 2);
  const std::vector<LabelledRows> parts = {first.Part(), second.Part()};
  const HeadShape shape{kVocab, 64, DataType::kBFloat16};
  for (const int64_t rows : {100, 10, 1}) {
    BatchRows batch = SelectValidRows(parts);
    ASSERT_EQ(std::ssize(batch.kept.offsets), batch.rows + 1);
    const int64_t bytes = KeptStep::WorkspaceBytes(shape, rows, kVocab * rows);
    OrderByToken(kVocab, KeptStep::Cut(shape, batch.kept.offsets, bytes), &batch.kept);
    ASSERT_FALSE(batch.kept.tiles.empty());
    EXPECT_EQ(batch.kept.tiles.size() > 1, rows < batch.rows);
    int64_t next_row = 0;
    int64_t next_entry = 0;
    for (const KeptTile& tile : batch.kept.tiles) {
      EXPECT_EQ(tile.first_row, next_row);
      EXPECT_EQ(tile.first_entry, next_entry);
      EXPECT_EQ(tile.first_entry, batch.kept.offsets[static_cast<size_t>(tile.first_row)]);
      EXPECT_LE(KeptStep::WorkspaceBytes(shape, tile.rows, tile.entries), bytes);
      next_row += tile.rows;
      next_entry += tile.entries;
      ExpectOrder(batch.kept, tile);
    }
    EXPECT_EQ(next_row, batch.rows);
    EXPECT_EQ(next_entry, std::ssize(batch.kept.tokens));
    EXPECT_EQ(std::ssize(batch.kept.token_starts),
              batch.kept.tiles.back().first_token + batch.kept.tiles.back().tokens + 1);
  }
}

TEST(KeptOrder, RowsWithLongListsComeBehindTheOthersInTilesOfTheirOwn) {
  const Lists lists(60, 3);
  const std::vector<LabelledRows> parts = {lists.Part()};
  constexpr int64_t kLong = 12;
  BatchRows batch = SelectValidRows(parts, kLong);
  const int64_t short_rows = batch.kept.short_rows;
  ASSERT_GT(short_rows, 0);
  ASSERT_LT(short_rows, batch.rows);
  EXPECT_EQ(batch.rows, SelectValidRows(parts).rows);
  for (int64_t row = 0; row < batch.rows; ++row) {
    const auto r = static_cast<size_t>(row);
    const auto token = static_cast<size_t>(batch.batch_rows[r]);
    EXPECT_EQ(batch.labels[r], lists.labels[token]);
    const int64_t size = batch.kept.offsets[r + 1] - batch.kept.offsets[r];
    EXPECT_EQ(size, lists.offsets[token + 1] - lists.offsets[token]);
    EXPECT_EQ(size >= kLong, row >= short_rows);
    const bool is_first = row == 0 || row == short_rows;
    if (!is_first) {
      EXPECT_GT(batch.batch_rows[r], batch.batch_rows[r - 1]);
    }
  }
  const int32_t entries = batch.kept.offsets[static_cast<size_t>(short_rows)];
  std::vector<KeptTile> tiles = {{.rows = short_rows, .entries = entries},
                                 {.is_long = true,
                                  .first_row = short_rows,
                                  .rows = batch.rows - short_rows,
                                  .first_entry = entries,
                                  .entries = std::ssize(batch.kept.tokens) - entries}};
  OrderByToken(kVocab, std::move(tiles), &batch.kept);
  ExpectOrder(batch.kept, batch.kept.tiles[0]);
  EXPECT_EQ(batch.kept.tiles[1].tokens, 0);
}

TEST(KeptOrder, ThereAreNoTilesWhereARowDoesNotFit) {
  const HeadShape shape{kVocab, 64, DataType::kFloat32};
  const std::vector<int32_t> offsets = {0, 1, 100000};
  EXPECT_TRUE(KeptStep::Cut(shape, offsets, KeptStep::WorkspaceBytes(shape, 1, 1000)).empty());
  EXPECT_EQ(KeptStep::Cut(shape, offsets, KeptStep::WorkspaceBytes(shape, 1, 100000)).size(), 2U);
}

}  // namespace
}  // namespace lossd::kernels::cuda::kept_order_test
