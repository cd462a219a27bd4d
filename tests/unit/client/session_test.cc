// lossd::Session against a server that misbehaves at exact points.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "lossd/client.h"
#include "tests/unit/client/fake_server.h"

namespace lossd {
namespace {

using testing::FakeServer;
using testing::Fate;
using ::testing::HasSubstr;

constexpr int64_t kHidden = FakeServer::kHidden;
constexpr int64_t kTokensPerChunk = 2;

// A batch of whole numbers, and where its results go.
struct Data {
  explicit Data(int64_t tokens, int64_t seed = 0) {
    for (int64_t i = 0; i < tokens; ++i) {
      labels.push_back((i * 7 + seed) % FakeServer::kVocab);
      for (int64_t j = 0; j < kHidden; ++j) hidden.push_back(static_cast<float>((i * 5 + j * 3 + seed) % 17));
    }
    losses.assign(labels.size(), -1.0F);
    dx.assign(hidden.size(), -1.0F);
  }

  Batch batch() const { return {.labels = labels, .hidden_states = hidden.data()}; }
  BatchOutputs outputs() { return {.losses = losses, .dx = dx.data()}; }

  // What the fake must have made of tokens [begin, end), added to `window`.
  void AddTo(std::vector<float>* window, size_t begin, size_t end) const {
    for (size_t i = begin; i < end; ++i) {
      for (size_t j = 0; j < kHidden; ++j) {
        (*window)[static_cast<size_t>(labels[i]) * kHidden + j] += hidden[i * kHidden + j];
      }
    }
  }
  std::vector<float> Window() const {
    std::vector<float> window(FakeServer::kVocab * kHidden, 0.0F);
    AddTo(&window, 0, labels.size());
    return window;
  }

  void ExpectOutputs(size_t begin, size_t end) const {
    for (size_t i = begin; i < end; ++i) {
      EXPECT_EQ(losses[i], static_cast<float>(labels[i]) + hidden[i * kHidden]) << "token " << i;
      for (size_t j = 0; j < kHidden; ++j)
        EXPECT_EQ(dx[i * kHidden + j], 2 * hidden[i * kHidden + j]) << "token " << i;
    }
  }
  void ExpectOutputs() const { ExpectOutputs(0, labels.size()); }

  std::vector<int64_t> labels;
  std::vector<float> hidden;
  std::vector<float> losses;
  std::vector<float> dx;
};

class SessionTest : public ::testing::Test {
 protected:
  void Connect(std::chrono::milliseconds reconnect_timeout = std::chrono::seconds(20)) {
    auto client = Client::Connect(fake_.target(), {.reconnect_timeout = reconnect_timeout});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    auto head = client_->GetHead(FakeServer::kName);
    ASSERT_TRUE(head.ok()) << head.status();
    head_ = std::make_unique<Head>(*std::move(head));
  }

  Session Open(const std::string& client_key = "trainer") {
    if (!client_) Connect();
    auto session =
        head_->OpenSession({.client_key = client_key,
                            .chunk_bytes = kTokensPerChunk * kHidden * static_cast<int64_t>(sizeof(float))});
    EXPECT_TRUE(session.ok()) << session.status();
    return *std::move(session);
  }

  // Chunk `sequence` meets `fate` the first time it arrives.
  void Script(uint64_t sequence, Fate fate) {
    fake_.on_chunk = [sequence, fate](uint64_t arrived, int attempt) {
      return arrived == sequence && attempt == 0 ? fate : Fate::kTake;
    };
  }

  FakeServer fake_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Head> head_;
};

TEST_F(SessionTest, BatchComesBackWholeAndIsAddedOnce) {
  Session session = Open();
  Data data(7);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(fake_.window(), data.Window());
  EXPECT_EQ(result->chunks, 4);
  EXPECT_EQ(result->repeated_chunks, 0);
  EXPECT_EQ(result->first_sequence, 1U);
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
  int64_t first = 1000;
  uint64_t sequence = 1;
  for (const auto& chunk : fake_.observed().chunks) {
    EXPECT_EQ(chunk.first_token(), first);
    EXPECT_EQ(chunk.sequence(), sequence++);
    EXPECT_EQ(chunk.generation(), 1U);
    EXPECT_EQ(chunk.ignore_index(), -7);
    EXPECT_EQ(chunk.gradient_scale(), 0.5F);
    first += chunk.tokens();
  }
  EXPECT_EQ(first, 1005);
}

TEST_F(SessionTest, SequencesContinueFromBatchToBatch) {
  Session session = Open();
  Data first(4);
  Data second(3, 1);
  ASSERT_TRUE(session.Compute(first.batch(), first.outputs()).ok());
  const auto result = session.Compute(second.batch(), second.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  second.ExpectOutputs();
  EXPECT_EQ(result->first_sequence, 3U);
  std::vector<float> window = first.Window();
  second.AddTo(&window, 0, 3);
  EXPECT_EQ(fake_.window(), window);
  EXPECT_EQ(fake_.observed().streams, 1);
}

TEST_F(SessionTest, EmptyBatchSucceedsWithoutACall) {
  Session session = Open();
  const auto result = session.Compute({}, {});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->chunks, 0);
  EXPECT_TRUE(fake_.observed().chunks.empty());
}

TEST_F(SessionTest, LossOnlyAddsNothingAndReturnsNoDx) {
  Session session = Open();
  Data data(5);
  Batch batch = data.batch();
  batch.mode = ComputeMode::kLossOnly;
  ASSERT_TRUE(session.Compute(batch, {.losses = data.losses}).ok());
  EXPECT_EQ(data.losses[3], static_cast<float>(data.labels[3]) + data.hidden[3 * kHidden]);
  EXPECT_EQ(fake_.window(), std::vector<float>(FakeServer::kVocab * kHidden, 0.0F));
}

TEST_F(SessionTest, OutputsMayBeUnwantedOrNarrow) {
  Session session = Open();
  Data data(4);
  ASSERT_TRUE(session.Compute(data.batch(), {}).ok());
  EXPECT_EQ(fake_.window(), data.Window());
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
  data.labels[2] = FakeServer::kVocab;
  EXPECT_THAT(message(data.batch(), data.outputs()), HasSubstr("labels[2] is 11"));
  EXPECT_TRUE(fake_.observed().chunks.empty());
  data.labels[2] = 1;
  EXPECT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
}

TEST_F(SessionTest, OutstandingPayloadStaysWithinTheCredit) {
  constexpr int64_t kPayload = kTokensPerChunk * (8 + 4 + 2 * kHidden * 4);  // of one chunk, in and out
  fake_.limits.set_byte_credit(3 * kPayload + 5);
  fake_.hold_answers_until_chunks = 40;
  Session session = Open();
  Data data(80);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  data.ExpectOutputs();
  // The fake answers only when nothing more would fit: less than three chunks and it would still wait.
  EXPECT_EQ(fake_.observed().peak_outstanding_bytes, 3 * kPayload);
}

TEST_F(SessionTest, OneChunkGoesOutHoweverSmallTheCredit) {
  fake_.limits.set_byte_credit(1);
  Session session = Open();
  Data data(3);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  data.ExpectOutputs();
  EXPECT_EQ(fake_.observed().chunks.size(), 3U);  // one token each
}

// --- Broken streams
// -----------------------------------------------------------------------------------------------------

class CutTest : public SessionTest, public ::testing::WithParamInterface<std::tuple<int, Fate>> {};

TEST_P(CutTest, EverythingUnansweredIsSentAgainAndAddedOnce) {
  const auto [sequence, fate] = GetParam();
  Script(static_cast<uint64_t>(sequence), fate);
  Session session = Open();
  Data data(10);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(fake_.window(), data.Window());
  // A stream that broke behind the very last answer is noticed by the next batch only.
  EXPECT_EQ(session.reconnects(), fate == Fate::kCutAfterAnswer && sequence == 5 ? 0 : 1);
  EXPECT_EQ(result->repeated_chunks, fate == Fate::kCutBeforeAnswer ? 1 : 0);
  for (const auto& chunk : fake_.observed().chunks) {
    EXPECT_EQ(chunk.first_token(), static_cast<int64_t>(chunk.sequence() - 1) * kTokensPerChunk);
    EXPECT_EQ(chunk.generation(), 1U);
  }

  Data next(4, 3);
  ASSERT_TRUE(session.Compute(next.batch(), next.outputs()).ok());
  next.ExpectOutputs();
  std::vector<float> window = data.Window();
  next.AddTo(&window, 0, 4);
  EXPECT_EQ(fake_.window(), window);
}

INSTANTIATE_TEST_SUITE_P(AtEachPoint, CutTest,
                         ::testing::Combine(::testing::Range(1, 6),
                                            ::testing::Values(Fate::kCutBeforeTaking, Fate::kCutBeforeAnswer,
                                                              Fate::kCutAfterAnswer,
                                                              Fate::kEndBeforeTaking)));

TEST_F(SessionTest, SeveralLostAnswersAreAllRepeated) {
  fake_.hold_answers_until_chunks = 3;  // 1 and 2 are taken and not answered when 3 breaks the stream
  Script(3, Fate::kCutBeforeAnswer);
  Session session = Open();
  Data data(10);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(fake_.window(), data.Window());
  EXPECT_EQ(result->repeated_chunks, 3);
}

TEST_F(SessionTest, KeepsTryingWhileEveryStreamBreaks) {
  fake_.on_chunk = [](uint64_t /*sequence*/, int attempt) {
    return attempt < 3 ? Fate::kCutBeforeTaking : Fate::kTake;
  };
  Session session = Open();
  Data data(6);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(fake_.window(), data.Window());
  EXPECT_EQ(session.reconnects(), 9);
}

TEST_F(SessionTest, GivesUpAfterTheReconnectTimeoutWithoutProgress) {
  fake_.on_chunk = [](uint64_t sequence, int) {
    return sequence == 2 ? Fate::kCutBeforeTaking : Fate::kTake;
  };
  Connect(std::chrono::milliseconds(300));
  Session session = Open();
  Data data(6);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("gave up reconnecting after 300 ms"));
  EXPECT_FALSE(IsWindowLost(result.status()));
  // The fate of the batch is not known to the caller, so the session must not go on as if nothing had
  // happened.
  const auto later = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(later.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(later.status().message()), HasSubstr("earlier error"));
  EXPECT_EQ(fake_.observed().chunks.back().sequence(), 2U);
}

TEST_F(SessionTest, ServerThatCannotBeReachedIsUnavailable) {
  const auto client = Client::Connect("127.0.0.1:1", {.reconnect_timeout = std::chrono::milliseconds(100)});
  EXPECT_EQ(client.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(client.status().message()), HasSubstr("127.0.0.1:1"));
}

TEST_F(SessionTest, ConnectWaitsForAServerThatIsNotReadyYet) {
  fake_.unavailable_status = 3;
  EXPECT_TRUE(Client::Connect(fake_.target(), {}).ok());
  EXPECT_EQ(fake_.unavailable_status, 0);
}

// --- Restarts and other servers
// ------------------------------------------------------------------------------------

class RestartTest : public SessionTest, public ::testing::WithParamInterface<Fate> {};

TEST_P(RestartTest, AfterAnAcceptedChunkTheWindowIsLost) {
  Script(3, GetParam());
  Session session = Open();
  Data data(10);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_TRUE(IsWindowLost(result.status())) << result.status();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("window lost: replay since generation 1"));
  EXPECT_EQ(fake_.window(), std::vector<float>(FakeServer::kVocab * kHidden, 0.0F));
  // And stays lost.
  EXPECT_TRUE(IsWindowLost(session.Compute(data.batch(), data.outputs()).status()));
}

TEST_P(RestartTest, UnansweredChunkCountsAsContributed) {
  Script(1, GetParam());
  Session session = Open();
  Data data(10);
  EXPECT_TRUE(IsWindowLost(session.Compute(data.batch(), data.outputs()).status()));
}

INSTANTIATE_TEST_SUITE_P(WithAndWithoutHead, RestartTest,
                         ::testing::Values(Fate::kRestartKeepHead, Fate::kRestartLoseHead));

TEST_F(SessionTest, RestartAfterACommitGoesOnWithANewSession) {
  Session session = Open();
  Data data(4);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  const std::string old_id = session.id();
  std::vector<float> gradient(FakeServer::kVocab * kHidden);
  const SessionMarks marks = session.marks();
  ASSERT_TRUE(head_->Flush({}, {&marks, 1}, gradient.data()).ok());

  // The stream breaks under a batch of losses, which no window ever holds.
  Script(3, Fate::kRestartKeepHead);
  Data eval(2);
  Batch batch = eval.batch();
  batch.mode = ComputeMode::kLossOnly;
  const auto interrupted = session.Compute(batch, {.losses = eval.losses});
  EXPECT_EQ(interrupted.status().code(), absl::StatusCode::kAborted) << interrupted.status();
  EXPECT_FALSE(IsWindowLost(interrupted.status()));

  fake_.on_chunk = nullptr;
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->first_sequence, 1U);
  EXPECT_NE(session.id(), old_id);
  EXPECT_EQ(fake_.window(), data.Window());
}

TEST_F(SessionTest, ExpiredSessionWithWorkInTheWindowIsAnError) {
  Script(3, Fate::kExpireSession);
  Session session = Open();
  Data data(10);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("has expired"));
  EXPECT_FALSE(IsWindowLost(result.status()));
}

TEST_F(SessionTest, TakenOverByAnotherStreamIsAnErrorAndNotRetried) {
  Script(2, Fate::kFence);
  Session session = Open();
  Data data(10);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(result.status().message()),
              HasSubstr("taken over by another stream with client_key 'trainer'"));
  EXPECT_FALSE(IsWindowLost(result.status()));
  EXPECT_EQ(fake_.observed().streams, 1);
}

TEST_F(SessionTest, SequenceTakenByAnotherProcessIsNotMistakenForOurOwn) {
  Script(2, Fate::kTakenBySomeoneElse);
  Session session = Open();
  Data data(10);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("client_key 'trainer'"));
}

TEST_F(SessionTest, AnswerOfTheWrongSizeIsInternal) {
  Script(2, Fate::kWrongSize);
  Session session = Open();
  Data data(4);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("1 of dx; expected 8 and 24"));
}

// --- Rejections and generations
// ------------------------------------------------------------------------------------

TEST_F(SessionTest, RejectedChunkIsNamedAndTheOthersCount) {
  Script(2, Fate::kReject);
  Session session = Open();
  Data data(6);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  const std::string message(result.status().message());
  EXPECT_THAT(message, HasSubstr("tokens [2, 4) (sequence 2)"));
  EXPECT_THAT(message, HasSubstr("not finite"));
  EXPECT_THAT(message, HasSubstr("1 of the batch's 3 chunks"));
  data.ExpectOutputs(0, 2);
  data.ExpectOutputs(4, 6);
  EXPECT_EQ(data.losses[2], -1.0F);
  std::vector<float> window(FakeServer::kVocab * kHidden, 0.0F);
  data.AddTo(&window, 0, 2);
  data.AddTo(&window, 4, 6);
  EXPECT_EQ(fake_.window(), window);

  // The correction takes new sequences.
  Data again(2, 5);
  const auto corrected = session.Compute(again.batch(), again.outputs());
  ASSERT_TRUE(corrected.ok()) << corrected.status();
  EXPECT_EQ(corrected->first_sequence, 4U);
}

TEST_F(SessionTest, FollowsAFlushByThisProcessWithoutBeingRefused) {
  Session session = Open();
  Data data(4);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  std::vector<float> gradient(FakeServer::kVocab * kHidden);
  const SessionMarks marks = session.marks();
  ASSERT_TRUE(head_->Flush({}, {&marks, 1}, gradient.data()).ok());
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  EXPECT_EQ(fake_.observed().chunks.back().generation(), 2U);
  EXPECT_EQ(fake_.observed().streams, 1);
  EXPECT_EQ(fake_.window(), data.Window());
}

TEST_F(SessionTest, FollowsAFlushBySomebodyElseBetweenBatches) {
  Session session = Open();
  Data data(4);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  Script(3, Fate::kFlushBefore);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->repeated_chunks, 0);
  EXPECT_EQ(fake_.observed().chunks.back().generation(), 2U);
  EXPECT_EQ(fake_.window(), data.Window());
}

TEST_F(SessionTest, FlushInTheMiddleOfABatchIsAnErrorThatSaysWhatIsWhere) {
  Script(3, Fate::kFlushBefore);
  Session session = Open();
  Data data(10);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
  EXPECT_THAT(std::string(result.status().message()),
              HasSubstr("its first 2 of 5 chunks are in that window"));
  EXPECT_EQ(fake_.window(), std::vector<float>(FakeServer::kVocab * kHidden, 0.0F));
}

TEST_F(SessionTest, BatchDuringAFlushWaitsForTheNextWindow) {
  Session session = Open();
  Data data(4);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  std::vector<float> gradient(FakeServer::kVocab * kHidden);
  const SessionMarks marks = session.marks();
  const auto flushed = head_->Flush({.commit = false}, {&marks, 1}, gradient.data());
  ASSERT_TRUE(flushed.ok()) << flushed.status();

  Data next(4, 2);
  absl::StatusOr<BatchResult> result = absl::UnknownError("not done");
  std::thread compute([&] { result = session.Compute(next.batch(), next.outputs()); });
  while (fake_.observed().chunks.back().generation() != 2)
    std::this_thread::yield();  // refused in 1, waits in 2
  EXPECT_TRUE(head_->CommitFlush(flushed->flush_id).ok());
  compute.join();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(gradient, data.Window());
  EXPECT_EQ(fake_.window(), next.Window());
}

TEST_F(SessionTest, BatchDuringAnAbortedFlushReturnsToTheOldWindow) {
  Session session = Open();
  Data data(4);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  std::vector<float> gradient(FakeServer::kVocab * kHidden);
  const SessionMarks marks = session.marks();
  const auto flushed = head_->Flush({.commit = false}, {&marks, 1}, gradient.data());
  ASSERT_TRUE(flushed.ok()) << flushed.status();

  Data next(4, 2);
  absl::StatusOr<BatchResult> result = absl::UnknownError("not done");
  std::thread compute([&] { result = session.Compute(next.batch(), next.outputs()); });
  while (fake_.observed().chunks.back().generation() != 2) std::this_thread::yield();
  EXPECT_TRUE(head_->AbortFlush(flushed->flush_id).ok());
  compute.join();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(fake_.observed().chunks.back().generation(), 1U);
  std::vector<float> window = data.Window();
  next.AddTo(&window, 0, 4);
  EXPECT_EQ(fake_.window(), window);
}

// --- Restarted clients
// --------------------------------------------------------------------------------------------------

TEST_F(SessionTest, RestartedClientLearnsWhereTheServerStands) {
  Data data(10);
  {
    Session session = Open("rank-0");
    ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  }
  Session session = Open("rank-0");
  EXPECT_EQ(session.marks().lanes.at(0).accepted, 5U);
  Data next(2);
  const auto result = session.Compute(next.batch(), next.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->first_sequence, 6U);
}

TEST_F(SessionTest, RestartedClientGetsItsLossesAgainWithoutAddingTwice) {
  Data data(10);
  {
    Session session = Open("rank-0");
    Data part(6);
    ASSERT_TRUE(session.Compute(part.batch(), part.outputs()).ok());
  }
  Session session = Open("rank-0");
  EXPECT_EQ(session.ResumeAt(0).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(session.ResumeAt(5).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(session.ResumeAt(1).ok());
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(result->repeated_chunks, 3);
  EXPECT_EQ(fake_.window(), data.Window());
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
}  // namespace lossd
