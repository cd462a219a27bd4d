// lossd::Session with several lanes: where chunks go, and what happens to all of them when something happens
// to one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lossd/client.h"
#include "tests/support/session_data.h"
#include "tests/support/session_fixture.h"
#include "tests/support/wait.h"

namespace lossd::session_lanes_test {
namespace {

using testing::Data;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::kHeadName;
using testing::kHidden;
using testing::kTokensPerChunk;
using testing::kVocab;
using testing::LanesTest;
using ::testing::UnorderedElementsAre;

class SessionLanesTest : public LanesTest {
 protected:
  // Chunks of all lanes but this one.
  int64_t SentBesides(int lane) const {
    return static_cast<int64_t>(server_.observed().chunks.size()) - Sent(lane);
  }
};
INSTANTIATE_TEST_SUITE_P(OneAndSeveral, SessionLanesTest, ::testing::Values(1, 4));

class FourLanesTest : public SessionLanesTest {};
INSTANTIATE_TEST_SUITE_P(Four, FourLanesTest, ::testing::Values(4));

TEST_P(SessionLanesTest, BatchIsDealtOutToTheLanesInTurnAndComesBackWhole) {
  Session session = OpenLanes();
  Data data(kTokens);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(server_.window(), data.Window());
  EXPECT_EQ(result->chunks, kChunks);
  EXPECT_EQ(result->valid_tokens, kTokens);
  EXPECT_THAT(result->first_sequences, Each(1U));
  EXPECT_EQ(AcceptedOf(session), Dealt());
  ExpectPlaces();

  Data next(3 * kTokensPerChunk, 2);
  const auto second = session.Compute(next.batch(), next.outputs());
  ASSERT_TRUE(second.ok()) << second.status();
  next.ExpectOutputs();
  EXPECT_EQ(second->first_sequences, Dealt(kChunks, 1));
  std::vector<uint64_t> accepted = Dealt();
  for (size_t lane = 0; lane < accepted.size(); ++lane) accepted[lane] += Dealt(3)[lane];
  EXPECT_EQ(AcceptedOf(session), accepted);
  std::vector<float> window = data.Window();
  next.AddTo(&window, 0, next.labels.size());
  EXPECT_EQ(server_.window(), window);
  EXPECT_EQ(server_.observed().streams, lanes_);
}

TEST_P(FourLanesTest, LaneThatIsNotReadHoldsUpNoOther) {
  for (int slow = 0; slow < lanes_; ++slow) {
    const int64_t others = kChunks - (slow < 2 ? 3 : 2);
    server_.BeforeOf(slow, 1, [this, slow, others, before = SentBesides(slow)] {
      testing::Await("the other lanes", [&] { return SentBesides(slow) - before == others; });
    });
    Session session = OpenLanes("slow-" + std::to_string(slow));
    Data data(kTokens);
    const auto result = session.Compute(data.batch(), data.outputs());
    ASSERT_TRUE(result.ok()) << result.status();
    data.ExpectOutputs();  // although the first chunks came last
  }
}

TEST_P(FourLanesTest, LaneWhoseCreditIsUsedUpHoldsUpNoOther) {
  constexpr int64_t kPayload = kTokensPerChunk * (8 + 4 + 2 * kHidden * 4);
  server_.options.engine.lane_credit_bytes = 2 * kPayload;
  server_.recorder().before_answer = [this](int lane, uint64_t sequence) {
    if (lane != 1 || sequence != 2) return;
    testing::Await("the other lanes", [this] { return SentBesides(1) == 30; });
  };
  Session session = OpenLanes();
  Data data(10 * lanes_ * kTokensPerChunk);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  data.ExpectOutputs();
  EXPECT_EQ(server_.window(), data.Window());
}

TEST_P(FourLanesTest, OnlyABatchThatNeedsThemConnectsTheOtherLanes) {
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

TEST_P(SessionLanesTest, RejectedChunkIsNamedByLaneAndTheOthersCount) {
  Session session = OpenLanes();
  Data data(kTokens);
  Data bad = data;
  bad.hidden[4 * kHidden] = bad.hidden[8 * kHidden] = INFINITY;  // of chunks 2 and 4
  const auto result = session.Compute(bad.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  const std::string message(result.status().message());
  EXPECT_THAT(message, HasSubstr(absl::StrCat("tokens [4, 6) (lane ", 2 % lanes_, ", sequence ",
                                              2 / lanes_ + 1, ")")));  // the first of the batch
  EXPECT_THAT(message, HasSubstr("non-finite"));
  EXPECT_THAT(message, HasSubstr("2 of the batch's 10 chunks were rejected"));
  std::vector<float> window(kVocab * kHidden, 0.0F);
  for (const auto& [begin, end] : {std::pair(0, 4), std::pair(6, 8), std::pair(10, 20)}) {
    data.ExpectOutputs(static_cast<size_t>(begin), static_cast<size_t>(end));
    data.AddTo(&window, static_cast<size_t>(begin), static_cast<size_t>(end));
  }
  EXPECT_EQ(data.losses[4], -1.0F);
  EXPECT_EQ(server_.window(), window);
  // The correction takes new sequences.
  const auto corrected = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(corrected.ok()) << corrected.status();
  EXPECT_EQ(corrected->first_sequences, Dealt(kChunks, 1));
}

TEST_P(SessionLanesTest, LaneTakenOverByAnotherStreamEndsTheBatchAndNoneIsTakenBack) {
  const int lane = lanes_ / 2;
  server_.BeforeOf(lane, lane == 0 ? 2 : 1, [this, lane] { server_.TakeLane(lane); });
  Session session = OpenLanes();
  Data data(kTokens);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kAborted) << result.status();
  EXPECT_THAT(std::string(result.status().message()),
              HasSubstr("taken over by another stream with client_key 'trainer'"));
  EXPECT_FALSE(IsWindowLost(result.status()));
  auto lanes = server_.observed().stream_lanes;
  std::sort(lanes.begin(), lanes.end());
  EXPECT_EQ(std::adjacent_find(lanes.begin(), lanes.end()), lanes.end()) << "a lane was attached twice";
}

// Generations

TEST_P(SessionLanesTest, AllLanesFollowAFlushBySomebodyElseIntoOneWindow) {
  Session session = OpenLanes();
  Data data(kTokens);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  const auto other = Client::Connect(server_.target(), {});
  ASSERT_TRUE(other.ok());
  const auto head = (*other)->GetHead(kHeadName);
  ASSERT_TRUE(head.ok());
  std::vector<float> gradient(kVocab * kHidden);
  const SessionMarks marks = session.marks();
  ASSERT_EQ(marks.lanes.size(), static_cast<size_t>(lanes_));
  ASSERT_TRUE(head->Flush({}, {&marks, 1}, gradient.data()).ok());
  EXPECT_EQ(gradient, data.Window());

  Data next(kTokens, 4);
  const auto result = session.Compute(next.batch(), next.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->repeated_chunks, 0);
  EXPECT_EQ(server_.window(), next.Window());
  EXPECT_EQ(server_.observed().chunks.back().generation(), 2U);
  std::vector<uint64_t> twice = Dealt();
  for (uint64_t& chunks : twice) chunks *= 2;
  EXPECT_EQ(AcceptedOf(session), twice);
}

TEST_P(SessionLanesTest, FlushInTheMiddleOfABatchIsAnErrorWhateverLaneMeetsItFirst) {
  for (int lane = 0; lane < lanes_; ++lane) {
    server_.BeforeOf(lane, 2, [this, before = server_.Applied()] { server_.FlushAfter(before + 1); });
    Session session = OpenLanes("flushed-" + std::to_string(lane));
    Data data(kTokens);
    const auto result = session.Compute(data.batch(), data.outputs());
    EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
    EXPECT_THAT(std::string(result.status().message()),
                HasSubstr(lanes_ == 1 ? "1 of its 10 chunks are in that window"
                                      : "of its 10 chunks are in that window"));
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
    AwaitNextWindow(static_cast<size_t>(lanes_));
    EXPECT_TRUE(end(flushed->flush_id).ok());
    compute.join();
    ASSERT_TRUE(result.ok()) << result.status();
    next->ExpectOutputs();
    EXPECT_EQ(gradient, data_.Window());
  }

  Data data_{kTokens};
};
INSTANTIATE_TEST_SUITE_P(OneAndSeveral, LanesFlushTest, ::testing::Values(1, 4));

TEST_P(LanesFlushTest, BatchDuringAFlushWaitsForTheNextWindow) {
  Data next(kTokens, 2);
  ComputeDuringFlush([this](const std::string& id) { return head_->CommitFlush(id); }, &next);
  EXPECT_EQ(server_.window(), next.Window());
}

TEST_P(LanesFlushTest, BatchDuringAnAbortedFlushReturnsToTheOldWindow) {
  Data next(kTokens, 2);
  ComputeDuringFlush([this](const std::string& id) { return head_->AbortFlush(id); }, &next);
  EXPECT_EQ(server_.observed().chunks.back().generation(), 1U);
  std::vector<float> window = data_.Window();
  next.AddTo(&window, 0, kTokens);
  EXPECT_EQ(server_.window(), window);
}

// Restarted clients

TEST_P(SessionLanesTest, RestartedClientTakesOverEveryLaneAtOnce) {
  Data data(kTokens);
  {
    Session session = OpenLanes("rank-0");
    ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  }
  const size_t before = server_.observed().stream_lanes.size();
  Session session = OpenLanes("rank-0");
  EXPECT_EQ(server_.observed().stream_lanes.size(), before + static_cast<size_t>(lanes_));
  EXPECT_EQ(AcceptedOf(session), Dealt());
  EXPECT_EQ(session.reconnects(), 0);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->first_sequences, Dealt(kChunks, 1));
}

TEST_P(SessionLanesTest, RestartedClientGetsItsLossesAgainWithoutAddingTwice) {
  Data before(3);
  Data data(kTokens, 3);
  std::vector<uint64_t> position;
  {
    Session session = OpenLanes("rank-0");
    ASSERT_TRUE(session.Compute(before.batch(), before.outputs()).ok());
    Batch batch = data.batch();
    batch.labels = batch.labels.first(5 * kTokensPerChunk);  // of what would have been ten chunks
    const auto result = session.Compute(batch, {});
    ASSERT_TRUE(result.ok()) << result.status();
    position = result->first_sequences;
    std::vector<uint64_t> behind_two_on_the_first_lane(static_cast<size_t>(lanes_), 1);
    behind_two_on_the_first_lane.front() = 3;
    EXPECT_EQ(position, behind_two_on_the_first_lane);
  }
  Session session = OpenLanes("rank-0");
  const auto lane = static_cast<size_t>(lanes_ / 2);
  const uint64_t next = AcceptedOf(session).at(lane) + 1;
  std::vector<uint64_t> wrong = position;
  wrong.push_back(1);
  EXPECT_EQ(session.ResumeAt(wrong).code(), absl::StatusCode::kInvalidArgument);
  wrong = position;
  wrong.at(lane) = 0;
  EXPECT_EQ(session.ResumeAt(wrong).code(), absl::StatusCode::kInvalidArgument);
  wrong.at(lane) = next + 1;
  const absl::Status beyond = session.ResumeAt(wrong);
  EXPECT_EQ(beyond.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(beyond.message()), HasSubstr(absl::StrCat("sequences[", lane, "] is ", next + 1,
                                                                    "; it must be in [1, ", next, "]")));
  ASSERT_TRUE(session.ResumeAt(position).ok());
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(result->repeated_chunks, 5);
  std::vector<float> window = before.Window();
  data.AddTo(&window, 0, kTokens);
  EXPECT_EQ(server_.window(), window);
}

TEST_P(FourLanesTest, NumberOfLanesThatCannotBeIsRefused) {
  server_.options.engine.max_lanes = 3;
  Connect();
  EXPECT_EQ(head_->OpenSession({.lanes = -1}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(head_->OpenSession({.lanes = 4}).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace lossd::session_lanes_test
