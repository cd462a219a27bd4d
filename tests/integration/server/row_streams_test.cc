// Streams of rows that nobody reads: they count like streams of chunks, and never keep a window from being
// read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/test_server.h"
#include "tests/support/wait.h"

namespace lossd::testing::row_streams_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kVocab = 7168;
constexpr int64_t kHidden = 256;                   // 7 MiB of weights
constexpr int64_t kHeld = int64_t{6} << 20;        // by a stream: three pieces of 2 MiB
constexpr int64_t kStaging = int64_t{16} << 20;    // and an eighth for rows alone: room for three streams
constexpr int64_t kLaneCredit = int64_t{1} << 20;  // a session with 16 lanes fills it

// A call of ReadWeights that the server has heard of.
class UnreadStream {
 public:
  UnreadStream(Stubs& stubs, const std::string& head) {
    v1::ReadWeightsRequest request;
    request.set_head(head);
    reader_ = stubs.heads->ReadWeights(&context_, request);
    reader_->WaitForInitialMetadata();
  }
  ~UnreadStream() {
    if (finished_) return;
    context_.TryCancel();
    Finish();
  }
  // Reads what there is.
  grpc::Status Finish() {
    v1::ReadWeightsResponse piece;
    while (reader_->Read(&piece)) rows_ += piece.rows();
    finished_ = true;
    return reader_->Finish();
  }
  int64_t rows() const { return rows_; }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::ReadWeightsResponse>> reader_;
  bool finished_ = false;
  int64_t rows_ = 0;
};

class RowStreamsTest : public ::testing::Test {
 protected:
  void Start(int64_t max_streams = 100, int64_t head_staging_bytes = 0) {
    TestServerOptions options;
    options.engine.max_streams = max_streams;
    options.engine.staging_bytes = kStaging;
    options.engine.head_staging_bytes = head_staging_bytes;
    options.engine.lane_credit_bytes = kLaneCredit;
    options.engine.session_credit_bytes = kStaging;
    options.engine.chunk_limits.max_chunk_bytes = kLaneCredit / 2;
    server_ = std::make_unique<TestServer>(options);
    stubs_ = std::make_unique<Stubs>(server_->Channel());
    CreateHead(*stubs_, "h", kVocab, kHidden);
  }
  std::unique_ptr<UnreadStream> Unread(const std::string& head = "h") {
    return std::make_unique<UnreadStream>(*stubs_, head);
  }
  std::vector<std::unique_ptr<UnreadStream>> Unread(int count) {
    std::vector<std::unique_ptr<UnreadStream>> streams;
    for (int i = 0; i < count; ++i) streams.push_back(Unread());
    return streams;
  }
  v1::GetMemoryResponse Memory() {
    v1::GetMemoryResponse memory;
    grpc::ClientContext context;
    EXPECT_TRUE(stubs_->status->GetMemory(&context, {}, &memory).ok());
    return memory;
  }
  void AwaitStreams(int64_t count) {
    Await("streams to come or go", [&] { return server_->engine().row_streams().Total().streams == count; });
  }
  grpc::Status Open(int32_t lanes) {
    v1::OpenSessionRequest request;
    request.set_head("h");
    request.set_client_key("c" + std::to_string(++sessions_));
    request.set_lanes(lanes);
    v1::OpenSessionResponse response;
    grpc::ClientContext context;
    return stubs_->losses->OpenSession(&context, request, &response);
  }
  void ExpectRefused(const grpc::Status& status, const std::string& flag) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(flag));
    EXPECT_THAT(status.error_details(), HasSubstr("RetryInfo")) << "the client library tries again";
    EXPECT_GE(server_->rejected(engine::RejectReason::kOverload), 1U);
  }

  std::unique_ptr<TestServer> server_;
  std::unique_ptr<Stubs> stubs_;
  int sessions_ = 0;
};

TEST_F(RowStreamsTest, TheyCountAgainstStagingUntilTheyAreReadAndMemoryListsThem) {
  Start();
  auto streams = Unread(3);
  const v1::GetMemoryResponse memory = Memory();
  EXPECT_EQ(memory.row_streams(), 3);
  EXPECT_EQ(memory.row_stream_bytes(), 3 * kHeld);
  EXPECT_EQ(memory.staging_limit_bytes(), kStaging);
  ASSERT_EQ(memory.heads_size(), 1);
  EXPECT_EQ(memory.heads(0).row_streams(), 3);
  EXPECT_EQ(memory.heads(0).row_stream_bytes(), 3 * kHeld);
  ExpectRefused(Unread()->Finish(), "--staging_bytes");
  ExpectRefused(Open(1), "--staging_bytes");

  EXPECT_TRUE(streams.back()->Finish().ok());
  EXPECT_EQ(streams.back()->rows(), kVocab);
  AwaitStreams(2);
  const auto next = Unread();
  EXPECT_TRUE(next->Finish().ok());
  EXPECT_EQ(next->rows(), kVocab);
  streams.clear();
  AwaitStreams(0);
  EXPECT_EQ(Memory().row_stream_bytes(), 0);
  EXPECT_TRUE(Open(16).ok());
}

TEST_F(RowStreamsTest, TheyCountAgainstTheLimitOfStreamsTogetherWithThoseOfChunks) {
  Start(/*max_streams=*/3);
  const v1::OpenSessionResponse session = OpenSession(*stubs_, "h", "c");
  ComputeStream chunks(*stubs_, session);
  const auto streams = Unread(2);
  ExpectRefused(Unread()->Finish(), "--max_streams");
  ComputeStream another(*stubs_, session);
  ExpectRefused(another.Finish(), "--max_streams");
}

TEST_F(RowStreamsTest, SessionsThatHaveTakenAllDoNotKeepAWindowFromBeingRead) {
  Start(/*max_streams=*/1);
  v1::OpenSessionResponse session = OpenSession(*stubs_, "h", "c", 16);
  EXPECT_EQ(server_->engine().staging_reserved(), kStaging);
  ComputeStream chunks(*stubs_, session);
  v1::BeginFlushResponse flush;
  ASSERT_TRUE(BeginFlush(*stubs_, "h", &flush).ok());
  EXPECT_EQ(ReadGradient(*stubs_, "h", flush.flush_id()).size(), static_cast<size_t>(kVocab * kHidden));
}

TEST_F(RowStreamsTest, AHeadsShareIsItsOwn) {
  Start(/*max_streams=*/100, /*head_staging_bytes=*/kStaging / 2);
  CreateHead(*stubs_, "other", kVocab, kHidden);
  const auto first = Unread();  // of 8 MiB, and one for rows alone
  ExpectRefused(Unread()->Finish(), "--head_staging_bytes");
  EXPECT_TRUE(Unread("other")->Finish().ok());
}

TEST_F(RowStreamsTest, AShortStreamHoldsWhatItStreams) {
  Start();
  CreateHead(*stubs_, "small", 64, 8);
  const auto stream = Unread("small");
  // The server may be done with it: all of it fits into the connection.
  EXPECT_LE(server_->engine().row_streams().Total().bytes, 64 * 8 * 4);
}

}  // namespace
}  // namespace lossd::testing::row_streams_test
