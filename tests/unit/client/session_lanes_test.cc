// lossd::Session with several lanes: where chunks go, and what happens to all of them when something happens
// to one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
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

TEST_F(SessionLanesTest, ASessionThatWasOpenBeforeIsTakenOverOnAllItsLanes) {
  OpenLanes();
  EXPECT_THAT(fake_.observed().stream_lanes, ElementsAre(0));
  const Session session = OpenLanes();
  EXPECT_THAT(fake_.observed().stream_lanes, ElementsAre(0, 0, 1, 2, 3));
}

}  // namespace
}  // namespace lossd::session_lanes_test
