#include "server/engine/head/parts/deterministic_tiles.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/chunk/token_lists.h"
#include "server/engine/common/errors.h"

namespace lossd::engine::deterministic_tiles_test {
namespace {

using Piece = DeterministicTiles::Piece;
using Room = DeterministicTiles::Room;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::SizeIs;

constexpr int64_t kHidden = 1;
constexpr int64_t kTile = 4;
// Tiles of 4 tokens.
constexpr ChunkLimits kLimits = {.max_chunk_bytes = kTile * kHidden * 4, .max_chunk_tokens = kTile};

template <typename Value>
std::vector<Value> Values(const std::string& bytes) {
  std::vector<Value> values(bytes.size() / sizeof(Value));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

template <typename Value>
void Append(std::string* bytes, Value value) {
  bytes->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

std::vector<float> Hidden(const Chunk& chunk) {
  std::vector<float> values(static_cast<size_t>(chunk.hidden_states.size()) / sizeof(float));
  Gather(chunk.hidden_states.parts(), reinterpret_cast<std::byte*>(values.data()));
  return values;
}

// Tokens [place, place + tokens) of the window. The hidden state of a token is its place, its label 100 more.
Chunk MakeChunk(int64_t place, int64_t tokens) {
  Chunk chunk;
  chunk.tokens = tokens;
  chunk.window_token = place;
  std::string hidden;
  for (int64_t token = place; token < place + tokens; ++token) {
    Append(&hidden, static_cast<float>(token));
    Append(&chunk.labels, int64_t{100} + token);
  }
  chunk.hidden_states = Payload::Of(std::move(hidden));
  return chunk;
}

// The teacher's rows, of so many values each, are a thousand times the token's place.
constexpr int64_t kTeacherHidden = 1;
Chunk Taught(int64_t place, int64_t tokens, int64_t width = kTeacherHidden) {
  Chunk chunk = MakeChunk(place, tokens);
  std::string rows;
  for (int64_t token = place; token < place + tokens; ++token) {
    for (int64_t i = 0; i < width; ++i) Append(&rows, 1000 * static_cast<float>(token));
  }
  chunk.teacher_hidden = Payload::Of(std::move(rows));
  return chunk;
}

// Puts a list of so many tokens, from `first` on, behind those that there are.
void AddList(ChunkLists::Use use, int32_t first, int64_t size, ChunkLists* lists) {
  lists->use = use;
  if (lists->offsets.empty()) Append(&lists->offsets, int64_t{0});
  std::vector<int32_t> tokens(static_cast<size_t>(size));
  std::iota(tokens.begin(), tokens.end(), first);
  const size_t bytes = tokens.size() * sizeof(int32_t);
  lists->tokens.append(reinterpret_cast<const char*>(tokens.data()), bytes);
  if (use == ChunkLists::Use::kTargets) {
    const std::vector<float> probabilities(tokens.begin(), tokens.end());
    lists->probabilities.append(reinterpret_cast<const char*>(probabilities.data()), bytes);
  }
  Append(&lists->offsets, ListedTokens(*lists));
}

BatchKey KindOf(const ChunkLists& lists) {
  BatchKey kind;
  kind.lists.use = lists.use;
  return kind;
}

BatchKey TaughtBy(uint64_t head_number) {
  BatchKey kind;
  // For comparison only.
  kind.teacher.backend = reinterpret_cast<const HeadBackend*>(&kTeacherHidden);
  kind.teacher.head_number = head_number;
  return kind;
}

std::vector<float> TeacherHidden(const Chunk& chunk) {
  std::vector<float> values(static_cast<size_t>(chunk.teacher_hidden.size()) / sizeof(float));
  Gather(chunk.teacher_hidden.parts(), reinterpret_cast<std::byte*>(values.data()));
  return values;
}

// Their tokens, piece by piece.
std::vector<std::vector<float>> Tokens(const std::vector<Piece>& pieces) {
  std::vector<std::vector<float>> tokens;
  for (const Piece& piece : pieces) tokens.push_back(Hidden(piece.chunk));
  return tokens;
}

class DeterministicTilesTest : public ::testing::Test {
 protected:
  void Claim(const Chunk& chunk) {
    ASSERT_EQ(tiles_.RoomFor(chunk), Room::kFree);
    tiles_.WidenFor(chunk);
    tiles_.Claim(chunk);
  }
  void Fill(Chunk chunk) {
    const DeterministicTiles::Bytes bytes = DeterministicTiles::BytesOf(chunk);
    tiles_.Fill(std::move(chunk), kind_, bytes);
  }
  void Add(Chunk chunk) {
    Claim(chunk);
    Fill(std::move(chunk));
  }
  void Add(int64_t place, int64_t tokens) { Add(MakeChunk(place, tokens)); }
  void Finish(const std::vector<Piece>& pieces) {
    for (const Piece& piece : pieces) tiles_.Done(piece);
  }
  Room RoomFor(int64_t place, int64_t tokens) const { return tiles_.RoomFor(MakeChunk(place, tokens)); }

  DeterministicTiles tiles_{kLimits, kHidden};
  BatchKey kind_;
};

TEST(DeterministicTiles, ATileFitsIntoAChunkOfAnyTypeAndIsAPowerOfTwo) {
  const auto tile_tokens = [](int64_t bytes, int64_t tokens, int64_t hidden) {
    return DeterministicTiles::TileTokens({.max_chunk_bytes = bytes, .max_chunk_tokens = tokens}, hidden);
  };
  EXPECT_EQ(tile_tokens(int64_t{1} << 40, 1 << 20, 1), 4096) << "never more, whatever the limits";
  EXPECT_EQ(tile_tokens(int64_t{1} << 40, 100, 1), 64) << "no more than a chunk may have tokens";
  EXPECT_EQ(tile_tokens(1600, 1 << 20, 4), 64) << "no more than a chunk of fp32 may have bytes";
  EXPECT_EQ(tile_tokens(1, 1 << 20, 4), 1) << "at least one";
}

TEST_F(DeterministicTilesTest, ATileIsHandedOutOnceItIsFullAndThoseBeforeItWere) {
  Add(4, 4);
  EXPECT_THAT(tiles_.TakeComplete(), IsEmpty()) << "tile 0 comes first";
  Add(1, 3);
  EXPECT_THAT(tiles_.TakeComplete(), IsEmpty()) << "token 0 is missing";
  Add(0, 1);
  EXPECT_THAT(Tokens(tiles_.TakeComplete()), ElementsAre(ElementsAre(0, 1, 2, 3), ElementsAre(4, 5, 6, 7)));
  EXPECT_THAT(tiles_.TakeComplete(), IsEmpty()) << "once";
}

TEST_F(DeterministicTilesTest, AClaimedPlaceFillsNoTile) {
  Claim(MakeChunk(0, 2));
  Add(2, 2);
  EXPECT_THAT(tiles_.TakeComplete(), IsEmpty());
  Fill(MakeChunk(0, 2));
  EXPECT_THAT(Tokens(tiles_.TakeComplete()), ElementsAre(ElementsAre(0, 1, 2, 3)));
}

TEST_F(DeterministicTilesTest, AChunkThatCrossesABorderIsInBothTiles) {
  Add(2, 4);
  Add(0, 2);
  EXPECT_THAT(Tokens(tiles_.TakeComplete()), ElementsAre(ElementsAre(0, 1, 2, 3)));
  Add(6, 2);
  EXPECT_THAT(Tokens(tiles_.TakeComplete()), ElementsAre(ElementsAre(4, 5, 6, 7)));
}

// What dW is made of: everything that a piece has.
struct Product {
  float gradient_scale = 0;
  float label_smoothing = 0;
  std::vector<float> hidden;
  std::vector<int64_t> labels;
  std::vector<float> token_weights;
  std::vector<float> lse_gradients;
  std::vector<float> entropy_gradients;
  std::vector<int64_t> offsets;
  std::vector<int32_t> listed;
  std::vector<float> probabilities;

  bool operator==(const Product&) const = default;
};

Product ProductOf(const Piece& piece) {
  const Chunk& chunk = piece.chunk;
  EXPECT_EQ(chunk.mode, ComputeMode::kWeightGradientOnly);
  EXPECT_EQ(chunk.tokens, std::ssize(Hidden(chunk)));
  return {chunk.gradient_scale,
          piece.kind.options.label_smoothing,
          Hidden(chunk),
          Values<int64_t>(chunk.labels),
          Values<float>(chunk.token_weights),
          Values<float>(chunk.lse_gradients),
          Values<float>(chunk.entropy_gradients),
          Values<int64_t>(chunk.lists.offsets),
          Values<int32_t>(chunk.lists.tokens),
          Values<float>(chunk.lists.probabilities)};
}

TEST_F(DeterministicTilesTest, TheProductsAreTheSameHoweverTokensAreCutAndWheneverTheyCome) {
  constexpr int64_t kTokens = 26;  // the last tile has two
  // What a token has depends on its place. Chunks end at 9 and at 18, where that changes.
  const auto chunk_of = [](int64_t place, int64_t tokens) {
    const ChunkLists::Use use = place < 9    ? ChunkLists::Use::kNone
                                : place < 18 ? ChunkLists::Use::kKept
                                             : ChunkLists::Use::kTargets;
    Chunk chunk = MakeChunk(place, tokens);
    if (place >= 9) chunk.gradient_scale = 0.5f;
    for (int64_t token = place; token < place + tokens; ++token) {
      if (place < 18) Append(&chunk.token_weights, 1.0f + static_cast<float>(token));
      if (place < 9) Append(&chunk.lse_gradients, -static_cast<float>(token));
      if (place < 9) Append(&chunk.entropy_gradients, 3 * static_cast<float>(token));
      if (place >= 9) AddList(use, static_cast<int32_t>(10 * token), token % 4, &chunk.lists);
    }
    return chunk;
  };
  const auto kind_of = [](const Chunk& chunk) {
    BatchKey kind = KindOf(chunk.lists);
    if (*chunk.window_token >= 18) kind.options.label_smoothing = 0.1f;
    return kind;
  };
  std::mt19937_64 random(1);
  std::vector<Product> expected;
  for (int round = 0; round < 200; ++round) {
    SCOPED_TRACE(round);
    std::vector<std::pair<int64_t, int64_t>> cuts;
    for (int64_t place = 0; place < kTokens;) {
      const int64_t end = place < 9 ? 9 : place < 18 ? 18 : kTokens;
      const auto most = round == 0 ? kTile : static_cast<int64_t>(random() % kTile) + 1;
      cuts.emplace_back(place, std::min(most, end - place));
      place += cuts.back().second;
    }
    if (round > 0) std::shuffle(cuts.begin(), cuts.end(), random);
    DeterministicTiles tiles({.max_chunk_bytes = 1 << 20, .max_chunk_tokens = kTile}, kHidden);
    std::vector<Product> products;
    const auto take = [&](const std::vector<Piece>& pieces) {
      for (const Piece& piece : pieces) products.push_back(ProductOf(piece));
    };
    for (const auto& [place, tokens] : cuts) {
      Chunk chunk = chunk_of(place, tokens);
      ASSERT_EQ(tiles.RoomFor(chunk), Room::kFree);
      tiles.Claim(chunk);
      const DeterministicTiles::Bytes bytes = DeterministicTiles::BytesOf(chunk);
      const BatchKey kind = kind_of(chunk);
      tiles.Fill(std::move(chunk), kind, bytes);
      if (random() % 2 == 0) take(tiles.TakeComplete());
    }
    take(tiles.TakeComplete());
    take(tiles.TakeAll());
    if (round == 0) expected = products;
    ASSERT_EQ(products, expected);
  }
  // Seven tiles, two of which have a border within them.
  EXPECT_THAT(expected, SizeIs(9));
}

TEST_F(DeterministicTilesTest, RowsAreOneProductIfTheyHaveAllButThemselvesInCommon) {
  // Each differs from the one before in one respect.
  const auto add = [this](int64_t place, float gradient_scale, std::optional<float> z_gradient_scale) {
    Chunk chunk = MakeChunk(place, 1);
    chunk.gradient_scale = gradient_scale;
    chunk.options.z_gradient_scale = z_gradient_scale;
    Add(std::move(chunk));
  };
  add(0, 1, std::nullopt);
  add(1, 2, std::nullopt);
  add(2, 2, 3);
  kind_.options.label_smoothing = 0.1f;
  add(3, 2, 3);
  const std::vector<Piece> pieces = tiles_.TakeComplete();
  EXPECT_THAT(Tokens(pieces), ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2), ElementsAre(3)));
  EXPECT_EQ(pieces[1].chunk.gradient_scale, 2);
  EXPECT_EQ(pieces[2].chunk.options.z_gradient_scale, 3);
  EXPECT_EQ(pieces[3].kind, kind_);
}

TEST_F(DeterministicTilesTest, ChunksWithAndWithoutValuesForTheirTokensShareAProduct) {
  Chunk weighted = MakeChunk(1, 1);
  Append(&weighted.token_weights, 7.0f);
  Chunk with_lse = MakeChunk(2, 1);
  Append(&with_lse.lse_gradients, 8.0f);
  Chunk with_entropy = MakeChunk(3, 1);
  Append(&with_entropy.entropy_gradients, 9.0f);
  Add(0, 1);
  Add(std::move(weighted));
  Add(std::move(with_lse));
  Add(std::move(with_entropy));
  const std::vector<Piece> pieces = tiles_.TakeComplete();
  ASSERT_THAT(pieces, SizeIs(1));
  EXPECT_THAT(Values<float>(pieces[0].chunk.token_weights), ElementsAre(1, 7, 1, 1));
  EXPECT_THAT(Values<float>(pieces[0].chunk.lse_gradients), ElementsAre(0, 0, 8, 0));
  EXPECT_THAT(Values<float>(pieces[0].chunk.entropy_gradients), ElementsAre(0, 0, 0, 9));
}

TEST_F(DeterministicTilesTest, IgnoredRowsOfChunksStayIgnoredWhateverLabelMeansIt) {
  Chunk first = MakeChunk(0, 2);
  first.ignore_index = 101;  // token 1's label
  Chunk second = MakeChunk(2, 2);
  second.ignore_index = 102;
  Add(std::move(first));
  Add(std::move(second));
  const std::vector<Piece> pieces = tiles_.TakeComplete();
  ASSERT_THAT(pieces, SizeIs(1));
  const int64_t ignored = pieces[0].chunk.ignore_index;
  EXPECT_THAT(Values<int64_t>(pieces[0].chunk.labels), ElementsAre(100, ignored, ignored, 103));
}

TEST_F(DeterministicTilesTest, HiddenStatesInSeveralPartsAreCutWhereTheTilesAre) {
  const std::vector<float> values = {3, 4, 5};
  const ByteSpan bytes = std::as_bytes(std::span(values));
  Chunk chunk = MakeChunk(3, 3);
  chunk.hidden_states = Payload({bytes.first(2), bytes.subspan(2, 7), bytes.subspan(9)}, nullptr, 12);
  Add(std::move(chunk));
  EXPECT_THAT(Tokens(tiles_.TakeAll()), ElementsAre(ElementsAre(3), ElementsAre(4, 5)));
}

TEST_F(DeterministicTilesTest, MissingTokensHoldUpTheirTileUntilAllIsTaken) {
  Add(0, 1);
  Add(2, 2);
  Add(9, 1);
  EXPECT_THAT(tiles_.TakeComplete(), IsEmpty());
  EXPECT_THAT(Tokens(tiles_.TakeAll()), ElementsAre(ElementsAre(0, 2, 3), ElementsAre(9)));
  EXPECT_THAT(tiles_.TakeAll(), IsEmpty());
}

TEST_F(DeterministicTilesTest, WhatComesIntoATileThatWasTakenIsAProductOfItsOwn) {
  Add(0, 3);
  Add(4, 4);
  Finish(tiles_.TakeAll());
  EXPECT_EQ(RoomFor(1, 1), Room::kTaken) << "it is in dW";
  Add(8, 4);
  EXPECT_THAT(tiles_.TakeComplete(), IsEmpty());
  Add(3, 1);
  EXPECT_THAT(Tokens(tiles_.TakeComplete()), ElementsAre(ElementsAre(3), ElementsAre(8, 9, 10, 11)));
}

TEST_F(DeterministicTilesTest, EverythingIsAddedOnceThePiecesOfAllTilesAreDone) {
  EXPECT_TRUE(tiles_.AllAdded());
  Add(0, 3);
  EXPECT_FALSE(tiles_.AllAdded()) << "a tile has rows";
  Add(3, 4);
  std::vector<Piece> pieces = tiles_.TakeComplete();
  ASSERT_THAT(pieces, SizeIs(1));
  EXPECT_EQ(tiles_.Done(pieces[0]), 1) << "the second chunk is in the next tile, too";
  pieces = tiles_.TakeAll();
  ASSERT_THAT(pieces, SizeIs(1));
  EXPECT_FALSE(tiles_.AllAdded()) << "a piece is not done";
  EXPECT_EQ(tiles_.Done(pieces[0]), 1);
  EXPECT_TRUE(tiles_.AllAdded());
}

TEST_F(DeterministicTilesTest, APieceHasTheRowsOfOneTeacher) {
  kind_ = TaughtBy(1);
  Add(Taught(0, 1));
  Add(Taught(1, 1));
  kind_ = TaughtBy(2);
  Add(Taught(2, 1));
  kind_ = {};
  Add(3, 1);
  const std::vector<Piece> pieces = tiles_.TakeComplete();
  ASSERT_THAT(Tokens(pieces), ElementsAre(ElementsAre(0, 1), ElementsAre(2), ElementsAre(3)));
  EXPECT_THAT(TeacherHidden(pieces[0].chunk), ElementsAre(0, 1000));
  EXPECT_THAT(TeacherHidden(pieces[1].chunk), ElementsAre(2000));
  EXPECT_EQ(pieces[2].chunk.teacher_hidden.size(), 0);
  EXPECT_EQ(pieces[1].kind, TaughtBy(2));
}

// A device has room for what a chunk may bring, and rows of a teacher may be wider than the head's.
TEST_F(DeterministicTilesTest, APieceWithATeacherIsNoLargerThanAChunkHoweverItIsCut) {
  kind_ = TaughtBy(1);
  Add(Taught(0, 2));
  Add(Taught(2, 2));
  EXPECT_THAT(Tokens(tiles_.TakeComplete()), ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3)))
      << "two rows of 8 bytes";
  Add(Taught(5, 2));
  Add(Taught(4, 1));
  Add(Taught(7, 1));
  const std::vector<Piece> pieces = tiles_.TakeComplete();
  ASSERT_THAT(Tokens(pieces), ElementsAre(ElementsAre(4, 5), ElementsAre(6, 7)));
  EXPECT_THAT(TeacherHidden(pieces[1].chunk), ElementsAre(6000, 7000));
  Add(Taught(8, 1, 3));
  Add(Taught(9, 3, 3));
  EXPECT_THAT(tiles_.TakeComplete(), SizeIs(4)) << "rows of 16 bytes each by itself";
}

TEST_F(DeterministicTilesTest, TilesThatWaitWithSoftTargetsAreClosedForTheirTeacher) {
  Add(0, 1);
  Add(5, 1);
  kind_ = TaughtBy(1);
  Add(Taught(6, 2));
  kind_ = TaughtBy(2);
  Add(Taught(8, 1));
  EXPECT_THAT(tiles_.TakeTaught(3), IsEmpty());
  EXPECT_THAT(Tokens(tiles_.TakeTaught(1)), ElementsAre(ElementsAre(5), ElementsAre(6, 7)))
      << "of a tile everything";
  EXPECT_THAT(tiles_.TakeTaught(1), IsEmpty());
  EXPECT_THAT(Tokens(tiles_.TakeTaught(std::nullopt)), ElementsAre(ElementsAre(8))) << "whoever teaches";
  kind_ = {};
  Add(1, 3);
  EXPECT_THAT(Tokens(tiles_.TakeComplete()), ElementsAre(ElementsAre(0, 1, 2, 3)));
  Add(4, 1);
  EXPECT_THAT(Tokens(tiles_.TakeComplete()), ElementsAre(ElementsAre(4))) << "what comes later, by itself";
}

TEST_F(DeterministicTilesTest, RoomForATeachersRowsIsThatOfATileOfTheWidest) {
  const auto missing = [this](int64_t width) { return tiles_.MissingFor(Taught(0, 1, width)); };
  EXPECT_EQ(missing(2), kTile * 8);
  tiles_.WidenFor(Taught(0, 1, 2));
  EXPECT_EQ(missing(2), 0);
  EXPECT_EQ(missing(1), 0);
  EXPECT_EQ(missing(5), kTile * 12);
}

Chunk Listed(int64_t place, const std::vector<int64_t>& sizes,
             ChunkLists::Use use = ChunkLists::Use::kTargets) {
  Chunk chunk = MakeChunk(place, std::ssize(sizes));
  for (const int64_t size : sizes) AddList(use, 0, size, &chunk.lists);
  return chunk;
}

constexpr int64_t kMiB = int64_t{1} << 20;

TEST_F(DeterministicTilesTest, RoomForListsIsThatOfTheMostThatThereWereAtOneTime) {
  constexpr int64_t kHalf = kMiB / 16;  // tokens, with probabilities
  EXPECT_EQ(tiles_.MissingFor(MakeChunk(0, 1)), 0);
  EXPECT_EQ(tiles_.MissingFor(Listed(0, {1})), kMiB) << "in units";
  Add(Listed(0, {kHalf}));
  EXPECT_EQ(tiles_.MissingFor(Listed(1, {1})), 0);
  EXPECT_EQ(tiles_.MissingFor(Listed(1, {kHalf})), kMiB) << "offsets count, too";
  Add(Listed(1, {kHalf}));
  Claim(Listed(2, {2 * kHalf}));
  EXPECT_EQ(tiles_.MissingFor(Listed(3, {1})), 0);
  EXPECT_EQ(tiles_.MissingFor(Listed(3, {2 * kHalf})), kMiB);
  tiles_.GiveUp(2, 1, DeterministicTiles::BytesOf(Listed(2, {2 * kHalf})));
  EXPECT_EQ(tiles_.MissingFor(Listed(3, {3 * kHalf})), 0) << "what was reserved stays";
  Finish(tiles_.TakeAll());
  EXPECT_EQ(tiles_.MissingFor(Listed(3, {5 * kHalf})), 0) << "and is free once lists are in dW";
}

TEST_F(DeterministicTilesTest, ListsFarAheadAreLimitedAndThoseOfTheFirstTileAreNot) {
  for (int64_t place = kTile; place < 4 * kTile; place += kTile) Add(Listed(place, {kMostListedTokens}));
  const int64_t far = 4 * kTile;
  EXPECT_EQ(tiles_.RoomFor(Listed(far, {kMostListedTokens})), Room::kNone);
  EXPECT_EQ(RoomFor(far, 1), Room::kFree) << "there is room for rows";
  EXPECT_EQ(tiles_.RoomFor(Listed(0, {kMostListedTokens})), Room::kFree);
  Claim(MakeChunk(0, 1));
  EXPECT_EQ(tiles_.RoomFor(Listed(far, {kMostListedTokens})), Room::kLater);
}

TEST_F(DeterministicTilesTest, APieceHasNoMoreListedTokensThanAChunkMayHaveHoweverRowsAreCut) {
  constexpr int64_t kMost = kMostListedTokens;
  const std::vector<int64_t> sizes = {kMost / 2, kMost / 4, kMost / 4 + 1, kMost - 1};
  for (const std::vector<int64_t>& ends :
       std::vector<std::vector<int64_t>>{{1, 2, 3, 4}, {2, 3, 4}, {1, 3, 4}}) {
    SCOPED_TRACE(ends.front() * 10 + ends[1]);
    DeterministicTiles tiles(kLimits, kHidden);
    int64_t place = 0;
    for (const int64_t end : ends) {
      Chunk chunk = Listed(place, {sizes.begin() + place, sizes.begin() + end}, ChunkLists::Use::kKept);
      tiles.WidenFor(chunk);
      tiles.Claim(chunk);
      const DeterministicTiles::Bytes bytes = DeterministicTiles::BytesOf(chunk);
      const BatchKey kind = KindOf(chunk.lists);
      tiles.Fill(std::move(chunk), kind, bytes);
      place = end;
    }
    const std::vector<Piece> pieces = tiles.TakeComplete();
    ASSERT_THAT(Tokens(pieces), ElementsAre(ElementsAre(0, 1), ElementsAre(2), ElementsAre(3)));
    std::vector<std::vector<int64_t>> offsets;
    for (const Piece& piece : pieces) offsets.push_back(Values<int64_t>(piece.chunk.lists.offsets));
    EXPECT_THAT(offsets, ElementsAre(ElementsAre(0, kMost / 2, kMost * 3 / 4), ElementsAre(0, kMost / 4 + 1),
                                     ElementsAre(0, kMost - 1)));
    int64_t chunks = 0;
    for (const Piece& piece : pieces) chunks += tiles.Done(piece);
    EXPECT_EQ(chunks, std::ssize(ends)) << "one that was cut is done once";
    EXPECT_TRUE(tiles.AllAdded());
  }
}

TEST_F(DeterministicTilesTest, ListsOfIgnoredRowsAreNotThere) {
  constexpr int64_t kMost = kMostListedTokens;
  Chunk first = Listed(0, {2, 3, 1});
  first.ignore_index = 101;  // token 1's label
  Chunk ignored = Listed(3, {kMost});
  ignored.ignore_index = 103;
  kind_ = KindOf(first.lists);
  Add(std::move(first));
  Add(std::move(ignored));
  const std::vector<Piece> pieces = tiles_.TakeComplete();
  ASSERT_THAT(pieces, SizeIs(1)) << "nothing of them counts";
  const ChunkLists& lists = pieces[0].chunk.lists;
  EXPECT_THAT(Values<int64_t>(lists.offsets), ElementsAre(0, 2, 2, 3, 3));
  EXPECT_THAT(Values<int32_t>(lists.tokens), ElementsAre(0, 1, 0));
  EXPECT_THAT(Values<float>(lists.probabilities), ElementsAre(0, 1, 0));
}

TEST_F(DeterministicTilesTest, ListsThatAreCapturedGoOnElsewhere) {
  Chunk chunk = Listed(2, {1, 2, 3});
  chunk.lists.weight = 0.25f;
  kind_ = KindOf(chunk.lists);
  Add(std::move(chunk));
  const DeterministicTiles::Content content = tiles_.content({});
  EXPECT_EQ(content.list_bytes, (3 + 2 + 6) * 8);
  EXPECT_EQ(DeterministicTiles::MissingFor(content), kMiB);
  DeterministicTiles restored(kLimits, kHidden);
  restored.Restore(content, [](const Chunk& of) { return KindOf(of.lists); });
  EXPECT_EQ(restored.MissingFor(Listed(5, {1})), 0) << "as much is reserved as it needs";
  const std::vector<Piece> expected = tiles_.TakeAll();
  const std::vector<Piece> pieces = restored.TakeAll();
  ASSERT_THAT(pieces, SizeIs(2));
  for (size_t i = 0; i < pieces.size(); ++i) {
    EXPECT_EQ(ProductOf(pieces[i]), ProductOf(expected[i]));
    EXPECT_EQ(pieces[i].chunk.lists.use, ChunkLists::Use::kTargets);
    EXPECT_EQ(pieces[i].chunk.lists.weight, 0.25f);
  }
}

TEST_F(DeterministicTilesTest, APlaceIsTakenFromTheClaimToTheEndOfTheWindow) {
  Claim(MakeChunk(10, 4));
  for (const auto& [place, tokens] :
       std::vector<std::pair<int64_t, int64_t>>{{10, 4}, {8, 3}, {13, 1}, {11, 2}, {9, 6}, {12, 4}}) {
    EXPECT_EQ(RoomFor(place, tokens), Room::kTaken) << tokens << " from " << place << " on";
  }
  EXPECT_EQ(RoomFor(7, 3), Room::kFree);
  EXPECT_EQ(RoomFor(14, 1), Room::kFree);
  Fill(MakeChunk(10, 4));
  EXPECT_EQ(RoomFor(10, 4), Room::kTaken) << "the same chunk again";
  Finish(tiles_.TakeAll());
  EXPECT_EQ(RoomFor(10, 4), Room::kTaken) << "it is in dW";
  tiles_.BeginWindow();
  EXPECT_EQ(RoomFor(10, 4), Room::kFree);
}

TEST_F(DeterministicTilesTest, ANewWindowBeginsAtTheFirstTile) {
  Add(0, 4);
  Add(4, 1);
  Finish(tiles_.TakeComplete());
  Finish(tiles_.TakeAll());
  tiles_.BeginWindow();
  Add(4, 4);
  EXPECT_THAT(tiles_.TakeComplete(), IsEmpty());
  Add(0, 4);
  EXPECT_THAT(Tokens(tiles_.TakeComplete()), ElementsAre(ElementsAre(0, 1, 2, 3), ElementsAre(4, 5, 6, 7)));
}

TEST_F(DeterministicTilesTest, AChunkThatGivesUpFreesItsPlaceAndNoOther) {
  Claim(MakeChunk(1, 2));
  Claim(MakeChunk(3, 2));
  Claim(MakeChunk(5, 2));
  tiles_.GiveUp(3, 2, DeterministicTiles::BytesOf(MakeChunk(3, 2)));
  EXPECT_EQ(RoomFor(3, 2), Room::kFree);
  EXPECT_EQ(RoomFor(2, 1), Room::kTaken);
  EXPECT_EQ(RoomFor(5, 1), Room::kTaken);
  Claim(MakeChunk(3, 2));
  EXPECT_EQ(RoomFor(3, 2), Room::kTaken);
}

// Claims and fills chunks of the largest size from tile 1 on until there is no room for one more; how many.
int64_t FillFarTiles(DeterministicTiles* tiles) {
  for (int64_t place = kTile;; place += kTile) {
    Chunk chunk = MakeChunk(place, kTile);
    if (tiles->RoomFor(chunk) != Room::kFree) return place / kTile - 1;
    tiles->Claim(chunk);
    const DeterministicTiles::Bytes bytes = DeterministicTiles::BytesOf(chunk);
    tiles->Fill(std::move(chunk), {}, bytes);
  }
}

TEST_F(DeterministicTilesTest, ChunksFarAheadAreRefusedBeforeTheyTakeTheRoomOfTheFirstTile) {
  const int64_t taken = FillFarTiles(&tiles_);
  EXPECT_EQ(taken, 4);
  const int64_t next = (taken + 1) * kTile;
  EXPECT_EQ(RoomFor(next, kTile), Room::kNone) << "only earlier chunks make room";
  for (int64_t place = 0; place < kTile; ++place) Add(place, 1);
  EXPECT_THAT(tiles_.TakeComplete(), SizeIs(5));
}

TEST_F(DeterministicTilesTest, AChunkWithoutRoomWaitsAsLongAsSomethingIsUnderWay) {
  const int64_t far = (FillFarTiles(&tiles_) + 1) * kTile;
  ASSERT_EQ(RoomFor(far, 4), Room::kNone);
  Claim(MakeChunk(0, 4));
  EXPECT_EQ(RoomFor(far, 4), Room::kLater) << "a chunk is claimed";
  tiles_.GiveUp(0, 4, DeterministicTiles::BytesOf(MakeChunk(0, 4)));
  EXPECT_EQ(RoomFor(far, 4), Room::kNone);
  Add(0, 4);
  const std::vector<Piece> pieces = tiles_.TakeComplete();
  ASSERT_THAT(pieces, SizeIs(5));
  const int64_t farther = 30 * kTile;
  EXPECT_EQ(RoomFor(farther, 4), Room::kLater) << "pieces are under way";
  Finish({pieces[0], pieces[1]});
  EXPECT_EQ(RoomFor(farther, 4), Room::kFree) << "and make room when they are done";
}

TEST_F(DeterministicTilesTest, TheMemoryOfAChunkIsFreeOnceAllOfItsPiecesAreDone) {
  // As many as there is room for, each in two tiles.
  for (int64_t place = 2; place < 18; place += kTile) Add(place, kTile);
  EXPECT_EQ(RoomFor(40, kTile), Room::kNone);
  const std::vector<Piece> halves = tiles_.TakeAll();
  ASSERT_THAT(halves, SizeIs(5));
  tiles_.Done(halves[0]);
  EXPECT_EQ(RoomFor(40, kTile), Room::kLater) << "half of the first is under way";
  tiles_.Done(halves[1]);
  EXPECT_EQ(RoomFor(40, kTile), Room::kFree);
}

TEST_F(DeterministicTilesTest, NoOrderOfChunksTakesMoreMemoryThanIsReserved) {
  constexpr int64_t kTokens = 400;
  // With a teacher of so many values, chunks of two tokens, or of one, are the largest.
  for (const auto& [width, listed] : {std::pair(0, 0), {1, 0}, {3, 0}, {0, 20000}}) {
    SCOPED_TRACE(width + listed);
    const int64_t most_in_chunk = kTile / (kHidden + width);
    int64_t most = 0;
    int64_t reserved = 0;
    for (uint64_t seed = 1; seed <= (listed > 0 ? 10 : 50); ++seed) {
      SCOPED_TRACE(seed);
      std::mt19937_64 random(seed);
      std::vector<Chunk> chunks;
      const int64_t most_tokens = static_cast<int64_t>(seed) % most_in_chunk + 1;
      for (int64_t place = 0; place < kTokens; place += chunks.back().tokens) {
        const int64_t tokens = static_cast<int64_t>(random() % static_cast<uint64_t>(most_tokens)) + 1;
        chunks.push_back(Taught(place, std::min(tokens, kTokens - place), width));
        for (int64_t i = 0; listed > 0 && i < chunks.back().tokens; ++i) {
          AddList(ChunkLists::Use::kKept, 0, static_cast<int64_t>(random() % static_cast<uint64_t>(listed)),
                  &chunks.back().lists);
        }
      }
      // As an adversary sends them: whatever is taken, the last one first.
      std::reverse(chunks.begin(), chunks.end());
      DeterministicTiles tiles(kLimits, kHidden);
      reserved = DeterministicTiles::KeptBytes(kLimits, kHidden);
      int64_t kept = 0;
      std::vector<std::pair<int64_t, int64_t>> waiting;  // the ends of the chunks in it, and their bytes
      int64_t in_dw = 0;
      while (!chunks.empty()) {
        const auto next = std::find_if(chunks.begin(), chunks.end(), [&](const Chunk& chunk) {
          return tiles.RoomFor(chunk) == Room::kFree;
        });
        ASSERT_NE(next, chunks.end()) << "nothing is under way, and nothing fits";
        Chunk chunk = std::move(*next);
        chunks.erase(next);
        const DeterministicTiles::Bytes bytes = DeterministicTiles::BytesOf(chunk);
        waiting.emplace_back(*chunk.window_token + chunk.tokens, bytes.rows + bytes.lists);
        kept += waiting.back().second;
        most = std::max(most, kept);
        reserved += tiles.MissingFor(chunk);
        ASSERT_LE(kept, reserved);
        tiles.WidenFor(chunk);
        tiles.Claim(chunk);
        tiles.Fill(std::move(chunk), {}, bytes);
        for (const Piece& piece : tiles.TakeComplete()) {
          in_dw += piece.chunk.tokens;
          tiles.Done(piece);
        }
        // What lies in tiles that are done is kept no more.
        std::erase_if(waiting, [&](const auto& end_and_bytes) {
          if (end_and_bytes.first > in_dw) return false;
          kept -= end_and_bytes.second;
          return true;
        });
      }
      EXPECT_EQ(in_dw, kTokens);
    }
    EXPECT_GT(most, reserved / 3) << "what is reserved is used";
  }
}

// As if a checkpoint had been written and read: with memory of its own.
DeterministicTiles::Content Copy(DeterministicTiles::Content content) {
  for (Chunk& chunk : content.kept) chunk.hidden_states = chunk.hidden_states.Gathered();
  return content;
}

TEST_F(DeterministicTilesTest, WhatIsCapturedGoesOnElsewhereAsItWould) {
  Chunk smoothed = MakeChunk(6, 4);
  smoothed.options.loss.label_smoothing = 0.1f;
  smoothed.gradient_scale = 2;
  Add(0, 4);
  Finish(tiles_.TakeComplete());
  Add(4, 1);
  Finish(tiles_.TakeAll());
  kind_.options.label_smoothing = 0.1f;
  Add(std::move(smoothed));
  const DeterministicTiles::Content content = Copy(tiles_.content({}));
  EXPECT_EQ(content.next_tile, 1);
  EXPECT_THAT(content.taken, ElementsAre(Pair(0, 5), Pair(6, 10)));
  EXPECT_THAT(content.filled, ElementsAre(Pair(1, 3), Pair(2, 2)));
  ASSERT_THAT(content.kept, SizeIs(2)) << "each in one tile";

  DeterministicTiles restored(kLimits, kHidden);
  ASSERT_TRUE(restored.CheckContent(content).ok());
  restored.Restore(content, [](const Chunk& chunk) {
    BatchKey kind;
    kind.options = chunk.options.loss;
    return kind;
  });
  EXPECT_EQ(restored.RoomFor(MakeChunk(4, 1)), Room::kTaken);
  EXPECT_EQ(restored.RoomFor(MakeChunk(9, 1)), Room::kTaken);
  for (DeterministicTiles* tiles : {&tiles_, &restored}) {
    Chunk chunk = MakeChunk(5, 1);
    ASSERT_EQ(tiles->RoomFor(chunk), Room::kFree);
    tiles->Claim(chunk);
    const DeterministicTiles::Bytes bytes = DeterministicTiles::BytesOf(chunk);
    tiles->Fill(std::move(chunk), {}, bytes);
    const std::vector<Piece> pieces = tiles->TakeComplete();
    EXPECT_THAT(Tokens(pieces), ElementsAre(ElementsAre(5), ElementsAre(6, 7)));
    EXPECT_EQ(pieces[1].kind, kind_);
    EXPECT_EQ(pieces[1].chunk.gradient_scale, 2);
    EXPECT_THAT(Values<int64_t>(pieces[1].chunk.labels), ElementsAre(106, 107));
    EXPECT_THAT(Tokens(tiles->TakeAll()), ElementsAre(ElementsAre(8, 9)));
  }
}

TEST_F(DeterministicTilesTest, ChunksThatAreClaimedAndNotFilledAreNotCaptured) {
  Add(0, 2);
  Claim(MakeChunk(2, 3));
  Add(5, 1);
  const DeterministicTiles::Content content = tiles_.content({{2, 3}});
  EXPECT_THAT(content.taken, ElementsAre(Pair(0, 2), Pair(5, 6)));
  EXPECT_THAT(content.kept, SizeIs(2));
  EXPECT_EQ(RoomFor(2, 3), Room::kTaken) << "here it stays claimed";
}

TEST_F(DeterministicTilesTest, RestoredChunksTakeMemoryAsOthersDo) {
  const int64_t far = (FillFarTiles(&tiles_) + 1) * kTile;
  DeterministicTiles restored(kLimits, kHidden);
  restored.Restore(Copy(tiles_.content({})), [](const Chunk& /*chunk*/) { return BatchKey{}; });
  EXPECT_EQ(restored.RoomFor(MakeChunk(far, kTile)), Room::kNone) << "they are filled: nothing is under way";
  restored.Claim(MakeChunk(0, kTile));
  EXPECT_EQ(restored.RoomFor(MakeChunk(far, kTile)), Room::kLater) << "one is claimed now";
}

TEST_F(DeterministicTilesTest, TilesOfAnotherSizeAreRefusedUnlessTheWindowIsEmpty) {
  DeterministicTiles smaller({.max_chunk_bytes = 8, .max_chunk_tokens = 2}, kHidden);
  EXPECT_TRUE(smaller.CheckContent(tiles_.content({})).ok());
  Add(0, 1);
  const absl::Status status = smaller.CheckContent(tiles_.content({}));
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_EQ(ReasonOf(status), RejectReason::kCheckpoint);
  EXPECT_THAT(status.message(), HasSubstr("in tiles of 4 tokens, and would be in tiles of 2 here"));
}

}  // namespace
}  // namespace lossd::engine::deterministic_tiles_test
