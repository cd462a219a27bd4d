// Chunks that came to a rank which is not the leader, through the engine: their ledger is that of all chunks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/common/random_id.h"
#include "server/engine/engine.h"
#include "tests/conformance/rank_threads.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/end_flush.h"
#include "tests/unit/engine/engine_fixture.h"

namespace lossd::engine::testing::held_chunks_test {
namespace {

using lossd::testing::Await;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kVocab = 40;
constexpr int64_t kHidden = 4;
constexpr int64_t kTokens = 3;
constexpr int32_t kRanks = 3;
constexpr int64_t kBytes = kTokens * kHidden * 4;

std::string Bytes(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

std::vector<float> Floats(const void* bytes, int64_t size) {
  std::vector<float> values(static_cast<size_t>(size) / sizeof(float));
  std::memcpy(values.data(), bytes, values.size() * sizeof(float));
  return values;
}

class HeldChunksTest : public ::testing::Test {
 protected:
  HeldChunksTest() {
    RankThreadGroup group = *CreateRankThreadGroup({.ranks = kRanks, .workspace_bytes = int64_t{16} << 20});
    channel_ = std::move(group.channel);
    payloads_ = std::move(group.payloads);
    engine_ = *Engine::Create({}, std::move(group.leader));
    head_ = *engine_->CreateHead({"h", kVocab, kHidden, kernels::DataType::kFloat32});
    EngineFixture::WriteWeights(*head_);  // zeros: every loss is log(V)
  }

  // Weights that differ from each other and from zero, so that dX does too.
  void WriteOtherWeights() {
    std::vector<float> rows(kVocab * kHidden);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = 0.25f * static_cast<float>(i % 7) - 0.5f;
    const std::string write = *head_->BeginWrite(RandomId(), Head::Replace::kNo, RandomId());
    EXPECT_TRUE((*head_->FindWrite(write))
                    ->Write(0, kVocab, kernels::DataType::kFloat32, Bytes(rows), std::string())
                    .ok());
    std::promise<bool> published;
    head_->CommitWrite(write,
                       [&](const absl::StatusOr<uint64_t>& version) { published.set_value(version.ok()); });
    EXPECT_TRUE(Await("weights to be published", published));
  }

  LaneAttachment Attach(int32_t lane) { return *head_->AttachLane(session_, lane, listener_); }
  std::string Open(int32_t lanes) {
    session_ = engine_->OpenSession("h", {"client", 0, lanes})->info.session_id;
    return session_;
  }
  // Without hidden states.
  static Chunk MakeChunk(uint64_t sequence) {
    Chunk chunk;
    chunk.sequence = sequence;
    chunk.generation = 1;
    chunk.tokens = kTokens;
    const std::vector<int64_t> labels = {1, 20, 39};
    chunk.labels.assign(reinterpret_cast<const char*>(labels.data()), labels.size() * sizeof(int64_t));
    return chunk;
  }
  // As the relay does. Returns what the rank keeps.
  std::shared_ptr<RankPayload> Hold(int32_t rank, const std::vector<float>& hidden_states, Chunk* chunk) {
    auto payload = std::make_shared<RankPayload>(Payload::Of(Bytes(hidden_states)), Payload());
    const uint64_t number = payloads_(rank).Add(payload);
    const int64_t bad = CountNonFinite(payload->hidden_states(), chunk->hidden_type, chunk->tokens,
                                       chunk->labels, chunk->ignore_index);
    PlaceAtRank(
        {.rank = rank, .number = number, .hidden_bytes = payload->hidden_states().size(), .non_finite = bad},
        HoldAtRank(channel_, rank, number), chunk);
    return payload;
  }
  absl::Status Submit(const LaneAttachment& lane, Chunk chunk) {
    return head_->Submit(lane, chunk, [] { ADD_FAILURE() << "it was taken"; }).status();
  }
  void AwaitReleased(int32_t rank) {
    Await("what the rank holds to be released", [&] { return payloads_(rank).count() == 0; });
  }
  std::vector<float> Gradient() {
    engine_->WaitIdle();
    std::promise<absl::StatusOr<FlushInfo>> begun;
    head_->BeginFlush(1, head_->Info().window_marks, 1.0f,
                      [&](absl::StatusOr<FlushInfo> flush) { begun.set_value(std::move(flush)); });
    const absl::StatusOr<FlushInfo> flush = Await("the flush to begin", begun);
    EXPECT_TRUE(flush.ok()) << flush.status();
    std::vector<float> dw(kVocab * kHidden);
    head_->ReadGradient(flush->flush_id, 0, kVocab, kernels::DataType::kFloat32, {dw.data()},
                        [](const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; });
    engine_->WaitIdle();
    EXPECT_TRUE(AbortFlush(*head_, flush->flush_id).ok());
    return dw;
  }

  std::shared_ptr<RankChannel> channel_;
  std::function<RankPayloads&(int32_t)> payloads_;
  std::unique_ptr<Engine> engine_;
  std::shared_ptr<Head> head_;
  std::string session_;
  std::shared_ptr<RecordingListener> listener_ = std::make_shared<RecordingListener>();
};

const std::vector<float> kHiddenStates = {1, 2, 3, 4, -1, 0, 1, 2, 0.5, 0.25, 8, -3};

TEST_F(HeldChunksTest, AreAnsweredWithoutDxWhichStaysAtTheirRank) {
  Open(1);
  Chunk chunk = MakeChunk(1);
  const auto payload = Hold(2, kHiddenStates, &chunk);
  ASSERT_TRUE(Submit(Attach(0), std::move(chunk)).ok());
  const ChunkAnswer answer = listener_->AwaitAnswers(1).front();
  EXPECT_EQ(answer.disposition, Disposition::kAccumulated);
  EXPECT_EQ(answer.dx.size(), 0);
  EXPECT_NEAR(answer.loss_sum, kTokens * std::log(double{kVocab}), 1e-5);
  EXPECT_EQ(answer.losses.size(), kTokens * sizeof(float));
  EXPECT_EQ(payload->dx().size(), kBytes);
  engine_->WaitIdle();
  EXPECT_EQ(listener_->applied(), 1u);
  AwaitReleased(2);
}

TEST_F(HeldChunksTest, HaveTheDxThatTheyWouldHaveAtTheLeader) {
  WriteOtherWeights();
  Open(2);
  Chunk here = MakeChunk(1);
  here.hidden_states = Payload::Of(Bytes(kHiddenStates));
  ASSERT_TRUE(Submit(Attach(0), std::move(here)).ok());
  const ChunkAnswer answer = listener_->AwaitAnswers(1).front();
  const std::vector<float> expected = Floats(answer.dx.data(), answer.dx.size());
  Chunk there = MakeChunk(1);
  const auto payload = Hold(2, kHiddenStates, &there);
  ASSERT_TRUE(Submit(Attach(1), std::move(there)).ok());
  (void)listener_->AwaitAnswers(2);
  const std::vector<float> dx = Floats(payload->dx().data(), payload->dx().size());
  ASSERT_EQ(expected.size(), size_t{kTokens * kHidden});
  ASSERT_EQ(dx.size(), expected.size());
  EXPECT_EQ(dx, expected);  // to the bit
  for (size_t i = 0; i < dx.size(); ++i) EXPECT_GT(std::abs(dx[i]), 1e-3) << i;
}

// Nothing relays two holders' chunks on one stream; a rank that did would have marks move out of order.
TEST_F(HeldChunksTest, OfTwoHoldersDoNotComeOnOneStream) {
  Open(1);
  const LaneAttachment lane = Attach(0);
  Chunk first = MakeChunk(1);
  (void)Hold(1, kHiddenStates, &first);
  ASSERT_TRUE(Submit(lane, std::move(first)).ok());
  Chunk second = MakeChunk(2);
  (void)Hold(2, kHiddenStates, &second);
  const absl::Status refused = Submit(lane, std::move(second));
  EXPECT_EQ(refused.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(refused.message(), "rank 2 holds a chunk of lane 0, whose earlier chunks are at rank 1");
}

TEST_F(HeldChunksTest, OfAllRanksAddUpToTheSameGradient) {
  Open(kRanks);
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    Chunk chunk = MakeChunk(1);
    if (rank == 0) {
      chunk.hidden_states = Payload::Of(Bytes(kHiddenStates));
    } else {
      (void)Hold(rank, kHiddenStates, &chunk);
    }
    ASSERT_TRUE(Submit(Attach(rank), std::move(chunk)).ok());
  }
  EXPECT_EQ(listener_->AwaitAnswers(kRanks).size(), size_t{kRanks});
  const std::vector<float> all = Gradient();
  // The same chunk again makes it four thirds.
  Chunk chunk = MakeChunk(2);
  chunk.hidden_states = Payload::Of(Bytes(kHiddenStates));
  ASSERT_TRUE(Submit(Attach(0), std::move(chunk)).ok());
  const std::vector<float> more = Gradient();
  for (size_t i = 0; i < all.size(); ++i) EXPECT_NEAR(3 * more[i], 4 * all[i], 1e-4) << i;
}

TEST_F(HeldChunksTest, RepeatedAtAnotherRankCountOnce) {
  Open(1);
  Chunk first = MakeChunk(1);
  (void)Hold(1, kHiddenStates, &first);
  ASSERT_TRUE(Submit(Attach(0), std::move(first)).ok());
  (void)listener_->AwaitAnswers(1);
  const std::vector<float> once = Gradient();
  Chunk again = MakeChunk(1);
  (void)Hold(2, kHiddenStates, &again);
  ASSERT_TRUE(Submit(Attach(0), std::move(again)).ok());
  const ChunkAnswer answer = listener_->AwaitAnswers(2).back();
  EXPECT_EQ(answer.disposition, Disposition::kRepeated);
  EXPECT_NEAR(answer.loss_sum, kTokens * std::log(double{kVocab}), 1e-5);
  EXPECT_EQ(Gradient(), once);
}

TEST_F(HeldChunksTest, ThatAreNotFiniteAreRejectedAsAtTheLeader) {
  Open(2);
  std::vector<float> bad = kHiddenStates;
  bad[1] = std::numeric_limits<float>::infinity();
  bad[10] = std::numeric_limits<float>::quiet_NaN();
  Chunk here = MakeChunk(1);
  here.hidden_states = Payload::Of(Bytes(bad));
  Chunk there = MakeChunk(1);
  (void)Hold(1, bad, &there);
  ASSERT_TRUE(Submit(Attach(0), std::move(here)).ok());
  (void)listener_->AwaitAnswers(1);
  ASSERT_TRUE(Submit(Attach(1), std::move(there)).ok());
  const std::vector<ChunkAnswer> answers = listener_->AwaitAnswers(2);
  EXPECT_EQ(answers[1].disposition, Disposition::kRejected);
  EXPECT_EQ(answers[1].error, answers[0].error);
  EXPECT_THAT(std::string(answers[1].error.message()), HasSubstr("2 non-finite values of 12"));
  AwaitReleased(1);
}

TEST_F(HeldChunksTest, OfTheWrongSizeAreRejectedAsAtTheLeader) {
  Open(2);
  Chunk here = MakeChunk(1);
  here.hidden_states = Payload::Of(Bytes({1, 2, 3}));
  Chunk there = MakeChunk(1);
  (void)Hold(2, {1, 2, 3}, &there);
  ASSERT_TRUE(Submit(Attach(0), std::move(here)).ok());
  (void)listener_->AwaitAnswers(1);
  ASSERT_TRUE(Submit(Attach(1), std::move(there)).ok());
  const std::vector<ChunkAnswer> answers = listener_->AwaitAnswers(2);
  EXPECT_EQ(answers[1].error, answers[0].error);
}

TEST_F(HeldChunksTest, RejectedOnesKeepTheirPlaceInTheLane) {
  Open(1);
  const LaneAttachment lane = Attach(0);
  for (uint64_t sequence = 1; sequence <= 6; ++sequence) {
    Chunk chunk = MakeChunk(sequence);
    (void)Hold(1, sequence % 2 == 0 ? std::vector<float>() : kHiddenStates, &chunk);
    ASSERT_TRUE(Submit(lane, std::move(chunk)).ok());
  }
  std::vector<uint64_t> order;
  for (const ChunkAnswer& answer : listener_->AwaitAnswers(6)) order.push_back(answer.sequence);
  EXPECT_THAT(order, ElementsAre(1, 2, 3, 4, 5, 6));
  AwaitReleased(1);
}

TEST_F(HeldChunksTest, OfLossesAloneHaveNoDx) {
  Open(1);
  Chunk chunk = MakeChunk(1);
  chunk.mode = ComputeMode::kLossOnly;
  chunk.options.returns = {.log_sum_exp = true, .prediction = true, .top_k = 2};
  const auto payload = Hold(1, kHiddenStates, &chunk);
  ASSERT_TRUE(Submit(Attach(0), std::move(chunk)).ok());
  const ChunkAnswer answer = listener_->AwaitAnswers(1).front();
  EXPECT_EQ(payload->dx().size(), 0);
  EXPECT_EQ(answer.returns.log_sum_exp.size(), kTokens * sizeof(float));
  EXPECT_EQ(answer.returns.predictions.size(), kTokens * sizeof(int32_t));
  EXPECT_EQ(answer.returns.top_tokens.size(), 2 * kTokens * sizeof(int32_t));
}

TEST_F(HeldChunksTest, MayNotNameRegions) {
  Open(1);
  Chunk chunk = MakeChunk(1);
  (void)Hold(1, kHiddenStates, &chunk);
  chunk.dx_region = TensorRef{};
  const absl::Status refused = Submit(Attach(0), std::move(chunk));
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("rank 1"));
  AwaitReleased(1);
}

TEST_F(HeldChunksTest, MayNotBeOfDeterministicSessions) {
  session_ = engine_->OpenSession("h", {"client", 0, 1, Deterministic::kYes})->info.session_id;
  Chunk chunk = MakeChunk(1);
  chunk.window_token = 0;
  (void)Hold(2, kHiddenStates, &chunk);
  const absl::Status refused = Submit(Attach(0), std::move(chunk));
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("deterministic session came to rank 2"));
}

}  // namespace
}  // namespace lossd::engine::testing::held_chunks_test
