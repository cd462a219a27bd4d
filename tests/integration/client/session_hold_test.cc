// lossd::Session and batches in two phases: their hidden states travel once, and again where the server has
// them no more.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "server/engine/engine.h"
#include "tests/support/session_data.h"
#include "tests/support/session_fixture.h"
#include "tests/support/wait.h"

namespace lossd::session_hold_test {
namespace {

using testing::Data;
using testing::kHidden;
using testing::SessionTest;

constexpr int64_t kIgnored = -100;
constexpr int64_t kRowBytes = kHidden * static_cast<int64_t>(sizeof(float));
constexpr int64_t kCounted = engine::kLeastHeldBytes;  // of a token, whose row is smaller

class SessionHoldTest : public SessionTest {
 protected:
  Session OpenHolding(int64_t bytes, int32_t lanes = 1, Deterministic deterministic = Deterministic::kNo) {
    if (!client_) Connect();
    auto session = head_->OpenSession({.client_key = "trainer",
                                       .chunk_bytes = testing::kTokensPerChunk * kRowBytes,
                                       .lanes = lanes,
                                       .deterministic = deterministic,
                                       .held_hidden_bytes = bytes});
    EXPECT_TRUE(session.ok()) << session.status();
    return *std::move(session);
  }

  static void Look(Session& session, const Data& data, uint64_t hold) {
    std::vector<float> losses(data.labels.size());
    Batch batch = data.batch();
    batch.mode = ComputeMode::kLossOnly;
    batch.hold = hold;
    const auto result = session.Compute(batch, {.losses = losses});
    ASSERT_TRUE(result.ok()) << result.status();
  }
  static void Learn(Session& session, Data& data, uint64_t hold) {
    Batch batch = data.batch();
    batch.hold = hold;
    const auto result = session.Compute(batch, data.outputs());
    ASSERT_TRUE(result.ok()) << result.status();
  }

  // How many tokens' hidden states have been sent since it was asked before.
  int64_t TokensSent() {
    int64_t bytes = 0;
    for (const v1::Chunk& chunk : server_.observed().chunks) {
      bytes += static_cast<int64_t>(chunk.hidden_states().size());
    }
    return (bytes - std::exchange(sent_bytes_, bytes)) / kRowBytes;
  }

  // The session's hidden states make room for others.
  void Evict(const std::string& session_id) {
    server_.server().engine().WaitIdle();
    const std::shared_ptr<engine::HeldHiddenStates> held = HeldOf(session_id);
    const int64_t tokens = held->limit() / kCounted;
    engine::Chunk chunk;
    chunk.tokens = tokens;
    chunk.labels = std::string(static_cast<size_t>(tokens) * 8, '\0');
    chunk.hold = {.number = 999, .first = 0};
    chunk.hidden_states = engine::Payload::Of(std::string(static_cast<size_t>(tokens * kRowBytes), '\0'));
    auto piece = held->Copy(chunk);
    // The engine is idle a moment before its last chunks let go of their hidden states.
    testing::Await("room", [&] { return piece.has_value() || (piece = held->Copy(chunk)).has_value(); });
    held->Add(*std::move(piece));
  }
  std::shared_ptr<engine::HeldHiddenStates> HeldOf(const std::string& session_id) {
    engine::Engine& engine = server_.server().engine();
    return engine.FindSession(session_id, engine.incarnation())->held;
  }

 private:
  int64_t sent_bytes_ = 0;
};

TEST_F(SessionHoldTest, HiddenStatesTravelOnceOnAnyLanes) {
  for (const int32_t lanes : {1, 3}) {
    Session session = OpenHolding(1 << 20, lanes);
    Data data(23, lanes);
    Look(session, data, 5);
    EXPECT_EQ(TokensSent(), 23);
    Learn(session, data, 5);
    EXPECT_EQ(TokensSent(), 0);
    data.ExpectOutputs();
    ASSERT_TRUE(session.Close().ok());
  }
  std::vector<float> window = Data(23, 1).Window();
  Data(23, 3).AddTo(&window, 0, 23);
  EXPECT_EQ(server_.window(), window);
}

TEST_F(SessionHoldTest, IgnoredTokensAreAmongThem) {
  Session session = OpenHolding(1 << 20);
  Data data(11);
  data.labels[0] = data.labels[4] = data.labels[5] = kIgnored;
  Look(session, data, 5);
  EXPECT_EQ(TokensSent(), 8);
  Learn(session, data, 5);
  EXPECT_EQ(TokensSent(), 0);
  data.ExpectOutputs(1, 4);
  data.ExpectOutputs(6, 11);
}

TEST_F(SessionHoldTest, ADeterministicSessionHoldsThem) {
  Session session = OpenHolding(1 << 20, 1, Deterministic::kYes);
  Data data(11);
  data.labels[3] = kIgnored;
  Look(session, data, 5);
  EXPECT_EQ(TokensSent(), 11);
  Learn(session, data, 5);
  EXPECT_EQ(TokensSent(), 0);
  data.ExpectOutputs(0, 3);
  data.ExpectOutputs(4, 11);
}

TEST_F(SessionHoldTest, WithoutANumberOrMemoryTheyTravelEachTime) {
  for (const auto& [bytes, hold] : {std::pair<int64_t, uint64_t>{1 << 20, 0}, {0, 5}, {2 * kCounted, 5}}) {
    Session session = OpenHolding(bytes);
    Data data(7);
    Look(session, data, hold);
    Learn(session, data, hold);
    EXPECT_EQ(TokensSent(), 14) << bytes << " " << hold;
    EXPECT_EQ(session.reconnects(), 0);
    data.ExpectOutputs();
    ASSERT_TRUE(session.Close().ok());
  }
}

TEST_F(SessionHoldTest, TokensWithoutAFactorStayHomeWhereNothingIsKept) {
  Session session = OpenHolding(2 * kCounted);
  Data data(7);
  std::vector<float> weights(7, 1.0F);
  weights[3] = weights[4] = 0;
  Look(session, data, 5);
  TokensSent();
  Batch batch = data.batch();
  batch.hold = 5;
  batch.token_weights = weights;
  ASSERT_TRUE(session.Compute(batch, data.outputs()).ok());
  EXPECT_EQ(TokensSent(), 5);
}

TEST_F(SessionHoldTest, ANumberThatIsUsedAgainIsAnotherBatch) {
  Session session = OpenHolding(1 << 20);
  Data first(9, 1);
  Data second(9, 2);
  Look(session, first, 5);
  Learn(session, first, 5);
  Look(session, second, 5);
  Learn(session, second, 5);
  EXPECT_EQ(TokensSent(), 18);
  second.ExpectOutputs();
  // And in the middle of two phases.
  Data third(9, 3);
  Look(session, first, 6);
  Look(session, third, 6);
  Learn(session, third, 6);
  third.ExpectOutputs();
  std::vector<float> window = first.Window();
  second.AddTo(&window, 0, 9);
  third.AddTo(&window, 0, 9);
  EXPECT_EQ(server_.window(), window);
}

TEST_F(SessionHoldTest, OtherLabelsBringTheirHiddenStates) {
  Session session = OpenHolding(1 << 20);
  Data data(9);
  Look(session, data, 5);
  TokensSent();
  data.labels[2] = kIgnored;
  Learn(session, data, 5);
  EXPECT_EQ(TokensSent(), 8);
  EXPECT_EQ(session.reconnects(), 0);
  data.ExpectOutputs(0, 2);
  data.ExpectOutputs(3, 9);
}

TEST_F(SessionHoldTest, AnOlderBatchThatHadToMakeRoomIsSentAtOnce) {
  Session session = OpenHolding(12 * kCounted);
  Data first(7, 1);
  Data second(7, 2);
  Look(session, first, 1);
  Look(session, second, 2);
  TokensSent();
  Learn(session, second, 2);
  EXPECT_EQ(TokensSent(), 0);
  Learn(session, first, 1);
  EXPECT_EQ(TokensSent(), 7);
  EXPECT_EQ(session.reconnects(), 0) << "the client knows";
}

TEST_F(SessionHoldTest, ABatchThatNeverFitsLeavesTheOthersWhereTheyAre) {
  Session session = OpenHolding(12 * kCounted);
  Data small(7, 1);
  Data large(20, 2);
  Look(session, small, 1);
  Look(session, large, 2);
  TokensSent();
  Learn(session, small, 1);
  EXPECT_EQ(TokensSent(), 0);
  Learn(session, large, 2);
  EXPECT_EQ(TokensSent(), 20);
}

TEST_F(SessionHoldTest, WhatIsGoneIsSentAgainAndCountsOnce) {
  Session session = OpenHolding(16 * kCounted);
  Data data(9);
  Look(session, data, 5);
  TokensSent();
  const uint64_t next = session.marks().lanes[0].accepted + 1;
  server_.Before(next, [&] { Evict(session.id()); });
  Learn(session, data, 5);
  EXPECT_EQ(TokensSent(), 9);
  EXPECT_EQ(session.reconnects(), 1);
  data.ExpectOutputs();
  EXPECT_EQ(server_.window(), data.Window());
}

TEST_F(SessionHoldTest, WhatGoesInTheMiddleOfABatchCountsOnce) {
  Session session = OpenHolding(16 * kCounted);
  Data data(9);
  Look(session, data, 5);
  TokensSent();
  const uint64_t next = session.marks().lanes[0].accepted + 1;
  server_.Before(next + 2, [&] { Evict(session.id()); });
  Learn(session, data, 5);
  EXPECT_GE(TokensSent(), 5) << "all but those of two chunks, which may have been answered";
  EXPECT_EQ(session.reconnects(), 1);
  data.ExpectOutputs();
  EXPECT_EQ(server_.window(), data.Window());
}

TEST_F(SessionHoldTest, OtherWeightsDoNotMakeThemTravel) {
  Session session = OpenHolding(1 << 20);
  Data data(9);
  Look(session, data, 5);
  TokensSent();
  server_.Publish(testing::kHeadName);
  Learn(session, data, 5);
  EXPECT_EQ(TokensSent(), 0);
  data.ExpectOutputs();
}

TEST_F(SessionHoldTest, MemoryIsReservedAndComesBack) {
  Connect();
  (void)head_->Info();
  engine::Engine& engine = server_.server().engine();
  const int64_t before = engine.staging_reserved();
  {
    Session session = OpenHolding(1 << 20);
    EXPECT_EQ(session.held_hidden_bytes(), 1 << 20);
    EXPECT_GE(engine.staging_reserved(), before + (1 << 20));
    ASSERT_TRUE(session.Close().ok());
  }
  EXPECT_EQ(engine.staging_reserved(), before);
  Session small = OpenHolding(1000);
  Session again = OpenHolding(2000);
  EXPECT_EQ(again.id(), small.id());
  EXPECT_EQ(again.held_hidden_bytes(), 2000) << "of the same session";
  EXPECT_EQ(HeldOf(again.id())->limit(), 2000);
  Session less = OpenHolding(10);
  EXPECT_EQ(less.held_hidden_bytes(), 2000);
  ASSERT_TRUE(less.Close().ok());
  EXPECT_EQ(engine.staging_reserved(), before);
}

TEST_F(SessionHoldTest, AnotherServerBeginsAnew) {
  Session session = OpenHolding(1 << 20);
  Data data(9);
  Look(session, data, 5);
  server_.Restart();
  TokensSent();
  Learn(session, data, 5);
  EXPECT_EQ(TokensSent(), 9);
  data.ExpectOutputs();
  EXPECT_EQ(server_.window(), data.Window());
}

TEST_F(SessionHoldTest, MemoryThatIsNotThereIsRefusedByItsName) {
  Connect();
  const auto session = head_->OpenSession({.held_hidden_bytes = int64_t{1} << 60});
  EXPECT_EQ(session.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(session.status().message()).find("held_hidden_bytes is 1152921504606846976"),
            std::string::npos)
      << session.status();
}

}  // namespace
}  // namespace lossd::session_hold_test
