// lossd::Session with several lanes: where chunks go, and what happens to all of them when something happens
// to one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "lossd/client.h"
#include "tests/integration/client/session_fixture.h"
#include "tests/unit/client/session_data.h"

namespace lossd::session_lanes_test {
namespace {

using testing::Data;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::kHeadName;
using testing::kHidden;
using testing::kTokensPerChunk;
using testing::kVocab;
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

  // Every chunk that arrived was the one that this lane and sequence stand for.
  void ExpectPlaces() const {
    const auto observed = server_.observed();
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
  EXPECT_EQ(server_.window(), data.Window());
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
  EXPECT_EQ(server_.window(), window);
}

TEST_F(SessionLanesTest, OnlyABatchThatNeedsThemConnectsTheOtherLanes) {
  Session session = OpenLanes();
  Data small(kTokensPerChunk);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(session.Compute(small.batch(), small.outputs()).ok());
  EXPECT_THAT(server_.observed().stream_lanes, ElementsAre(0));
  EXPECT_THAT(AcceptedOf(session), ElementsAre(3, 0, 0, 0));
  Data large(kTokens);
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(session.Compute(large.batch(), large.outputs()).ok());
  EXPECT_THAT(server_.observed().stream_lanes, UnorderedElementsAre(0, 1, 2, 3));
  EXPECT_THAT(AcceptedOf(session), ElementsAre(9, 6, 4, 4));
}

// What concerns all lanes

TEST_F(SessionLanesTest, RejectedChunkIsNamedByLaneAndTheOthersCount) {
  Session session = OpenLanes();
  Data data(kTokens);
  Data bad = data;
  bad.hidden[4 * kHidden] = bad.hidden[8 * kHidden] = INFINITY;  // of lane 2, sequence 1; lane 0, sequence 2
  const auto result = session.Compute(bad.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  const std::string message(result.status().message());
  EXPECT_THAT(message, HasSubstr("tokens [4, 6) (lane 2, sequence 1)"));  // the first of the batch
  EXPECT_THAT(message, HasSubstr("2 of the batch's 10 chunks were rejected"));
  data.ExpectOutputs(0, 4);
  data.ExpectOutputs(6, 8);
  data.ExpectOutputs(10, kTokens);
  EXPECT_EQ(data.losses[4], -1.0F);
  const auto corrected = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(corrected.ok()) << corrected.status();
  EXPECT_THAT(corrected->first_sequences, ElementsAre(4, 4, 3, 3));
}

TEST_F(SessionLanesTest, LaneTakenOverByAnotherStreamEndsTheBatchAndNoneIsTakenBack) {
  server_.BeforeOf(2, 1, [this] { server_.TakeLane(2); });
  Session session = OpenLanes();
  Data data(kTokens);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kAborted) << result.status();
  EXPECT_THAT(std::string(result.status().message()),
              HasSubstr("taken over by another stream with client_key 'trainer'"));
  auto lanes = server_.observed().stream_lanes;
  std::sort(lanes.begin(), lanes.end());
  EXPECT_EQ(std::adjacent_find(lanes.begin(), lanes.end()), lanes.end()) << "a lane was attached twice";
}

// Generations

TEST_F(SessionLanesTest, AllLanesFollowAFlushBySomebodyElseIntoOneWindow) {
  Session session = OpenLanes();
  Data data(kTokens);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  const auto other = Client::Connect(server_.target(), {});
  ASSERT_TRUE(other.ok());
  const auto head = (*other)->GetHead(kHeadName);
  ASSERT_TRUE(head.ok());
  std::vector<float> gradient(kVocab * kHidden);
  const SessionMarks marks = session.marks();
  ASSERT_EQ(marks.lanes.size(), static_cast<size_t>(kLanes));
  ASSERT_TRUE(head->Flush({}, {&marks, 1}, gradient.data()).ok());
  EXPECT_EQ(gradient, data.Window());

  Data next(kTokens, 4);
  const auto result = session.Compute(next.batch(), next.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->repeated_chunks, 0);
  EXPECT_EQ(server_.window(), next.Window());
  EXPECT_THAT(AcceptedOf(session), ElementsAre(6, 6, 4, 4));
}

TEST_F(SessionLanesTest, FlushInTheMiddleOfABatchIsAnErrorWhateverLaneMeetsItFirst) {
  for (int lane = 0; lane < kLanes; ++lane) {
    server_.BeforeOf(lane, 2, [this, before = server_.Applied()] { server_.FlushAfter(before + 1); });
    Session session = OpenLanes("flushed-" + std::to_string(lane));
    Data data(kTokens);
    const auto result = session.Compute(data.batch(), data.outputs());
    EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("of its 10 chunks are in that window"));
    EXPECT_EQ(server_.window(), std::vector<float>(kVocab * kHidden, 0.0F)) << "two windows have parts";
  }
}

class LanesFlushTest : public SessionLanesTest {
 protected:
  // A batch that begins while the window is frozen; `end` ends the flush once the batch waits.
  void ComputeDuringFlush(const std::function<absl::Status(const std::string&)>& end, Data* next) {
    Session session = OpenLanes();
    ASSERT_TRUE(session.Compute(data_.batch(), data_.outputs()).ok());
    std::vector<float> gradient(kVocab * kHidden);
    const SessionMarks marks = session.marks();
    const auto flushed = head_->Flush({.commit = false}, {&marks, 1}, gradient.data());
    ASSERT_TRUE(flushed.ok()) << flushed.status();

    absl::StatusOr<BatchResult> result = absl::UnknownError("not done");
    std::thread compute([&] { result = session.Compute(next->batch(), next->outputs()); });
    const auto waits = [this] {  // every lane was refused in 1 and waits in 2
      const auto observed = server_.observed();
      std::set<int> lanes;
      for (size_t i = 0; i < observed.chunks.size(); ++i) {
        if (observed.chunks[i].generation() == 2) lanes.insert(observed.chunk_lanes[i]);
      }
      return lanes.size() == kLanes;
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
  EXPECT_EQ(server_.window(), next.Window());
}

TEST_F(LanesFlushTest, BatchDuringAnAbortedFlushReturnsToTheOldWindow) {
  Data next(kTokens, 2);
  ComputeDuringFlush([this](const std::string& id) { return head_->AbortFlush(id); }, &next);
  std::vector<float> window = data_.Window();
  next.AddTo(&window, 0, kTokens);
  EXPECT_EQ(server_.window(), window);
}

// Restarted clients

TEST_F(SessionLanesTest, RestartedClientTakesOverEveryLaneAtOnce) {
  Data data(kTokens);
  {
    Session session = OpenLanes("rank-0");
    ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  }
  const size_t before = server_.observed().stream_lanes.size();
  Session session = OpenLanes("rank-0");
  EXPECT_EQ(server_.observed().stream_lanes.size(), before + kLanes);
  EXPECT_THAT(AcceptedOf(session), ElementsAre(3, 3, 2, 2));
  EXPECT_EQ(session.reconnects(), 0);
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
  EXPECT_EQ(server_.window(), window);
}

TEST_F(SessionLanesTest, NumberOfLanesThatCannotBeIsRefused) {
  server_.options.engine.max_lanes = 3;
  Connect();
  EXPECT_EQ(head_->OpenSession({.lanes = -1}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(head_->OpenSession({.lanes = 4}).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace lossd::session_lanes_test
