// lossd::Session: batches, credit, generations.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "lossd/client.h"
#include "tests/support/session_data.h"
#include "tests/support/session_fixture.h"
#include "tests/support/wait.h"

namespace lossd::session_test {
namespace {

using testing::Data;
using ::testing::HasSubstr;
using testing::kHidden;
using testing::kTokensPerChunk;
using testing::kVocab;
using testing::SessionTest;

TEST_F(SessionTest, BatchComesBackWholeAndIsAddedOnce) {
  Session session = Open();
  Data data(7);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(server_.window(), data.Window());
  EXPECT_EQ(result->chunks, 4);
  EXPECT_EQ(result->repeated_chunks, 0);
  EXPECT_EQ(result->first_sequences.at(0), 1U);
  EXPECT_EQ(result->valid_tokens, 7);
  double sum = 0;
  for (const float loss : data.losses) sum += loss;
  EXPECT_EQ(result->loss_sum, sum);
  EXPECT_EQ(session.marks().lanes.at(0).accepted, 4U);
  EXPECT_EQ(session.reconnects(), 0);
}

TEST_F(SessionTest, ChunksCarryTheBatchsOptionsAndPlaces) {
  Session session = Open();
  Data data(5);
  data.labels[1] = -7;
  Batch batch = data.batch();
  batch.ignore_index = -7;
  batch.gradient_scale = 0.5F;
  batch.first_token = 1000;
  ASSERT_TRUE(session.Compute(batch, data.outputs()).ok());
  EXPECT_EQ(data.losses[1], 0.0F);
  std::vector<int64_t> first_tokens;
  uint64_t sequence = 1;
  for (const auto& chunk : server_.observed().chunks) {
    first_tokens.push_back(chunk.first_token());
    EXPECT_EQ(chunk.sequence(), sequence++);
    EXPECT_EQ(chunk.generation(), 1U);
    EXPECT_EQ(chunk.ignore_index(), -7);
    EXPECT_EQ(chunk.gradient_scale(), 0.5F);
  }
  EXPECT_EQ(first_tokens, (std::vector<int64_t>{1000, 1003}));  // of tokens 0 2, 3 4
}

TEST_F(SessionTest, EmptyBatchSucceedsWithoutACall) {
  Session session = Open();
  const auto result = session.Compute({}, {});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->chunks, 0);
  EXPECT_TRUE(server_.observed().chunks.empty());
}

TEST_F(SessionTest, LossOnlyAddsNothingAndReturnsNoDx) {
  Session session = Open();
  Data data(5);
  Batch batch = data.batch();
  batch.mode = ComputeMode::kLossOnly;
  ASSERT_TRUE(session.Compute(batch, {.losses = data.losses}).ok());
  EXPECT_EQ(data.losses[3], static_cast<float>(data.labels[3]) + data.hidden[3 * kHidden]);
  EXPECT_EQ(server_.window(), std::vector<float>(kVocab * kHidden, 0.0F));
}

TEST_F(SessionTest, OutputsMayBeUnwantedOrNarrow) {
  Session session = Open();
  Data data(4);
  ASSERT_TRUE(session.Compute(data.batch(), {}).ok());
  EXPECT_EQ(server_.window(), data.Window());
  EXPECT_EQ(server_.observed().chunks.back().mode(), v1::COMPUTE_MODE_LOSS_AND_WEIGHT_GRADIENT);
  std::vector<uint16_t> dx(data.hidden.size());
  ASSERT_TRUE(session.Compute(data.batch(), {.dx_type = DataType::kBFloat16, .dx = dx.data()}).ok());
  // Small whole numbers are exact in bfloat16: the upper half of their fp32.
  for (size_t i = 0; i < dx.size(); ++i) {
    const float expected = 2 * data.hidden[i];
    uint32_t bits = 0;
    std::memcpy(&bits, &expected, sizeof bits);
    EXPECT_EQ(dx[i], bits >> 16);
  }
}

TEST_F(SessionTest, BadBatchesAreRefusedBeforeAnythingIsSent) {
  Session session = Open();
  Data data(3);
  const auto message = [&](const Batch& batch, const BatchOutputs& outputs) {
    const auto result = session.Compute(batch, outputs);
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument) << result.status();
    return std::string(result.status().message());
  };
  std::vector<float> two(2);
  EXPECT_THAT(message(data.batch(), {.losses = two}),
              HasSubstr("losses has room for 2 tokens but labels has 3"));
  Batch batch = data.batch();
  batch.hidden_states = nullptr;
  EXPECT_THAT(message(batch, data.outputs()), HasSubstr("hidden_states is null"));
  batch = data.batch();
  batch.mode = ComputeMode::kLossOnly;
  EXPECT_THAT(message(batch, data.outputs()), HasSubstr("dx is not null"));
  batch = data.batch();
  batch.gradient_scale = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(message(batch, data.outputs()), HasSubstr("gradient_scale"));
  data.labels[2] = kVocab;
  EXPECT_THAT(message(data.batch(), data.outputs()), HasSubstr("labels[2] is 11"));
  EXPECT_TRUE(server_.observed().chunks.empty());
  data.labels[2] = 1;
  EXPECT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
}

class SessionCreditTest : public SessionTest, public ::testing::WithParamInterface<int32_t> {};

TEST_P(SessionCreditTest, OutstandingPayloadStaysWithinTheCreditOfEachLane) {
  constexpr int64_t kPayload = kTokensPerChunk * (8 + 4 + 2 * kHidden * 4);  // of one chunk, in and out
  constexpr int64_t kChunks = 12;                                            // of each lane
  server_.options.engine.lane_credit_bytes = 3 * kPayload + 5;
  std::map<int, std::atomic<int64_t>> answered;
  for (int lane = 0; lane < GetParam(); ++lane) answered[lane] = 0;
  server_.recorder().before_answer = [&](int lane, uint64_t) {
    std::atomic<int64_t>& before = answered.at(lane);
    testing::Await("the credit to be used up", [&] {
      const auto lanes = server_.observed().chunk_lanes;
      const int64_t sent = std::count(lanes.begin(), lanes.end(), lane);
      return sent - before == 3 || sent == kChunks;
    });
    ++before;
  };
  Session session = Open("trainer", GetParam());
  Data data(kChunks * GetParam() * kTokensPerChunk);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  data.ExpectOutputs();
  EXPECT_EQ(server_.observed().peak_outstanding, 3);
}

INSTANTIATE_TEST_SUITE_P(Lanes, SessionCreditTest, ::testing::Values(1, 4));

TEST_F(SessionTest, OneChunkGoesOutHoweverSmallTheCredit) {
  server_.options.engine.lane_credit_bytes = 1;
  Session session = Open();
  Data data(3);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  data.ExpectOutputs();
  EXPECT_EQ(server_.observed().chunks.size(), 3U);  // one token each
}

// Generations

TEST_F(SessionTest, FollowsAFlushByThisProcessWithoutBeingRefused) {
  Session session = Open();
  Data data(4);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  std::vector<float> gradient(kVocab * kHidden);
  const SessionMarks marks = session.marks();
  ASSERT_TRUE(head_->Flush({}, {&marks, 1}, gradient.data()).ok());
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  EXPECT_EQ(server_.observed().chunks.back().generation(), 2U);
  EXPECT_EQ(server_.observed().streams, 1);
  EXPECT_EQ(server_.window(), data.Window());
}

// Places are those of a window: one that is open again goes on where it was.
TEST_F(SessionTest, BatchDuringAnAbortedFlushReturnsToItsPlacesInTheOldWindow) {
  Connect();
  auto session =
      head_->OpenSession({.client_key = "trainer", .lanes = 1, .deterministic = Deterministic::kYes});
  ASSERT_TRUE(session.ok()) << session.status();
  Data data(4);
  ASSERT_TRUE(session->Compute(data.batch(), data.outputs()).ok());
  std::vector<float> gradient(kVocab * kHidden);
  SessionMarks marks = session->marks();
  auto flushed = head_->Flush({.commit = false}, {&marks, 1}, gradient.data());
  ASSERT_TRUE(flushed.ok()) << flushed.status();
  std::thread compute([&] { EXPECT_TRUE(session->Compute(data.batch(), data.outputs()).ok()); });
  AwaitNextWindow();
  EXPECT_EQ(server_.observed().chunks.back().window_token(), 0);
  EXPECT_TRUE(head_->AbortFlush(flushed->flush_id).ok());
  compute.join();
  EXPECT_EQ(server_.observed().chunks.back().generation(), 1U);
  EXPECT_EQ(server_.observed().chunks.back().window_token(), 4);

  // And the next window still begins at its beginning.
  marks = session->marks();
  ASSERT_TRUE(head_->Flush({}, {&marks, 1}, gradient.data()).ok());
  ASSERT_TRUE(session->Compute(data.batch(), data.outputs()).ok());
  EXPECT_EQ(server_.observed().chunks.back().generation(), 2U);
  EXPECT_EQ(server_.observed().chunks.back().window_token(), 0);
}

TEST_F(SessionTest, CloseEndsTheSessionAndLaterCallsSaySo) {
  Session session = Open();
  ASSERT_TRUE(session.Close().ok());
  EXPECT_TRUE(session.Close().ok());
  Data data(2);
  EXPECT_EQ(session.Compute(data.batch(), data.outputs()).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace lossd::session_test
