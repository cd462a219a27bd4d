// Rows of weights by WeightWrite and ReadRows: nothing but these rows moves, in the type that says all and no
// more.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "tests/integration/client/real_server.h"
#include "tests/unit/client/session_data.h"

namespace lossd::weight_rows_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::kHidden;
using testing::kVocab;
using ::testing::Property;
using testing::RealServer;

constexpr int64_t kRowBytes = kHidden * static_cast<int64_t>(sizeof(float));

class WeightRowsTest : public ::testing::Test {
 protected:
  void Connect() {
    auto client = Client::Connect(
        server_.target(), {.reconnect_timeout = std::chrono::seconds(20), .transfer_bytes = 2 * kRowBytes});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    auto head = client_->GetHead(testing::kHeadName);
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

  RealServer server_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Head> head_;
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

}  // namespace
}  // namespace lossd::weight_rows_test
