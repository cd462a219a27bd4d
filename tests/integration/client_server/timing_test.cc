// What chunks tell of their way: from the server, and through the client library.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lossd/client.h"
#include "tests/support/test_server.h"

namespace lossd::timing_test {
namespace {

using testing::ComputeStream;
using testing::MakeChunk;
using testing::RandomFloats;
using testing::RandomLabels;
using testing::Stubs;
using testing::TestServer;

constexpr int64_t kVocab = 61;
constexpr int64_t kHidden = 20;
constexpr int64_t kTokens = 40;

class TimingTest : public ::testing::Test {
 protected:
  TimingTest() : stubs_(server_.Channel()) { testing::CreateHead(stubs_, "head", kVocab, kHidden); }

  absl::StatusOr<BatchResult> Compute(Timing timing, int batches, int32_t lanes = 1) {
    auto client = Client::Connect(server_.target(), {});
    if (!client.ok()) return client.status();
    auto head = (*client)->GetHead("head");
    if (!head.ok()) return head.status();
    auto session = head->OpenSession(
        {.chunk_bytes = 8 * kHidden * static_cast<int64_t>(sizeof(float)), .lanes = lanes, .timing = timing});
    if (!session.ok()) return session.status();
    const std::vector<int64_t> labels = RandomLabels(kTokens, kVocab, 5);
    const std::vector<float> hidden = RandomFloats(kTokens * kHidden, 6);
    std::vector<float> dx(kTokens * kHidden);
    absl::StatusOr<BatchResult> result = absl::InternalError("no batch");
    for (int i = 0; i < batches; ++i) {
      result = session->Compute({.labels = labels, .hidden_states = hidden.data()}, {.dx = dx.data()});
      if (!result.ok()) break;
    }
    return result;
  }

  // The timings are of the batch's tokens in their order, each once.
  static void ExpectAllTokens(const std::vector<ChunkTiming>& timings) {
    int64_t next_token = 0;
    for (const ChunkTiming& chunk : timings) {
      EXPECT_EQ(chunk.first_token, next_token);
      EXPECT_EQ(chunk.tokens, 8);
      next_token += chunk.tokens;
    }
    EXPECT_EQ(next_token, kTokens);
  }

  static void ExpectStagesInOrder(const ChunkTiming& chunk) {
    // Both clocks are one: nothing arrives before it was sent (but for what microseconds are cut off).
    EXPECT_LE(chunk.sent, chunk.received + std::chrono::microseconds(1));
    EXPECT_LE(chunk.received, chunk.accepted);
    EXPECT_LE(chunk.accepted, chunk.started);
    EXPECT_EQ(chunk.started, chunk.input_ready);  // a CPU copies nothing
    EXPECT_LE(chunk.input_ready, chunk.compute_started);
    EXPECT_LE(chunk.compute_started, chunk.computed);
    EXPECT_EQ(chunk.computed, chunk.output_ready);
    EXPECT_LE(chunk.output_ready, chunk.answered);
    EXPECT_LE(chunk.answered, chunk.arrived);
  }

  TestServer server_;
  Stubs stubs_;
};

TEST_F(TimingTest, AnswersTellNothingUnlessAsked) {
  ComputeStream stream(stubs_, testing::OpenSession(stubs_, "head", "key"));
  EXPECT_EQ(stream.ready().server_time(), 0);
  const auto result = stream.Compute(MakeChunk(1, stream.ready().generation(), 4, kVocab, kHidden, 1));
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ(result->disposition(), v1::DISPOSITION_ACCUMULATED);
  EXPECT_FALSE(result->has_timing());
  const auto of_client = Compute(Timing::kNone, 1);
  ASSERT_TRUE(of_client.ok()) << of_client.status();
  EXPECT_TRUE(of_client->timings.empty());
}

TEST_F(TimingTest, EveryChunkTellsItsStagesInTheirOrder) {
  const auto result = Compute(Timing::kReport, 3);
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(static_cast<int64_t>(result->timings.size()), result->chunks);
  ExpectAllTokens(result->timings);
  const ChunkTiming* before = nullptr;
  for (const ChunkTiming& chunk : result->timings) {
    ExpectStagesInOrder(chunk);
    ASSERT_TRUE(chunk.earlier_done.has_value());  // batches have gone before
    EXPECT_LE(*chunk.earlier_done, chunk.compute_started);
    if (before != nullptr) {
      EXPECT_LE(before->computed, *chunk.earlier_done);  // dW comes after dX
    }
    before = &chunk;
  }
}

TEST_F(TimingTest, ChunksOfAllLanesTellTheirStagesOnOneClock) {
  const auto result = Compute(Timing::kReport, 3, 3);
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(result->first_sequences.size(), 3U);
  ASSERT_EQ(static_cast<int64_t>(result->timings.size()), result->chunks);
  ExpectAllTokens(result->timings);
  for (const ChunkTiming& chunk : result->timings) {
    ExpectStagesInOrder(chunk);
    ASSERT_TRUE(chunk.earlier_done.has_value());
    EXPECT_EQ(chunk.clock_error, result->timings.front().clock_error);
  }
}

TEST_F(TimingTest, ARejectedChunkHasNoTiming) {
  const auto session = testing::OpenSession(stubs_, "head", "key");
  grpc::ClientContext context;
  const auto stream = stubs_.losses->Compute(&context);
  v1::ComputeRequest request;
  request.mutable_start()->set_session_id(session.session_id());
  request.mutable_start()->set_incarnation(session.incarnation());
  request.mutable_start()->set_report_timing(true);
  ASSERT_TRUE(stream->Write(request));
  v1::ComputeResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_GT(response.ready().server_time(), 0);
  *request.mutable_chunk() = MakeChunk(1, session.generation(), 4, kVocab, kHidden, 1);
  request.mutable_chunk()->mutable_labels()->pop_back();
  ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(stream->Read(&response));
  ASSERT_TRUE(response.has_result());
  EXPECT_EQ(response.result().disposition(), v1::DISPOSITION_REJECTED);
  EXPECT_FALSE(response.result().has_timing());
  context.TryCancel();
}

}  // namespace
}  // namespace lossd::timing_test
