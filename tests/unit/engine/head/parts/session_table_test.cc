#include "server/engine/head/parts/session_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "server/engine/common/monotonic_clock.h"
#include "server/engine/memory/memory_budget.h"

namespace lossd::engine::session_table_test {
namespace {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class Listener : public LaneListener {
 public:
  void OnAnswer(ChunkAnswer /*answer*/) override {}
  void OnApplied(uint64_t /*applied*/) override {}
  void OnEnd(absl::Status /*status*/) override {}
};

class SessionTableTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(table_.Open("client", 0, 2, "s", Deterministic::kNo, none_).ok());
    lane_ = table_.Attach("s", 0, listener_, &cut_);
  }

  // A chunk that the stream submits.
  std::shared_ptr<ChunkItem> Enqueue(uint64_t sequence) {
    auto item = std::make_shared<ChunkItem>();
    item->session_id = "s";
    item->chunk.sequence = sequence;
    item->chunk.tokens = 1;
    item->weight_gradient = ChunkItem::WeightGradient::kWithBatch;
    table_.Enqueue(item);
    return item;
  }
  // A deterministic session "d", and a chunk of it that was started.
  std::shared_ptr<ChunkItem> StartPlaced() {
    SessionMemory memory;
    memory.reservation = *budget_->Reserve("h", "a session", {{"gradient", 64}});
    memory.gradient = std::make_unique<Gradient>();
    EXPECT_TRUE(table_.Open("placed", 1, 1, "d", Deterministic::kYes, memory).ok());
    placed_ = table_.Attach("d", 0, listener_, &cut_);
    auto item = std::make_shared<ChunkItem>();
    item->session_id = "d";
    item->chunk.sequence = 1;
    item->chunk.tokens = 1;
    item->chunk.window_token = 0;
    item->chunk.labels = std::string(8, '\0');
    table_.ClaimPlace(item->chunk, item.get());
    table_.Enqueue(item);
    Start(*item);
    return item;
  }
  void Start(ChunkItem& item) {
    table_.Start(item);
    table_.NoteStarted(item);
  }

  const std::shared_ptr<MemoryBudget> budget_ = std::make_shared<MemoryBudget>(1 << 20);
  SessionMemory none_;
  Counters counters_;
  HeadCounters head_counters_;
  SessionTable table_{{.head = "h", .frozen = false, .hidden_size = 4, .limits = {}, .place_timeout = {}},
                      &counters_,
                      &head_counters_};
  SessionTable::Cut cut_;
  std::shared_ptr<Listener> listener_ = std::make_shared<Listener>();
  LaneAttachment lane_;
  LaneAttachment placed_;  // StartPlaced
};

TEST_F(SessionTableTest, AClientThatOpensItsSessionAgainFindsItsMarks) {
  Start(*Enqueue(1));
  const auto again = table_.Open("client", 0, 2, "unused", Deterministic::kNo, none_);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->session_id, "s");
  EXPECT_THAT(again->lanes, ElementsAre(Field(&LaneMarks::accepted, 1U), Field(&LaneMarks::accepted, 0U)));
}

TEST_F(SessionTableTest, ASecondStreamFencesTheFirstAndWithdrawsWhatItQueued) {
  Start(*Enqueue(1));
  const std::shared_ptr<ChunkItem> queued = Enqueue(2);
  const LaneAttachment second = table_.Attach("s", 0, std::make_shared<Listener>(), &cut_);
  EXPECT_GT(second.epoch, lane_.epoch);
  EXPECT_EQ(second.marks.accepted, 1U) << "a started chunk always finishes, a queued one goes";
  EXPECT_THAT(cut_.withdrawn, ElementsAre(queued));
  EXPECT_THAT(cut_.listeners, ElementsAre(listener_));
  EXPECT_EQ(queued->state, ChunkItem::State::kWithdrawn);
  EXPECT_TRUE(absl::IsAborted(table_.Held(lane_).status()));
  EXPECT_TRUE(table_.Held(second).ok());
  EXPECT_EQ(counters_.queued_chunks, 0);
  EXPECT_EQ(counters_.chunks_withdrawn, 1U);
}

// A step was asked for again with the marks of queued losses, which have no answer yet and are withdrawn
// then.
TEST_F(SessionTableTest, MarksOfARepeatedStepDoNotOutliveTheLossesThatTheyName) {
  const std::shared_ptr<ChunkItem> queued = Enqueue(1);
  table_.PassOver({{"s", {{0, 1, 0}}}});
  HeadCheckpoint saved;
  ASSERT_TRUE(table_.Capture(&saved).ok());
  EXPECT_EQ(saved.sessions.at(0).session.lanes.at(0).base, 0U) << "as restored, 1 is still to come";
  lane_ = table_.Attach("s", 0, listener_, &cut_);
  Start(*Enqueue(1));
  EXPECT_FALSE(table_.WindowEmpty());
  EXPECT_THAT(table_.WindowMarks(), SizeIs(1));
}

// Likewise of losses that are being computed, whose client closes its session meanwhile.
TEST_F(SessionTableTest, AClosedSessionIsKnownUntilWhatItStartedIsApplied) {
  const std::shared_ptr<ChunkItem> item = Enqueue(1);
  Start(*item);
  table_.PassOver({{"s", {{0, 1, 0}}}});
  ASSERT_TRUE(table_.Close("s", std::nullopt, &cut_).ok());
  EXPECT_FALSE(table_.Apply(*item).has_value());
  EXPECT_THAT(table_.Snapshots(MonotonicNow()), IsEmpty());
}

TEST_F(SessionTableTest, AStreamThatWasFencedDetachesNobody) {
  const LaneAttachment second = table_.Attach("s", 0, std::make_shared<Listener>(), &cut_);
  SessionTable::Cut nothing;
  table_.Detach(lane_, &nothing);
  EXPECT_THAT(nothing.listeners, IsEmpty());
  EXPECT_TRUE(table_.Held(second).ok());
}

TEST_F(SessionTableTest, AppliedMarksAreToldToTheStreamThatHoldsTheLaneNow) {
  const std::shared_ptr<ChunkItem> item = Enqueue(1);
  Start(*item);
  const auto later = std::make_shared<Listener>();
  (void)table_.Attach("s", 0, later, &cut_);
  const auto applied = table_.Apply(*item);
  ASSERT_TRUE(applied.has_value());
  EXPECT_EQ(applied->applied, 1U);
  EXPECT_EQ(applied->listener, later);
}

TEST_F(SessionTableTest, ARepeatIsNoNewChunkOfItsLane) {
  Start(*Enqueue(1));
  auto repeat = std::make_shared<ChunkItem>();
  repeat->session_id = "s";
  repeat->chunk.sequence = 1;
  repeat->repeat = true;
  table_.Enqueue(repeat);
  Start(*repeat);
  EXPECT_EQ(table_.LaneOf("s", 0).accepted, 1U);
  EXPECT_EQ(table_.LaneOf("s", 0).started, 1U);
}

TEST_F(SessionTableTest, WhatWasRejectedForWhatMayChangeIsRememberedForItsRepeat) {
  const std::shared_ptr<ChunkItem> item = Enqueue(1);
  item->remembered = true;
  item->Reject(absl::FailedPreconditionError("no teacher"));
  Start(*item);
  EXPECT_THAT(table_.EarlierRejection("s", 0, item->chunk).message(), HasSubstr("was rejected before"));
  EXPECT_FALSE(item->in_window());
}

TEST_F(SessionTableTest, ThoseWhoWaitAreResumedOnceAndCutOffWithTheirStream) {
  int resumed = 0;
  table_.Wait(lane_, [&resumed] { ++resumed; });
  for (const Resume& resume : table_.TakeWaiting()) resume();
  EXPECT_EQ(resumed, 1);
  EXPECT_THAT(table_.TakeWaiting(), IsEmpty());
  table_.Wait(lane_, [&resumed] { ++resumed; });
  table_.Detach(lane_, &cut_);
  EXPECT_THAT(table_.TakeWaiting("s"), IsEmpty());
}

TEST_F(SessionTableTest, ASessionWithAStreamIsNotIdle) {
  const absl::Time later = absl::InfiniteFuture();
  EXPECT_THAT(table_.Idle(later), IsEmpty());
  EXPECT_TRUE(absl::IsFailedPrecondition(table_.Close("s", later, &cut_)));
  table_.Detach(lane_, &cut_);
  EXPECT_THAT(table_.Idle(later), ElementsAre("s"));
  EXPECT_TRUE(table_.Close("s", later, &cut_).ok());
  EXPECT_TRUE(absl::IsNotFound(table_.CheckLane("s", 0)));
}

TEST_F(SessionTableTest, ACheckpointLeavesOutWhatIsQueuedAndRefusesWhatIsUnderWay) {
  const std::shared_ptr<ChunkItem> first = Enqueue(1);
  Start(*first);
  HeadCheckpoint state;
  EXPECT_TRUE(absl::IsInternal(table_.Capture(&state)));
  (void)table_.Apply(*first);
  (void)Enqueue(2);
  state = {};
  ASSERT_TRUE(table_.Capture(&state).ok());
  ASSERT_THAT(state.sessions, SizeIs(1));
  EXPECT_EQ(state.sessions[0].session.lanes[0].accepted, 1U);

  table_.Install(state, {}, &cut_);
  EXPECT_TRUE(absl::IsAborted(table_.Held(lane_).status())) << "streams of before are cut off";
  EXPECT_THAT(table_.Replay("s"),
              ElementsAre(Field(&LaneReplay::next_sequence, 2U), Field(&LaneReplay::next_sequence, 1U)));
}

// Between two moments a chunk that is far ahead could find nobody left who brings what is missing.
TEST_F(SessionTableTest, RoomThatIsMadeAndThoseWhoWaitForItLeaveTogether) {
  const std::shared_ptr<ChunkItem> item = StartPlaced();
  table_.Wait(placed_, [] {});
  EXPECT_THAT(table_.FillPlace(*item).resumes, SizeIs(1));
  table_.Wait(placed_, [] {});
  const auto pieces = table_.TakeUnfinished();
  ASSERT_THAT(pieces, SizeIs(1));
  EXPECT_THAT(table_.FinishPiece(*pieces[0]), SizeIs(1));
  EXPECT_THAT(table_.TakeWaiting(), IsEmpty());
}

TEST_F(SessionTableTest, RowsThatNeverCameIntoTheGradientAreNoticedBeforeTheWindowEnds) {
  const std::shared_ptr<ChunkItem> item = StartPlaced();
  EXPECT_TRUE(table_.CheckAllAdded().ok());
  (void)table_.FillPlace(*item);
  const auto pieces = table_.TakeUnfinished();
  ASSERT_THAT(pieces, SizeIs(1));
  EXPECT_EQ(table_.CheckAllAdded().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(table_.CheckAllAdded().message(), HasSubstr("rows of session d"));
  (void)table_.FinishPiece(*pieces[0]);
  EXPECT_TRUE(table_.CheckAllAdded().ok());
}

}  // namespace
}  // namespace lossd::engine::session_table_test
