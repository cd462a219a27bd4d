// lossd::Session with several lanes: where chunks go, and what happens to all of them when something happens
// to one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "tests/unit/client/fake_server.h"
#include "tests/unit/client/session_fixture.h"

namespace lossd::session_lanes_test {
namespace {

using testing::Data;
using ::testing::ElementsAre;
using testing::FakeServer;
using testing::Fate;
using ::testing::HasSubstr;
using testing::kHidden;
using testing::kTokensPerChunk;
using testing::SessionTest;
using ::testing::UnorderedElementsAre;

constexpr int32_t kLanes = 4;
constexpr int64_t kChunks =
    10;  // of the batch that most tests send: lanes 0 and 1 have three, the others two
constexpr int64_t kTokens = kChunks * kTokensPerChunk;

using Sequences = std::vector<uint64_t>;

Sequences AcceptedOf(const Session& session) {
  Sequences accepted;
  for (const LaneMarks& lane : session.marks().lanes) accepted.push_back(lane.accepted);
  return accepted;
}

class SessionLanesTest : public SessionTest {
 protected:
  Session OpenLanes(const std::string& client_key = "trainer") { return Open(client_key, kLanes); }

  // The chunk with this place meets `fate` the first time it arrives.
  void ScriptLane(int lane, uint64_t sequence, Fate fate) {
    fake_.on_lane_chunk = [lane, sequence, fate](int at, uint64_t arrived, int attempt) {
      return at == lane && arrived == sequence && attempt == 0 ? fate : Fate::kTake;
    };
  }

  // How often each chunk of a lane arrived.
  int64_t Arrivals(int lane) const {
    const auto lanes = fake_.observed().chunk_lanes;
    return std::count(lanes.begin(), lanes.end(), lane);
  }

  // Every chunk that arrived was the one that this lane and sequence stand for.
  void ExpectPlaces() const {
    const auto observed = fake_.observed();
    for (size_t i = 0; i < observed.chunks.size(); ++i) {
      const auto& chunk = observed.chunks[i];
      const int64_t index = static_cast<int64_t>(chunk.sequence() - 1) * kLanes + observed.chunk_lanes[i];
      EXPECT_EQ(chunk.first_token(), index * kTokensPerChunk);
    }
  }
};

TEST_F(SessionLanesTest, BatchIsDealtOutToTheLanesInTurnAndComesBackWhole) {
  Session session = OpenLanes();
  Data data(kTokens);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(fake_.window(), data.Window());
  EXPECT_EQ(result->chunks, kChunks);
  EXPECT_EQ(result->valid_tokens, kTokens);
  EXPECT_THAT(result->first_sequences, ElementsAre(1, 1, 1, 1));
  EXPECT_THAT(AcceptedOf(session), ElementsAre(3, 3, 2, 2));
  ExpectPlaces();

  Data next(3 * kTokensPerChunk, 2);
  const auto second = session.Compute(next.batch(), next.outputs());
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_THAT(second->first_sequences, ElementsAre(4, 4, 3, 3));
  EXPECT_THAT(AcceptedOf(session), ElementsAre(4, 4, 3, 2));
  std::vector<float> window = data.Window();
  next.AddTo(&window, 0, next.labels.size());
  EXPECT_EQ(fake_.window(), window);
}

TEST_F(SessionLanesTest, OnlyABatchThatNeedsThemConnectsTheOtherLanes) {
  Session session = OpenLanes();
  Data small(kTokensPerChunk);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(session.Compute(small.batch(), small.outputs()).ok());
  EXPECT_THAT(fake_.observed().stream_lanes, ElementsAre(0));
  EXPECT_THAT(AcceptedOf(session), ElementsAre(3, 0, 0, 0));
  Data large(kTokens);
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(session.Compute(large.batch(), large.outputs()).ok());
  EXPECT_THAT(fake_.observed().stream_lanes, UnorderedElementsAre(0, 1, 2, 3));
  EXPECT_THAT(AcceptedOf(session), ElementsAre(9, 6, 4, 4));
}

// The fake stops reading from one lane until everything of the others is there: would any of them wait for
// it, nothing would ever go on.
TEST_F(SessionLanesTest, LaneThatIsNotReadHoldsUpNoOther) {
  for (int slow = 0; slow < kLanes; ++slow) {
    const auto before = fake_.observed().chunks.size();
    const int64_t own = slow < 2 ? 3 : 2;
    fake_.on_lane_chunk = [slow, held = false](int lane, uint64_t, int) mutable {
      return lane == slow && !std::exchange(held, true) ? Fate::kStall : Fate::kTake;
    };
    fake_.stalled_until = [=](const FakeServer::Observed& observed) {
      return std::count_if(observed.chunk_lanes.begin() + static_cast<int64_t>(before),
                           observed.chunk_lanes.end(),
                           [slow](int lane) { return lane != slow; }) == kChunks - own;
    };
    Session session = OpenLanes("slow-" + std::to_string(slow));
    Data data(kTokens);
    const auto result = session.Compute(data.batch(), data.outputs());
    ASSERT_TRUE(result.ok()) << result.status();
    data.ExpectOutputs();  // although the first chunks came last
  }
}

TEST_F(SessionLanesTest, EveryLaneStaysWithinItsOwnCredit) {
  constexpr int64_t kPayload = kTokensPerChunk * (8 + 4 + 2 * kHidden * 4);  // of one chunk, in and out
  fake_.limits.set_byte_credit(3 * kPayload + 5);
  fake_.hold_answers_until_chunks = 1000;
  Session session = OpenLanes();
  // 12 on each lane: answered in threes, since nothing more fits.
  Data data(12 * kLanes * kTokensPerChunk);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  data.ExpectOutputs();
  EXPECT_EQ(fake_.observed().peak_outstanding_bytes, 3 * kPayload);
}

TEST_F(SessionLanesTest, LaneWhoseCreditIsUsedUpHoldsUpNoOther) {
  constexpr int64_t kPayload = kTokensPerChunk * (8 + 4 + 2 * kHidden * 4);
  fake_.limits.set_byte_credit(2 * kPayload);
  fake_.on_lane_chunk = [](int lane, uint64_t sequence, int) {
    return lane == 1 && sequence == 2 ? Fate::kStall : Fate::kTake;  // and its credit with it
  };
  fake_.stalled_until = [](const FakeServer::Observed& observed) {
    return std::count(observed.chunk_lanes.begin(), observed.chunk_lanes.end(), 1) == 2 &&
           observed.chunks.size() == 30 + 2;
  };
  Session session = OpenLanes();
  Data data(10 * kLanes * kTokensPerChunk);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  data.ExpectOutputs();
  EXPECT_EQ(fake_.window(), data.Window());
}

// Broken streams

class LaneCutTest : public SessionLanesTest,
                    public ::testing::WithParamInterface<std::tuple<int, int, Fate>> {};

TEST_P(LaneCutTest, OnlyThatLaneSendsAgainAndEverythingIsAddedOnce) {
  const auto [lane, sequence, fate] = GetParam();
  ScriptLane(lane, static_cast<uint64_t>(sequence), fate);
  Session session = OpenLanes();
  Data data(kTokens);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(fake_.window(), data.Window());
  EXPECT_EQ(session.reconnects(), 1);
  EXPECT_EQ(result->repeated_chunks, fate == Fate::kCutBeforeAnswer ? 1 : 0);
  EXPECT_THAT(AcceptedOf(session), ElementsAre(3, 3, 2, 2));
  ExpectPlaces();
  for (int other = 0; other < kLanes; ++other) {
    if (other == lane) continue;
    EXPECT_EQ(Arrivals(other), other < 2 ? 3 : 2) << "lane " << other;
  }
}

INSTANTIATE_TEST_SUITE_P(AtEachPoint, LaneCutTest,
                         ::testing::Combine(::testing::Range(0, kLanes), ::testing::Range(1, 3),
                                            ::testing::Values(Fate::kCutBeforeTaking, Fate::kCutBeforeAnswer,
                                                              Fate::kEndBeforeTaking)));

TEST_F(SessionLanesTest, AllLanesBrokenAtOnceAllComeBack) {
  fake_.on_lane_chunk = [](int lane, uint64_t sequence, int attempt) {
    if (sequence != 2 || attempt > 0) return Fate::kTake;
    return lane % 2 == 0 ? Fate::kCutBeforeTaking : Fate::kCutBeforeAnswer;
  };
  Session session = OpenLanes();
  Data data(kTokens);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(fake_.window(), data.Window());
  EXPECT_EQ(session.reconnects(), kLanes);
  EXPECT_EQ(result->repeated_chunks, kLanes / 2);
  ExpectPlaces();
}

TEST_F(SessionLanesTest, OneLaneThatStaysBrokenEndsTheBatchForAll) {
  fake_.on_lane_chunk = [](int lane, uint64_t, int) {
    return lane == 3 ? Fate::kCutBeforeTaking : Fate::kTake;
  };
  Connect(std::chrono::milliseconds(300));
  Session session = OpenLanes();
  Data data(kTokens);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("gave up reconnecting after 300 ms"));
  EXPECT_THAT(std::string(session.Compute(data.batch(), data.outputs()).status().message()),
              HasSubstr("earlier error"));
}

TEST_F(SessionLanesTest, StreamsThatBrokeBetweenBatchesAreMadeAgain) {
  fake_.on_lane_chunk = [](int, uint64_t sequence, int) {
    return sequence == 2 ? Fate::kCutAfterAnswer : Fate::kTake;
  };
  Session session = OpenLanes();
  Data data(2 * kLanes * kTokensPerChunk);
  std::vector<float> window(FakeServer::kVocab * kHidden, 0.0F);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
    data.AddTo(&window, 0, data.labels.size());
  }
  EXPECT_EQ(fake_.window(), window);
  EXPECT_THAT(AcceptedOf(session), ElementsAre(4, 4, 4, 4));
}

// What concerns all lanes

TEST_F(SessionLanesTest, RejectedChunkIsNamedByLaneAndTheOthersCount) {
  fake_.on_lane_chunk = [](int lane, uint64_t sequence, int) {
    return (lane == 2 && sequence == 1) || (lane == 0 && sequence == 2) ? Fate::kReject : Fate::kTake;
  };
  Session session = OpenLanes();
  Data data(kTokens);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  const std::string message(result.status().message());
  EXPECT_THAT(message, HasSubstr("tokens [4, 6) (lane 2, sequence 1)"));  // the first of the batch
  EXPECT_THAT(message, HasSubstr("2 of the batch's 10 chunks were rejected"));
  data.ExpectOutputs(0, 4);
  data.ExpectOutputs(6, 8);
  data.ExpectOutputs(10, kTokens);
  EXPECT_EQ(data.losses[4], -1.0F);
  fake_.on_lane_chunk = nullptr;
  const auto corrected = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(corrected.ok()) << corrected.status();
  EXPECT_THAT(corrected->first_sequences, ElementsAre(4, 4, 3, 3));
}

TEST_F(SessionLanesTest, LaneTakenOverByAnotherStreamEndsTheBatchAndNoneIsTakenBack) {
  ScriptLane(2, 1, Fate::kFence);
  Session session = OpenLanes();
  Data data(kTokens);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kAborted) << result.status();
  EXPECT_THAT(std::string(result.status().message()),
              HasSubstr("taken over by another stream with client_key 'trainer'"));
  auto lanes = fake_.observed().stream_lanes;
  std::sort(lanes.begin(), lanes.end());
  EXPECT_EQ(std::adjacent_find(lanes.begin(), lanes.end()), lanes.end()) << "a lane was attached twice";
}

TEST_F(SessionLanesTest, SequencesTakenByAnotherProcessWhileTheStreamWasBrokenAreNotMistakenForOurOwn) {
  ScriptLane(1, 1, Fate::kOvertaken);
  Session session = OpenLanes();
  Data data(kTokens);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("client_key 'trainer'"));
}

class LanesRestartTest : public SessionLanesTest, public ::testing::WithParamInterface<Fate> {};

TEST_P(LanesRestartTest, RestartUnderOneLaneIsAWindowLost) {
  ScriptLane(2, 2, GetParam());
  Session session = OpenLanes();
  Data data(kTokens);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_TRUE(IsWindowLost(result.status())) << result.status();
  EXPECT_TRUE(IsWindowLost(session.Compute(data.batch(), data.outputs()).status()));
}

INSTANTIATE_TEST_SUITE_P(WithAndWithoutHead, LanesRestartTest,
                         ::testing::Values(Fate::kRestartKeepHead, Fate::kRestartLoseHead));

TEST_F(SessionLanesTest, RestartWithNothingInAWindowGoesOnWithANewSessionOnAllLanes) {
  Session session = OpenLanes();
  Data data(kTokens);
  Batch losses = data.batch();
  losses.mode = ComputeMode::kLossOnly;
  ASSERT_TRUE(session.Compute(losses, {.losses = data.losses}).ok());
  ScriptLane(3, 3, Fate::kRestartKeepHead);
  const auto interrupted = session.Compute(losses, {.losses = data.losses});
  EXPECT_EQ(interrupted.status().code(), absl::StatusCode::kAborted) << interrupted.status();
  EXPECT_FALSE(IsWindowLost(interrupted.status()));

  fake_.on_lane_chunk = nullptr;
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->first_sequences, ElementsAre(1, 1, 1, 1));
  EXPECT_EQ(fake_.window(), data.Window());
}

// Generations

TEST_F(SessionLanesTest, AllLanesFollowAFlushBySomebodyElseIntoOneWindow) {
  Session session = OpenLanes();
  Data data(kTokens);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  const auto other = Client::Connect(fake_.target(), {});
  ASSERT_TRUE(other.ok());
  const auto head = (*other)->GetHead(FakeServer::kName);
  ASSERT_TRUE(head.ok());
  std::vector<float> gradient(FakeServer::kVocab * kHidden);
  const SessionMarks marks = session.marks();
  ASSERT_EQ(marks.lanes.size(), static_cast<size_t>(kLanes));
  ASSERT_TRUE(head->Flush({}, {&marks, 1}, gradient.data()).ok());
  EXPECT_EQ(gradient, data.Window());

  Data next(kTokens, 4);
  const auto result = session.Compute(next.batch(), next.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->repeated_chunks, 0);
  EXPECT_EQ(fake_.window(), next.Window());
  EXPECT_THAT(AcceptedOf(session), ElementsAre(6, 6, 4, 4));
}

TEST_F(SessionLanesTest, FlushInTheMiddleOfABatchIsAnErrorWhateverLaneMeetsItFirst) {
  for (int lane = 0; lane < kLanes; ++lane) {
    ScriptLane(lane, 2, Fate::kFlushBefore);
    Session session = OpenLanes("flushed-" + std::to_string(lane));
    Data data(kTokens);
    const auto result = session.Compute(data.batch(), data.outputs());
    EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("of its 10 chunks are in that window"));
    EXPECT_EQ(fake_.window(), std::vector<float>(FakeServer::kVocab * kHidden, 0.0F))
        << "two windows have parts";
  }
}

class LanesFlushTest : public SessionLanesTest {
 protected:
  // A batch that begins while the window is frozen; `end` ends the flush once the batch waits.
  void ComputeDuringFlush(const std::function<absl::Status(const std::string&)>& end, Data* next) {
    Session session = OpenLanes();
    ASSERT_TRUE(session.Compute(data_.batch(), data_.outputs()).ok());
    std::vector<float> gradient(FakeServer::kVocab * kHidden);
    const SessionMarks marks = session.marks();
    const auto flushed = head_->Flush({.commit = false}, {&marks, 1}, gradient.data());
    ASSERT_TRUE(flushed.ok()) << flushed.status();

    absl::StatusOr<BatchResult> result = absl::UnknownError("not done");
    std::thread compute([&] { result = session.Compute(next->batch(), next->outputs()); });
    const auto waits = [this] {  // every lane was refused in 1 and waits in 2
      const auto observed = fake_.observed();
      return std::count_if(observed.chunks.begin(), observed.chunks.end(),
                           [](const auto& chunk) { return chunk.generation() == 2; }) == kLanes;
    };
    while (!waits()) std::this_thread::yield();
    EXPECT_TRUE(end(flushed->flush_id).ok());
    compute.join();
    ASSERT_TRUE(result.ok()) << result.status();
    next->ExpectOutputs();
    EXPECT_EQ(gradient, data_.Window());
  }

  Data data_{kTokens};
};

TEST_F(LanesFlushTest, BatchDuringAFlushWaitsForTheNextWindow) {
  Data next(kTokens, 2);
  ComputeDuringFlush([this](const std::string& id) { return head_->CommitFlush(id); }, &next);
  EXPECT_EQ(fake_.window(), next.Window());
}

TEST_F(LanesFlushTest, BatchDuringAnAbortedFlushReturnsToTheOldWindow) {
  Data next(kTokens, 2);
  ComputeDuringFlush([this](const std::string& id) { return head_->AbortFlush(id); }, &next);
  std::vector<float> window = data_.Window();
  next.AddTo(&window, 0, kTokens);
  EXPECT_EQ(fake_.window(), window);
}

// Restarted clients

TEST_F(SessionLanesTest, RestartedClientTakesOverEveryLaneAtOnce) {
  Data data(kTokens);
  {
    Session session = OpenLanes("rank-0");
    ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  }
  const size_t before = fake_.observed().stream_lanes.size();
  Session session = OpenLanes("rank-0");
  EXPECT_EQ(fake_.observed().stream_lanes.size(), before + kLanes);
  EXPECT_THAT(AcceptedOf(session), ElementsAre(3, 3, 2, 2));
  EXPECT_EQ(session.reconnects(), 0);
}

TEST_F(SessionLanesTest, ServerThatDoesNotSayWhetherASessionIsNewMayHaveHadItBefore) {
  fake_.forget_sessions_are_new = true;
  Session session = OpenLanes();
  EXPECT_THAT(fake_.observed().stream_lanes, ElementsAre(0, 1, 2, 3));
}

TEST_F(SessionLanesTest, RestartedClientGetsItsLossesAgainWithoutAddingTwice) {
  Data before(3);
  Data data(kTokens, 3);
  Sequences position;
  {
    Session session = OpenLanes("rank-0");
    ASSERT_TRUE(session.Compute(before.batch(), before.outputs()).ok());
    Batch batch = data.batch();
    batch.labels = batch.labels.first(5 * kTokensPerChunk);  // of what would have been ten chunks
    const auto result = session.Compute(batch, {});
    ASSERT_TRUE(result.ok()) << result.status();
    position = result->first_sequences;
    EXPECT_THAT(position, ElementsAre(3, 1, 1, 1));
  }
  Session session = OpenLanes("rank-0");
  EXPECT_EQ(session.ResumeAt({1}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(session.ResumeAt({1, 0, 1, 1}).code(), absl::StatusCode::kInvalidArgument);
  const absl::Status beyond = session.ResumeAt({1, 1, 3, 1});
  EXPECT_EQ(beyond.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(beyond.message()), HasSubstr("sequences[2] is 3; it must be in [1, 2]"));
  ASSERT_TRUE(session.ResumeAt(position).ok());
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(result->repeated_chunks, 5);
  std::vector<float> window = before.Window();
  data.AddTo(&window, 0, kTokens);
  EXPECT_EQ(fake_.window(), window);
}

TEST_F(SessionLanesTest, NumberOfLanesThatCannotBeIsRefused) {
  Connect();
  EXPECT_EQ(head_->OpenSession({.lanes = -1}).status().code(), absl::StatusCode::kInvalidArgument);
  fake_.most_lanes = 3;
  EXPECT_EQ(head_->OpenSession({.lanes = 4}).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace lossd::session_lanes_test
