// A weight that is sharded among ranks goes in and comes out shard by shard: whole, of one version, whoever
// restarts, overlaps or is missing.
#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/client_server/client_server_fixture.h"
#include "tests/integration/client_server/weight_ranks.h"
#include "tests/support/program.h"
#include "tests/support/wait.h"

namespace lossd::testing::weight_shards_test {
namespace {

using ::testing::HasSubstr;

struct Shard {
  int64_t first_row = 0;
  int64_t rows = 0;
};
// Shards of kVocab rows: unequal, and one rank has none.
constexpr std::array<Shard, 4> kShards = {{{0, 1}, {1, 37}, {38, 0}, {38, 23}}};

class WeightShardsTest : public ClientServerTest {
 protected:
  // A rank with a connection of its own.
  Head Rank() {
    auto client = Client::Connect(server_->target(), {.transfer_bytes = 256});
    EXPECT_TRUE(client.ok()) << client.status();
    clients_.push_back(*std::move(client));
    auto head = clients_.back()->GetHead("head");
    EXPECT_TRUE(head.ok()) << head.status();
    return *std::move(head);
  }

  static absl::Status Write(const WeightWrite& write, const Shard& shard, int64_t seed) {
    const std::vector<float> rows = WeightRows(shard.first_row, shard.rows, kHidden, seed);
    // A rank without rows has no pointer worth naming.
    const float none = 0;
    return write.WriteRows(shard.first_row, shard.rows, DataType::kFloat32,
                           rows.empty() ? &none : rows.data());
  }

  std::vector<float> Read() {
    std::vector<float> weights(kVocab * kHidden);
    const auto version = head_->ReadWeights(DataType::kFloat32, weights.data());
    EXPECT_TRUE(version.ok()) << version.status();
    return weights;
  }

  std::vector<std::unique_ptr<Client>> clients_;
};

TEST_F(WeightShardsTest, EveryRankWritesItsOwnRowsAndReadsThemBack) {
  Start({}, DataType::kBFloat16);
  std::vector<Head> ranks;
  for (size_t i = 0; i < kShards.size(); ++i) ranks.push_back(Rank());
  std::vector<uint64_t> versions(kShards.size());
  std::vector<std::vector<float>> read(kShards.size());
  std::atomic<size_t> written = 0;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kShards.size(); ++i) {
    threads.emplace_back([&, i] {
      const auto write = ranks[i].BeginWrite({.write_key = "step 1"});
      ASSERT_TRUE(write.ok()) << write.status();
      EXPECT_TRUE(Write(*write, kShards[i], 1).ok());
      ++written;
      Await("the other ranks", [&] { return written == kShards.size(); });
      const auto version = write->Commit();
      ASSERT_TRUE(version.ok()) << version.status();
      versions[i] = *version;
      if (kShards[i].rows == 0) return;
      read[i].resize(static_cast<size_t>(kShards[i].rows * kHidden));
      const auto back = ranks[i].ReadRows(kShards[i].first_row, kShards[i].rows, DataType::kFloat32,
                                          read[i].data(), {.weight_version = *version});
      EXPECT_TRUE(back.ok()) << back.status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(versions, std::vector<uint64_t>(kShards.size(), 1)) << "one version, whoever commits";
  for (size_t i = 0; i < kShards.size(); ++i) {
    EXPECT_EQ(read[i], WeightRows(kShards[i].first_row, kShards[i].rows, kHidden, 1)) << i;
  }
  EXPECT_EQ(Read(), WeightRows(0, kVocab, kHidden, 1));
}

TEST_F(WeightShardsTest, RowsThatTwoRanksHaveMayComeTwice) {
  Start();
  const auto first = Rank().BeginWrite({.write_key = "k"});
  const auto second = Rank().BeginWrite({.write_key = "k"});
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->id(), second->id());
  EXPECT_TRUE(Write(*first, {0, 40}, 2).ok());
  EXPECT_TRUE(Write(*second, {30, 31}, 2).ok());
  ASSERT_TRUE(second->Commit().ok());
  EXPECT_EQ(Read(), WeightRows(0, kVocab, kHidden, 2));
}

TEST_F(WeightShardsTest, AMissingShardIsNamedAndNothingIsPublished) {
  Start();
  const auto write = Rank().BeginWrite({.write_key = "k"});
  ASSERT_TRUE(write.ok());
  EXPECT_TRUE(Write(*write, {0, 30}, 3).ok());
  EXPECT_TRUE(Write(*write, {31, 29}, 3).ok());
  const auto version = write->Commit();
  EXPECT_EQ(version.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(version.status().message()), HasSubstr("lacks 2 of 61 rows, the first is row 30"));
  auto info = head_->Info();
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->weight_version, 0U);
  EXPECT_EQ(info->staged_rows, 59);
  // The late rank's rows complete it.
  EXPECT_TRUE(Write(*write, {30, 1}, 3).ok());
  EXPECT_TRUE(Write(*write, {60, 1}, 3).ok());
  EXPECT_TRUE(write->Commit().ok());
  EXPECT_EQ(Read(), WeightRows(0, kVocab, kHidden, 3));
}

TEST_F(WeightShardsTest, WhatADeadRankLeftIsReplacedAndItsLateRowsAreRefused) {
  Start();
  const auto dead = Rank().BeginWrite({.write_key = "step 1"});
  ASSERT_TRUE(dead.ok());
  EXPECT_TRUE(Write(*dead, {0, 30}, 4).ok());
  EXPECT_EQ(Rank().BeginWrite({.write_key = "step 2", .replace = false}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  const auto next = Rank().BeginWrite({.write_key = "step 2"});
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(Write(*dead, {30, 31}, 4).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(dead->Commit().status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(Write(*next, {0, kVocab}, 5).ok());
  EXPECT_TRUE(next->Commit().ok());
  EXPECT_EQ(Write(*next, {0, 1}, 6).code(), absl::StatusCode::kNotFound) << "it was committed";
  EXPECT_EQ(Read(), WeightRows(0, kVocab, kHidden, 5));
}

TEST_F(WeightShardsTest, ReadersOfShardsSeeTheVersionTheyAskFor) {
  Start();
  for (const int64_t seed : {1, 2}) {
    const auto write = Rank().BeginWrite({.write_key = absl::StrCat("step ", seed)});
    ASSERT_TRUE(write.ok());
    ASSERT_TRUE(Write(*write, {0, kVocab}, seed).ok());
    EXPECT_EQ(*write->Commit(), static_cast<uint64_t>(seed));
  }
  std::vector<float> rows(5 * kHidden);
  const auto old = head_->ReadRows(10, 5, DataType::kFloat32, rows.data(), {.weight_version = 1});
  EXPECT_EQ(old.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(old.status().message()),
              HasSubstr("weight_version is 1; the weights are of version 2"));
  EXPECT_EQ(*head_->ReadRows(10, 5, DataType::kFloat32, rows.data(), {.weight_version = 2}), 2U);
  EXPECT_EQ(rows, WeightRows(10, 5, kHidden, 2));
}

// 1 + 1/4096 is 1 in bf16.
TEST_F(WeightShardsTest, AnFp32MasterKeepsWhatTheHeadsTypeCannot) {
  Start();
  const auto head = client_->CreateHead({.name = "mastered",
                                         .vocab_size = kVocab,
                                         .hidden_size = kHidden,
                                         .weight_type = DataType::kBFloat16,
                                         .master_weights = true});
  ASSERT_TRUE(head.ok()) << head.status();
  const std::vector<float> fine(kVocab * kHidden, 1.0F + 1.0F / 4096);
  const auto write = head->BeginWrite({.write_key = "k"});
  ASSERT_TRUE(write.ok()) << write.status();
  for (const Shard& shard : kShards) {
    ASSERT_TRUE(write->WriteRows(shard.first_row, shard.rows, DataType::kFloat32, fine.data()).ok());
  }
  ASSERT_TRUE(write->Commit().ok());
  std::vector<float> read(kVocab * kHidden);
  ASSERT_TRUE(head->ReadWeights(DataType::kFloat32, read.data()).ok());
  EXPECT_EQ(read, fine);
  std::vector<uint16_t> narrow(kVocab * kHidden);
  ASSERT_TRUE(head->ReadWeights(DataType::kBFloat16, narrow.data()).ok());
  EXPECT_EQ(narrow, std::vector<uint16_t>(kVocab * kHidden, 0x3f80)) << "products see it rounded";
}

// Writers publish versions of which every element is the same number; no reader may ever see two.
TEST_F(WeightShardsTest, NoReaderSeesTwoVersionsAtOnce) {
  Start();
  ASSERT_TRUE(
      head_->WriteWeights(DataType::kFloat32, std::vector<float>(kVocab * kHidden, 1.0F).data()).ok());
  constexpr int kVersions = 30;
  std::atomic<bool> writing = true;
  std::vector<Head> readers = {Rank(), Rank()};
  std::vector<std::thread> threads;
  for (Head& reader : readers) {
    threads.emplace_back([&] {
      std::vector<float> weights(kVocab * kHidden);
      while (writing) {
        const auto version = reader.ReadWeights(DataType::kFloat32, weights.data());
        ASSERT_TRUE(version.ok()) << version.status();
        EXPECT_EQ(std::count(weights.begin(), weights.end(), static_cast<float>(*version)), kVocab * kHidden);
      }
    });
  }
  const Head writer = Rank();
  for (int version = 2; version <= kVersions; ++version) {
    const auto write = writer.BeginWrite({.write_key = absl::StrCat(version)});
    ASSERT_TRUE(write.ok());
    const std::vector<float> rows(kVocab * kHidden, static_cast<float>(version));
    for (const Shard& shard : kShards) {
      ASSERT_TRUE(write->WriteRows(shard.first_row, shard.rows, DataType::kFloat32, rows.data()).ok());
    }
    EXPECT_EQ(*write->Commit(), static_cast<uint64_t>(version));
  }
  writing = false;
  for (std::thread& thread : threads) thread.join();
}

// Ranks that are processes

constexpr int64_t kLargeVocab = 24 * 1024;
constexpr int64_t kLargeHidden = 512;  // 48 MiB in fp32

Ended RunRank(const std::string& target, const Shard& shard, const std::string& last_words = "") {
  std::vector<std::string> words = {
      WEIGHT_RANK_WORKER,         target, "large", "step 1", std::to_string(shard.first_row),
      std::to_string(shard.rows), "7"};
  if (!last_words.empty()) words.push_back(last_words);
  return RunProgram(std::move(words));
}

TEST_F(WeightShardsTest, ProcessesWriteTheirShardsThoughOneDiesAndNoneNeedsMemoryForMore) {
  Start();
  ASSERT_TRUE(client_
                  ->CreateHead({.name = "large",
                                .vocab_size = kLargeVocab,
                                .hidden_size = kLargeHidden,
                                .weight_type = DataType::kBFloat16,
                                .frozen = true})
                  .ok());
  const std::vector<Shard> shards = {{0, 10'000}, {10'000, 8'576}, {18'576, 6'000}};
  EXPECT_EQ(RunRank(server_->target(), shards[1], "die").status, 9);
  std::vector<Ended> ranks(shards.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < shards.size(); ++i) {
    threads.emplace_back([&, i] { ranks[i] = RunRank(server_->target(), shards[i]); });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < shards.size(); ++i) {
    EXPECT_EQ(ranks[i].status, 0) << ranks[i].output;
    std::istringstream stream(ranks[i].output);
    uint64_t version = 0;
    int64_t grown = 0;
    stream >> version >> grown;
    EXPECT_EQ(version, 1U);
    // Messages of 4 MiB and gRPC's buffers; the shards are 12 to 20 MiB, and the whole is 48.
    if (!MEMORY_CAN_BE_MEASURED) continue;
    EXPECT_LT(grown, 24 << 20) << i;
  }
}

// Tied embeddings, as docs/weights.md has them

// The trainer's embedding is the head's weight: it takes the head's gradient, adds its own, makes its step
// and writes the weight back.
TEST_F(WeightShardsTest, ATiedEmbeddingIsTrainedFromBothEnds) {
  StartWithWeights();
  std::vector<float> embedding(kVocab * kHidden);
  ASSERT_TRUE(head_->ReadWeights(DataType::kFloat32, embedding.data()).ok());
  Session session = Open();
  Data data(50);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());

  const std::vector<float> own = RandomFloats(kVocab * kHidden, 9);  // from the embedding's lookups
  std::vector<float> gradient = own;
  std::vector<float> of_head(kVocab * kHidden);
  const SessionMarks marks = session.marks();
  ASSERT_TRUE(head_->Flush({}, {&marks, 1}, of_head.data()).ok());
  for (size_t i = 0; i < gradient.size(); ++i) gradient[i] += of_head[i];
  for (size_t i = 0; i < gradient.size(); ++i) embedding[i] -= 0.1F * gradient[i];
  const auto version = head_->WriteWeights(DataType::kFloat32, embedding.data());
  ASSERT_TRUE(version.ok()) << version.status();

  // The next batch is computed with what the trainer has, to the bit.
  EXPECT_EQ(Read(), embedding);
  Data next(50, 11);
  Batch batch = next.batch();
  batch.weight_version = *version;
  ASSERT_TRUE(session.Compute(batch, next.outputs()).ok());
  auto twin = client_->CreateHead(
      {.name = "twin", .vocab_size = kVocab, .hidden_size = kHidden, .weight_type = DataType::kFloat32});
  ASSERT_TRUE(twin.ok());
  ASSERT_TRUE(twin->WriteWeights(DataType::kFloat32, embedding.data()).ok());
  auto twin_session = twin->OpenSession({.chunk_bytes = 8 * kHidden * 4});
  ASSERT_TRUE(twin_session.ok());
  Data expected(50, 11);
  ASSERT_TRUE(twin_session->Compute(expected.batch(), expected.outputs()).ok());
  EXPECT_EQ(next.losses, expected.losses);
  EXPECT_EQ(next.dx, expected.dx);
  EXPECT_NE(of_head, std::vector<float>(kVocab * kHidden, 0.0F));
}

}  // namespace
}  // namespace lossd::testing::weight_shards_test
