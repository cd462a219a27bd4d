// Rows of weights by WeightWrite and ReadRows: nothing but these rows moves, in the type that says all and no
// more.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "tests/support/session_data.h"
#include "tests/support/session_fixture.h"

namespace lossd::weight_rows_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::kHidden;
using testing::kVocab;
using ::testing::Property;
using ::testing::SizeIs;

constexpr int64_t kRowBytes = kHidden * static_cast<int64_t>(sizeof(float));

class WeightRowsTest : public testing::SessionTest {
 protected:
  void Connect() {
    SessionTest::Connect({.reconnect_timeout = std::chrono::seconds(20), .transfer_bytes = 2 * kRowBytes});
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

  // Done by somebody else before the first so many commits arrive, or before the rows of the first so many
  // writes.
  void BeforeCommits(int commits, std::function<void()> action) {
    server_.recorder().cut_weight_write = nullptr;
    server_.recorder().before_call = [commits, action = std::move(action)](const std::string& method,
                                                                           int) mutable {
      if (method == "CommitWrite" && commits-- > 0) action();
    };
  }
  void BeforeRowsOf(int writes, std::function<void()> action) {
    server_.recorder().before_call = nullptr;
    server_.recorder().cut_weight_write = [this, writes, begun = size_t{0},
                                           action = std::move(action)](int) mutable {
      const size_t now = server_.observed().begun_writes.size();
      if (std::exchange(begun, now) != now && writes-- > 0) action();
      return false;
    };
  }
};

TEST_F(WeightRowsTest, ABiasComesWithItsRows) {
  server_.config.bias = true;
  Connect();
  const std::vector<float> bias{5, 6, 7};
  WeightWrite write = Begin();
  const std::vector<float> none(kVocab);
  ASSERT_TRUE(write.WriteRows(0, kVocab, DataType::kFloat32, Rows(kVocab).data(), none).ok());
  ASSERT_TRUE(write.WriteRows(4, 3, DataType::kFloat32, Rows(3).data(), bias).ok());
  ASSERT_TRUE(write.Commit().ok());
  const std::vector<float> written = server_.bias();
  EXPECT_THAT(std::vector<float>(written.begin() + 4, written.begin() + 7), ElementsAre(5, 6, 7));
  std::vector<float> read(2);
  std::vector<float> rows(2 * kHidden);
  ASSERT_TRUE(head_->ReadRows(5, 2, DataType::kFloat32, rows.data(), {.bias = read}).ok());
  EXPECT_THAT(read, ElementsAre(6, 7));
}

TEST_F(WeightRowsTest, RowsAreRoundedBeforeTheyAreSent) {
  server_.config.weight_type = DataType::kBFloat16;
  Connect();
  ASSERT_TRUE(Begin().WriteRows(0, 2, DataType::kFloat32, Rows(2).data()).ok());
  EXPECT_THAT(server_.observed().weight_writes,
              Each(Property(&v1::WriteWeightsRequest::dtype, v1::DATA_TYPE_BFLOAT16)));
  EXPECT_EQ(server_.observed().largest_weight_bytes, 2 * kHidden * 2);
  std::vector<float> wide(kVocab * kHidden);
  ASSERT_TRUE(head_->ReadWeights(DataType::kFloat32, wide.data()).ok());
  EXPECT_EQ(server_.observed().weight_reads.back().dtype(), v1::DATA_TYPE_BFLOAT16) << "widened here";
}

TEST_F(WeightRowsTest, AnFp32MasterIsWrittenAndReadInFp32) {
  server_.config.weight_type = DataType::kBFloat16;
  server_.config.optimizer.kind = OptimizerKind::kSgd;
  server_.config.master_weights = true;
  Connect();
  std::vector<float> fine(kVocab * kHidden, 1.0F + 1.0F / 4096);  // which bf16 does not have
  ASSERT_TRUE(head_->WriteWeights(DataType::kFloat32, fine.data()).ok());
  EXPECT_THAT(server_.observed().weight_writes,
              Each(Property(&v1::WriteWeightsRequest::dtype, v1::DATA_TYPE_FLOAT32)));
  EXPECT_EQ(server_.weights(), fine);
  std::vector<float> read(kVocab * kHidden);
  ASSERT_TRUE(head_->ReadWeights(DataType::kFloat32, read.data()).ok());
  EXPECT_EQ(read, fine);
  EXPECT_EQ(server_.observed().weight_reads.back().dtype(), v1::DATA_TYPE_FLOAT32);
  std::vector<uint16_t> narrow(kVocab * kHidden);
  ASSERT_TRUE(head_->ReadWeights(DataType::kBFloat16, narrow.data()).ok());
  EXPECT_EQ(server_.observed().weight_reads.back().dtype(), v1::DATA_TYPE_BFLOAT16) << "the compute copy's";
}

TEST_F(WeightRowsTest, RowsThatTheHeadDoesNotHaveAreRefusedBeforeAnythingIsSent) {
  Connect();
  const WeightWrite write = Begin();
  std::vector<float> rows = Rows(kVocab);
  struct Case {
    int64_t first_row;
    int64_t rows;
    const char* message;
  };
  for (const Case& wrong :
       {Case{-1, 1, "first_row is -1"}, Case{kVocab + 1, 0, "first_row is 12"}, Case{0, -1, "rows is -1"},
        Case{0, kVocab + 1, "rows is 12"}, Case{5, kVocab - 4, "from first_row 5 on there are 6"},
        Case{5, INT64_MAX, "rows is 9223372036854775807"}}) {
    SCOPED_TRACE(wrong.message);
    const absl::Status written =
        write.WriteRows(wrong.first_row, wrong.rows, DataType::kFloat32, rows.data());
    EXPECT_EQ(written.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(written.message()), HasSubstr(wrong.message));
    const auto read = head_->ReadRows(wrong.first_row, wrong.rows, DataType::kFloat32, rows.data());
    EXPECT_EQ(read.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(read.status().message()), HasSubstr(wrong.message));
  }
  EXPECT_EQ(write.WriteRows(0, 1, DataType::kFloat32, nullptr).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(write.WriteRows(0, 1, DataType::kFloat32, rows.data(), std::vector<float>(1)).code(),
            absl::StatusCode::kInvalidArgument)
      << "it has no bias";
  EXPECT_EQ(head_->ReadRows(0, 0, DataType::kFloat32, rows.data()).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(write.WriteRows(kVocab, 0, DataType::kFloat32, rows.data()).ok()) << "a rank without rows";
  EXPECT_EQ(server_.observed().weight_write_streams, 0);
  EXPECT_TRUE(server_.observed().weight_reads.empty());
}

TEST_F(WeightRowsTest, OnlyTheShardIsSentThroughCutsInPiecesOfTheTransfersSize) {
  Connect();
  const std::vector<float> before(kVocab * kHidden, -3);
  const WeightWrite write = Begin();
  EXPECT_EQ(server_.observed().begun_writes.at(0).write_key(), "step 7") << "the key is the ranks' own";
  ASSERT_TRUE(write.WriteRows(0, kVocab, DataType::kFloat32, before.data()).ok());
  const int sent = static_cast<int>(server_.observed().weight_writes.size());
  server_.recorder().cut_weight_write = [sent](int message) {
    return message == sent + 1 || message == sent + 3;
  };
  std::vector<std::pair<int64_t, int64_t>> progress;
  const std::vector<float> shard = Rows(5);
  const absl::Status status =
      write.WriteRows(3, 5, DataType::kFloat32, shard.data(), {},
                      [&](int64_t done, int64_t total) { progress.emplace_back(done, total); });
  ASSERT_TRUE(status.ok()) << status;
  std::vector<float> expected = before;
  std::copy(shard.begin(), shard.end(), expected.begin() + 3 * kHidden);
  EXPECT_EQ(server_.observed().weight_write_streams, 1 + 3);
  EXPECT_LE(server_.observed().largest_weight_bytes, 2 * kRowBytes);
  EXPECT_EQ(progress.front(), std::make_pair(int64_t{0}, 5 * kRowBytes));
  EXPECT_EQ(progress.back(), std::make_pair(5 * kRowBytes, 5 * kRowBytes));
  EXPECT_EQ(*write.Commit(), 2U);
  EXPECT_EQ(server_.weights(), expected);
}

TEST_F(WeightRowsTest, OnlyTheRowsAskedForAreReadThroughCuts) {
  Connect();
  server_.set_weights(Rows(kVocab));
  server_.recorder().row_cuts = {5};
  std::vector<float> rows(5 * kHidden);
  const auto version = head_->ReadRows(3, 5, DataType::kFloat32, rows.data(), {.weight_version = 2});
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(*version, 2U);
  const std::vector<float> all = Rows(kVocab);
  EXPECT_EQ(rows, std::vector<float>(all.begin() + 3 * kHidden, all.begin() + 8 * kHidden));
  const auto reads = server_.observed().weight_reads;
  ASSERT_THAT(reads, SizeIs(2));
  EXPECT_EQ(reads[0].first_row(), 3);
  EXPECT_EQ(reads[0].rows(), 5);
  EXPECT_EQ(reads[1].first_row(), 5);
  EXPECT_EQ(reads[1].rows(), 3);
  EXPECT_THAT(reads, Each(Property(&v1::ReadWeightsRequest::weight_version, 2U)));
}

// As a server does that was started again: the rows that were staged went with the old process.
TEST_F(WeightRowsTest, AWriteOfAllRowsThatTheServerForgotIsBegunAgain) {
  const std::vector<float> all = Rows(kVocab);
  for (const bool rows_forgotten : {true, false}) {
    SCOPED_TRACE(rows_forgotten);
    Connect();
    server_.set_weights(std::vector<float>(kVocab * kHidden));
    rows_forgotten ? BeforeRowsOf(2, [this] { server_.ForgetWrite(); })
                   : BeforeCommits(2, [this] { server_.ForgetWrite(); });
    const size_t begun = server_.observed().begun_writes.size();
    const auto version = head_->WriteWeights(DataType::kFloat32, all.data());
    ASSERT_TRUE(version.ok()) << version.status();
    EXPECT_EQ(server_.weights(), all);
    const auto writes = server_.observed().begun_writes;
    ASSERT_EQ(writes.size(), begun + 3);
    EXPECT_TRUE(writes[begun].replace());
    EXPECT_FALSE(writes[begun + 1].replace()) << "another's write would go for one that is older";
    EXPECT_NE(writes[begun].write_key(), writes[begun + 1].write_key());
  }
}

TEST_F(WeightRowsTest, AForgottenCommitIsNotRepeatedBehindAnotherVersion) {
  Connect();
  BeforeCommits(1, [this] {
    server_.ForgetWrite();
    server_.Publish(testing::kHeadName);
  });
  const auto written = head_->WriteWeights(DataType::kFloat32, Rows(kVocab).data());
  EXPECT_TRUE(absl::IsNotFound(written.status())) << written.status();
  EXPECT_THAT(server_.observed().begun_writes, SizeIs(1));
}

TEST_F(WeightRowsTest, AWriteThatAnothersTookThePlaceOfIsNotBegunAgain) {
  Connect();
  BeforeRowsOf(1, [this] { server_.BeginWrite(); });
  const auto written = head_->WriteWeights(DataType::kFloat32, Rows(kVocab).data());
  EXPECT_TRUE(absl::IsNotFound(written.status())) << written.status();
  EXPECT_THAT(server_.observed().begun_writes, SizeIs(2));
}

TEST_F(WeightRowsTest, AServerThatForgetsEveryWriteIsGivenUp) {
  BeforeCommits(1'000'000, [this] { server_.ForgetWrite(); });
  auto client = Client::Connect(server_.target(), {.reconnect_timeout = std::chrono::milliseconds(100)});
  ASSERT_TRUE(client.ok()) << client.status();
  const auto written =
      (*client)->GetHead(testing::kHeadName)->WriteWeights(DataType::kFloat32, Rows(kVocab).data());
  EXPECT_TRUE(absl::IsNotFound(written.status())) << written.status();
}

TEST_F(WeightRowsTest, AWriteOfSeveralWritersThatIsForgottenIsTheirs) {
  Connect();
  BeforeCommits(1, [this] { server_.ForgetWrite(); });
  const WeightWrite write = Begin();
  ASSERT_TRUE(write.WriteRows(0, kVocab, DataType::kFloat32, Rows(kVocab).data()).ok());
  EXPECT_TRUE(absl::IsNotFound(write.Commit().status()));
  EXPECT_THAT(server_.observed().begun_writes, SizeIs(1));
}

}  // namespace
}  // namespace lossd::weight_rows_test
