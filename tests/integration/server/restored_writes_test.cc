// RestoreCheckpoint while weights are on their way in: the restored head keeps the checkpoint's weights, and
// whoever was writing hears so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "server/engine/checkpoint/checkpoint_store.h"
#include "tests/support/test_server.h"
#include "tests/unit/engine/checkpoint/checkpoint_folder.h"

namespace lossd::testing::restored_writes_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kVocab = 8;
constexpr int64_t kHidden = 4;

class RestoredWritesTest : public ::testing::Test {
 protected:
  RestoredWritesTest() {
    CreateHead(stubs_, "h", kVocab, kHidden);
    v1::SaveCheckpointRequest request;
    request.set_head("h");
    request.set_tag("a");
    v1::SaveCheckpointResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(stubs_.heads->SaveCheckpoint(&context, request, &response).ok());
  }

  void Restore() {
    v1::RestoreCheckpointRequest request;
    request.set_head("h");
    v1::RestoreCheckpointResponse response;
    grpc::ClientContext context;
    const grpc::Status status = stubs_.heads->RestoreCheckpoint(&context, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  std::string Begin(const std::string& key) {
    v1::BeginWriteRequest request;
    request.set_head("h");
    request.set_write_key(key);
    v1::BeginWriteResponse response;
    grpc::ClientContext context;
    const grpc::Status status = stubs_.heads->BeginWrite(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.write_id();
  }
  // Half of the rows, all of them 0.
  grpc::Status WriteHalf(const std::string& id, int64_t first_row) {
    v1::WriteWeightsRequest rows;
    rows.set_head("h");
    rows.set_write_id(id);
    rows.set_first_row(first_row);
    rows.set_rows(kVocab / 2);
    rows.set_dtype(v1::DATA_TYPE_FLOAT32);
    rows.mutable_weights()->resize(kVocab / 2 * kHidden * sizeof(float));
    v1::WriteWeightsResponse response;
    grpc::ClientContext context;
    const auto writer = stubs_.heads->WriteWeights(&context, &response);
    writer->Write(rows);
    writer->WritesDone();
    return writer->Finish();
  }
  grpc::Status Commit(const std::string& id) {
    v1::CommitWriteRequest request;
    request.set_head("h");
    request.set_write_id(id);
    v1::CommitWriteResponse response;
    grpc::ClientContext context;
    return stubs_.heads->CommitWrite(&context, request, &response);
  }
  std::vector<float> Weights() {
    v1::ReadWeightsRequest request;
    request.set_head("h");
    grpc::ClientContext context;
    const auto reader = stubs_.heads->ReadWeights(&context, request);
    v1::ReadWeightsResponse piece;
    EXPECT_TRUE(reader->Read(&piece));
    EXPECT_EQ(piece.rows(), kVocab);
    std::vector<float> values(piece.weights().size() / sizeof(float));
    std::memcpy(values.data(), piece.weights().data(), piece.weights().size());
    while (reader->Read(&piece)) {
    }
    EXPECT_TRUE(reader->Finish().ok());
    return values;
  }

  engine::CheckpointFolder folder_;
  TestServer server_{[this] {
    TestServerOptions options;
    options.engine.checkpoints = *engine::CheckpointStore::Open(folder_.path());
    return options;
  }()};
  Stubs stubs_{server_.Channel()};
};

TEST_F(RestoredWritesTest, HalfAWriteAndItsCommitAreAborted) {
  const std::vector<float> before = Weights();
  const std::string id = Begin("w");
  ASSERT_TRUE(WriteHalf(id, 0).ok());
  Restore();
  const grpc::Status rows = WriteHalf(id, kVocab / 2);
  EXPECT_EQ(rows.error_code(), grpc::StatusCode::ABORTED) << rows.error_message();
  const grpc::Status committed = Commit(id);
  EXPECT_EQ(committed.error_code(), grpc::StatusCode::ABORTED) << committed.error_message();
  EXPECT_THAT(committed.error_message(), HasSubstr("head h was restored from a checkpoint since it began"));
  EXPECT_THAT(committed.error_message(), HasSubstr("begin another write"));
  EXPECT_EQ(Weights(), before);
  EXPECT_EQ(GetHead(stubs_, "h").staged_rows(), 0);

  const std::string next = Begin("w");
  EXPECT_NE(next, id) << "the same key is another write now";
  ASSERT_TRUE(WriteHalf(next, 0).ok());
  ASSERT_TRUE(WriteHalf(next, kVocab / 2).ok());
  EXPECT_TRUE(Commit(next).ok());
  EXPECT_EQ(Weights(), std::vector<float>(kVocab * kHidden));
}

TEST_F(RestoredWritesTest, AWholeWriteWhoseCommitComesLateIsAborted) {
  const std::vector<float> before = Weights();
  const std::string id = Begin("w");
  ASSERT_TRUE(WriteHalf(id, 0).ok());
  ASSERT_TRUE(WriteHalf(id, kVocab / 2).ok());
  Restore();
  EXPECT_EQ(Commit(id).error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(Weights(), before);
}

}  // namespace
}  // namespace lossd::testing::restored_writes_test
