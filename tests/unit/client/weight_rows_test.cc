// Rows of weights by WeightWrite and ReadRows against a server that misbehaves at exact points: nothing but
// these rows moves, in the type that says all and no more.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "tests/unit/client/fake_server.h"

namespace lossd::weight_rows_test {
namespace {

using ::testing::Each;
using testing::FakeServer;
using ::testing::Property;
using testing::RowFate;
using ::testing::SizeIs;

constexpr int64_t kVocab = FakeServer::kVocab;
constexpr int64_t kHidden = FakeServer::kHidden;
constexpr int64_t kRowBytes = kHidden * static_cast<int64_t>(sizeof(float));

class WeightRowsTest : public ::testing::Test {
 protected:
  void Connect() {
    auto client = Client::Connect(
        fake_.target(), {.reconnect_timeout = std::chrono::seconds(20), .transfer_bytes = 2 * kRowBytes});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    auto head = client_->GetHead(FakeServer::kName);
    ASSERT_TRUE(head.ok()) << head.status();
    head_ = std::make_unique<Head>(*std::move(head));
  }
  WeightWrite Begin() {
    auto write = head_->BeginWrite({.write_key = "step 7"});
    EXPECT_TRUE(write.ok()) << write.status();
    return *std::move(write);
  }
  static std::vector<float> Rows(int64_t rows) {
    std::vector<float> values;
    for (int64_t i = 0; i < rows * kHidden; ++i) values.push_back(static_cast<float>(i) * 0.5F + 1);
    return values;
  }

  FakeServer fake_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Head> head_;
};

TEST_F(WeightRowsTest, OnlyTheShardIsSentThroughCutsInPiecesOfTheTransfersSize) {
  Connect();
  const std::vector<float> before(kVocab * kHidden, -3);
  fake_.set_weights(before);
  fake_.cut_weight_write = [](int message) { return message == 1 || message == 3; };
  std::vector<std::pair<int64_t, int64_t>> progress;
  const WeightWrite write = Begin();
  EXPECT_EQ(write.id(), "id of step 7") << "the key is the ranks' own";
  const std::vector<float> shard = Rows(5);
  const absl::Status status =
      write.WriteRows(3, 5, DataType::kFloat32, shard.data(), {},
                      [&](int64_t done, int64_t total) { progress.emplace_back(done, total); });
  ASSERT_TRUE(status.ok()) << status;
  std::vector<float> expected = before;
  std::copy(shard.begin(), shard.end(), expected.begin() + 3 * kHidden);
  EXPECT_EQ(fake_.weights(), expected);
  EXPECT_EQ(fake_.observed().weight_write_streams, 3);
  EXPECT_LE(fake_.observed().largest_weight_bytes, 2 * kRowBytes);
  EXPECT_EQ(progress.front(), std::make_pair(int64_t{0}, 5 * kRowBytes));
  EXPECT_EQ(progress.back(), std::make_pair(5 * kRowBytes, 5 * kRowBytes));
  EXPECT_EQ(*write.Commit(), 2U);
}

TEST_F(WeightRowsTest, OnlyTheRowsAskedForAreReadThroughCuts) {
  Connect();
  fake_.set_weights(Rows(kVocab));
  fake_.on_weight_rows = [](int message) { return message == 1 ? RowFate::kCut : RowFate::kSend; };
  std::vector<float> rows(5 * kHidden);
  const auto version = head_->ReadRows(3, 5, DataType::kFloat32, rows.data(), {.weight_version = 1});
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(*version, 1U);
  const std::vector<float> all = Rows(kVocab);
  EXPECT_EQ(rows, std::vector<float>(all.begin() + 3 * kHidden, all.begin() + 8 * kHidden));
  const auto reads = fake_.observed().weight_reads;
  ASSERT_THAT(reads, SizeIs(2));
  EXPECT_EQ(reads[0].first_row(), 3);
  EXPECT_EQ(reads[0].rows(), 5);
  EXPECT_EQ(reads[1].first_row(), 5);
  EXPECT_EQ(reads[1].rows(), 3);
  EXPECT_THAT(reads, Each(Property(&v1::ReadWeightsRequest::weight_version, 1U)));
}

// As a server does that was started again: the rows that were staged went with the old process.
TEST_F(WeightRowsTest, AWriteOfAllRowsThatTheServerForgotIsBegunAgain) {
  const std::vector<float> all = Rows(kVocab);
  for (const bool rows_forgotten : {true, false}) {
    SCOPED_TRACE(rows_forgotten);
    fake_.rows_forgotten = rows_forgotten;
    fake_.forgotten_writes = 2;
    Connect();
    fake_.set_weights(std::vector<float>(kVocab * kHidden));
    const size_t begun = fake_.observed().begun_writes.size();
    const auto version = head_->WriteWeights(DataType::kFloat32, all.data());
    ASSERT_TRUE(version.ok()) << version.status();
    EXPECT_EQ(fake_.weights(), all);
    const auto writes = fake_.observed().begun_writes;
    ASSERT_EQ(writes.size(), begun + 3);
    EXPECT_TRUE(writes[begun].replace());
    EXPECT_FALSE(writes[begun + 1].replace()) << "another's write would go for one that is older";
    EXPECT_NE(writes[begun].write_key(), writes[begun + 1].write_key());
  }
}

TEST_F(WeightRowsTest, AForgottenCommitIsNotRepeatedBehindAnotherVersion) {
  fake_.forgotten_writes = 1;
  fake_.forgotten_are_published = true;
  Connect();
  const auto written = head_->WriteWeights(DataType::kFloat32, Rows(kVocab).data());
  EXPECT_TRUE(absl::IsNotFound(written.status())) << written.status();
  EXPECT_THAT(fake_.observed().begun_writes, SizeIs(1));
}

TEST_F(WeightRowsTest, AWriteThatAnothersTookThePlaceOfIsNotBegunAgain) {
  fake_.rows_forgotten = true;
  fake_.forgotten_writes = 1;
  fake_.others_write = true;
  Connect();
  const auto written = head_->WriteWeights(DataType::kFloat32, Rows(kVocab).data());
  EXPECT_TRUE(absl::IsNotFound(written.status())) << written.status();
  EXPECT_THAT(fake_.observed().begun_writes, SizeIs(2));
}

TEST_F(WeightRowsTest, AServerThatForgetsEveryWriteIsGivenUp) {
  fake_.forgotten_writes = 1'000'000;
  auto client = Client::Connect(fake_.target(), {.reconnect_timeout = std::chrono::milliseconds(100)});
  ASSERT_TRUE(client.ok()) << client.status();
  const auto written =
      (*client)->GetHead(FakeServer::kName)->WriteWeights(DataType::kFloat32, Rows(kVocab).data());
  EXPECT_TRUE(absl::IsNotFound(written.status())) << written.status();
}

TEST_F(WeightRowsTest, AWriteOfSeveralWritersThatIsForgottenIsTheirs) {
  fake_.forgotten_writes = 1;
  Connect();
  const WeightWrite write = Begin();
  ASSERT_TRUE(write.WriteRows(0, kVocab, DataType::kFloat32, Rows(kVocab).data()).ok());
  EXPECT_TRUE(absl::IsNotFound(write.Commit().status()));
  EXPECT_THAT(fake_.observed().begun_writes, SizeIs(1));
}

}  // namespace
}  // namespace lossd::weight_rows_test
