// Deterministic sessions on the CPU: the same bits of dW however the tokens are sent.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <random>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "server/engine/common/errors.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/end_flush.h"
#include "tests/unit/engine/head/deterministic_fixture.h"

namespace lossd::engine::deterministic_test {
namespace {

using lossd::testing::Await;
using ::testing::HasSubstr;

// A way to send the tokens of a window: cut anywhere, on any lane, in any order, with streams that are cut.
class Schedule {
 public:
  struct Cut {
    int64_t place = 0;
    int64_t tokens = 0;
  };
  Schedule(uint64_t seed, int64_t (*end_of_options)(int64_t)) : random_(seed) {
    lanes.resize(static_cast<size_t>(Below(3) + 1));
    std::vector<Cut> cuts;
    const int64_t most = Below(kMostTokens) + 1;
    for (int64_t place = 0; place < kTokens;) {
      const int64_t tokens = std::min(Below(most) + 1, end_of_options(place) - place);
      cuts.push_back({place, tokens});
      place += tokens;
    }
    if (Below(2) == 0) std::shuffle(cuts.begin(), cuts.end(), random_);
    for (const Cut& cut : cuts) lanes[static_cast<size_t>(Below(std::ssize(lanes)))].push_back(cut);
  }
  int64_t Below(int64_t limit) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(limit)); }

  std::vector<std::vector<Cut>> lanes;

 private:
  std::mt19937_64 random_;
};

TEST_F(DeterministicTest, TheGradientHasTheSameBitsHoweverTheTokensAreSent) {
  SendInOrder(Attach(Open("c", 0)));
  const std::vector<float> expected = Flush();
  EXPECT_GT(*std::max_element(expected.begin(), expected.end()), 0);
  int64_t cuts = 0;
  for (uint64_t seed = 1; seed <= 80; ++seed) {
    SCOPED_TRACE("schedule " + std::to_string(seed));
    Schedule schedule(seed, EndOfOptions);
    const std::string session = Open("c" + std::to_string(seed), static_cast<int32_t>(seed),
                                     static_cast<int32_t>(schedule.lanes.size()));
    std::vector<LaneAttachment> lanes;
    for (size_t i = 0; i < schedule.lanes.size(); ++i) {
      lanes.push_back(Attach(session, static_cast<int32_t>(i)));
    }
    std::vector<size_t> sent(lanes.size(), 0);
    const uint64_t generation = head_->Info().generation;
    size_t left = 0;
    for (const auto& lane : schedule.lanes) left += lane.size();
    int cuts_left = 50;
    while (left > 0) {
      const auto i = static_cast<size_t>(schedule.Below(std::ssize(lanes)));
      // The stream is cut; what may be missing comes again, and more. Not for ever: a cut takes back what
      // waits, and a device that is slower than this thread would never come to the end.
      if (cuts_left > 0 && schedule.Below(10) == 0) {
        --cuts_left;
        head_->DetachLane(lanes[i]);
        lanes[i] = Attach(session, static_cast<int32_t>(i));
        left += sent[i] - lanes[i].marks.accepted;
        sent[i] = lanes[i].marks.accepted;
        ++cuts;
        if (sent[i] > 0) {
          const Schedule::Cut& cut = schedule.lanes[i][sent[i] - 1];
          Submit(lanes[i], MakeChunk(sent[i], cut.place, cut.tokens, generation));
        }
      }
      if (sent[i] == schedule.lanes[i].size()) continue;
      const Schedule::Cut& cut = schedule.lanes[i][sent[i]++];
      Submit(lanes[i], MakeChunk(sent[i], cut.place, cut.tokens, generation));
      --left;
    }
    engine_->WaitIdle();
    ASSERT_EQ(engine_->counters().chunks_rejected, 0U);
    ASSERT_TRUE(SameBits(Flush(), expected));
    ASSERT_TRUE(engine_->CloseSession(session).ok());
  }
  EXPECT_GT(cuts, 100);
}

TEST_F(DeterministicTest, WithoutItTheBitsDependOnTheCuts) {
  // What the test above would be worth little without.
  std::vector<std::vector<float>> gradients;
  for (const int64_t most : {kMostTokens, int64_t{5}}) {
    const std::string session =
        engine_->OpenSession("h", {"c" + std::to_string(most), 0, 1})->info.session_id;
    const LaneAttachment lane = Attach(session);
    uint64_t sequence = 1;
    for (int64_t place = 0; place < kTokens;) {
      const int64_t tokens = std::min(most, EndOfOptions(place) - place);
      Submit(lane, MakeChunk(sequence++, place, tokens, head_->Info().generation));
      place += tokens;
    }
    engine_->WaitIdle();
    gradients.push_back(Flush());
  }
  EXPECT_FALSE(SameBits(gradients[0], gradients[1]));
}

TEST_F(DeterministicTest, GradientsOfSessionsAreAddedInTheOrderOfTheirRanks) {
  std::vector<std::vector<float>> gradients;
  for (const bool reversed : {false, true}) {
    Create({});
    std::vector<std::string> sessions(3);
    for (int32_t i = 0; i < 3; ++i) {
      const int32_t rank = reversed ? 2 - i : i;
      sessions[static_cast<size_t>(rank)] = Open("client " + std::to_string(rank), rank);
    }
    if (reversed) std::reverse(sessions.begin(), sessions.end());
    for (int32_t i = 0; i < 3; ++i) {
      const int64_t rank = reversed ? 2 - i : i;
      SendInOrder(Attach(sessions[static_cast<size_t>(i)]), 40 + 30 * rank);
    }
    engine_->WaitIdle();
    gradients.push_back(Flush());
  }
  EXPECT_TRUE(SameBits(gradients[0], gradients[1]));
}

TEST_F(DeterministicTest, RanksMustDiffer) {
  Open("first", 4);
  const absl::Status status = TryOpen("second", 4).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("rank is 4"));
  EXPECT_THAT(status.message(), HasSubstr("'first'"));
  EXPECT_THAT(status.message(), HasSubstr("'second'"));
  EXPECT_TRUE(engine_->OpenSession("h", {"another kind", 4, 1}).ok()) << "whose dW is the head's";
  EXPECT_TRUE(TryOpen("first", 4).ok()) << "is the same session";
  EXPECT_TRUE(TryOpen("second", 5).ok());
}

TEST_F(DeterministicTest, ASessionIsDeterministicOrNot) {
  Open("c", 0);
  EXPECT_EQ(engine_->OpenSession("h", {"c", 0, 1}).status().code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(engine_->OpenSession("h", {"d", 1, 1}).ok());
  const absl::Status status = TryOpen("d", 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("deterministic is true"));
}

TEST_F(DeterministicTest, EveryPlaceIsTakenOnceAndARefusedChunkAddsNothing) {
  const LaneAttachment lane = Attach(Open("c", 0));
  ChunkAnswer answer = AnswerOf(lane, MakeChunk(1, 10, 10));
  EXPECT_TRUE(answer.error.ok()) << answer.error;
  for (const auto& [place, tokens] :
       {std::pair<int64_t, int64_t>{10, 10}, {19, 1}, {5, 6}, {0, 16}, {12, 3}}) {
    answer = AnswerOf(lane, MakeChunk(answer.sequence + 1, place, tokens));
    EXPECT_EQ(answer.error.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(FieldOf(answer.error), "window_token");
  }
  Chunk chunk = MakeChunk(answer.sequence + 1, 40, 1);
  chunk.window_token.reset();
  answer = AnswerOf(lane, std::move(chunk));
  EXPECT_EQ(answer.error.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(answer.error.message(), HasSubstr("window_token is not set"));
  chunk = MakeChunk(answer.sequence + 1, 40, 1);
  chunk.window_token = -1;
  answer = AnswerOf(lane, std::move(chunk));
  EXPECT_EQ(answer.error.code(), absl::StatusCode::kInvalidArgument);
  chunk = MakeChunk(answer.sequence + 1, 40, 1);
  chunk.mode = ComputeMode::kLossOnly;
  chunk.window_token.reset();
  answer = AnswerOf(lane, std::move(chunk));
  EXPECT_TRUE(answer.error.ok()) << "adds nothing, and has no place: " << answer.error;
  answer = AnswerOf(lane, MakeChunk(answer.sequence + 1, 0, 10));
  EXPECT_TRUE(answer.error.ok()) << answer.error;
  engine_->WaitIdle();
  const std::vector<float> gradient = Flush();

  Create({});
  const LaneAttachment plain = Attach(Open("c", 0));
  Submit(plain, MakeChunk(1, 0, 16));
  Submit(plain, MakeChunk(2, 16, 4));
  engine_->WaitIdle();
  EXPECT_TRUE(SameBits(Flush(), gradient));
}

TEST_F(DeterministicTest, ChunksWithoutDxHavePlacesAndTheSameBits) {
  const LaneAttachment mixed = Attach(Open("c", 0));
  Chunk chunk = MakeChunk(1, 0, 10);
  chunk.mode = ComputeMode::kLossAndWeightGradient;
  const ChunkAnswer answer = AnswerOf(mixed, std::move(chunk));
  EXPECT_TRUE(answer.error.ok()) << answer.error;
  EXPECT_EQ(answer.dx.size(), 0);
  EXPECT_GT(AnswerOf(mixed, MakeChunk(2, 10, 10)).dx.size(), 0);  // in the same tile
  chunk = MakeChunk(3, 5, 5);
  chunk.mode = ComputeMode::kLossAndWeightGradient;
  EXPECT_EQ(AnswerOf(mixed, std::move(chunk)).error.code(), absl::StatusCode::kInvalidArgument)
      << "these places are taken";
  engine_->WaitIdle();
  const std::vector<float> gradient = Flush();

  Create({});
  const LaneAttachment plain = Attach(Open("c", 0));
  Submit(plain, MakeChunk(1, 0, 16));
  Submit(plain, MakeChunk(2, 16, 4));
  engine_->WaitIdle();
  EXPECT_TRUE(SameBits(Flush(), gradient));
}

TEST_F(DeterministicTest, ThePlaceOfAChunkThatWasWithdrawnIsFreeAgain) {
  const std::string session = Open("c", 0);
  for (int i = 0; i < 50; ++i) {
    // Whether it was started or not: sent again under its number, it lands once.
    const LaneAttachment lane = Attach(session);
    Submit(lane, MakeChunk(1, 0, 16));
    head_->DetachLane(lane);
  }
  const LaneAttachment lane = Attach(session);
  const ChunkAnswer answer = AnswerOf(lane, MakeChunk(1, 0, 16));
  EXPECT_TRUE(answer.error.ok()) << answer.error;
  engine_->WaitIdle();
  EXPECT_EQ(head_->Info().window_tokens, 14U);
}

TEST_F(DeterministicTest, TheMemoryIsReservedWithTheSessionAndRefusedWithATable) {
  const int64_t without = engine_->budget().reserved();
  const std::string session = Open("c", 0);
  const int64_t with = engine_->budget().reserved();
  EXPECT_GE(with - without, kVocab * kHidden * 4);
  EXPECT_EQ(TotalBytes(head_->Info().memory) + (1 << 20), with);
  ASSERT_TRUE(engine_->CloseSession(session).ok());
  engine_->WaitIdle();
  EXPECT_EQ(engine_->budget().reserved(), without) << "it had contributed nothing";

  Create({}, with - 1);
  const absl::Status status = TryOpen("c", 0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("a deterministic session of head h"));
  EXPECT_THAT(status.message(), HasSubstr("gradient"));
  EXPECT_TRUE(engine_->OpenSession("h", {"c", 0, 1}).ok());
}

TEST_F(DeterministicTest, WhatAClosedSessionAddedIsFlushedAndItsMemoryThenGivenBack) {
  const int64_t without = engine_->budget().reserved();
  const std::string session = Open("c", 0);
  SendInOrder(Attach(session));
  engine_->WaitIdle();
  ASSERT_TRUE(engine_->CloseSession(session).ok());
  engine_->WaitIdle();
  EXPECT_GT(engine_->budget().reserved(), without);
  const std::vector<float> gradient = Flush();
  engine_->WaitIdle();
  EXPECT_EQ(engine_->budget().reserved(), without);
  SendInOrder(Attach(Open("c", 0)), kTokens, 2);
  engine_->WaitIdle();
  EXPECT_TRUE(SameBits(Flush(), gradient));
}

TEST_F(DeterministicTest, AFlushThatIsAbortedChangesNothingAndTheNextWindowBeginsAnew) {
  const LaneAttachment lane = Attach(Open("c", 0));
  const uint64_t next = SendInOrder(lane);
  engine_->WaitIdle();
  const absl::StatusOr<FlushInfo> aborted = BeginFlush();
  ASSERT_TRUE(aborted.ok()) << aborted.status();
  const std::vector<float> gradient = Read(*aborted);
  EXPECT_TRUE(SameBits(Read(*aborted), gradient));
  ASSERT_TRUE(AbortFlush(*head_, aborted->flush_id).ok());
  const absl::StatusOr<FlushInfo> flush = BeginFlush();
  ASSERT_TRUE(flush.ok()) << flush.status();
  EXPECT_TRUE(SameBits(Read(*flush), gradient));
  EXPECT_EQ(flush->stats.norm, aborted->stats.norm);
  EXPECT_EQ(flush->window_tokens, aborted->window_tokens);
  ASSERT_TRUE(CommitFlush(*head_, flush->flush_id).ok());
  SendInOrder(lane, kTokens, 2, next);
  engine_->WaitIdle();
  EXPECT_TRUE(SameBits(Flush(), gradient));
}

TEST_F(DeterministicTest, RowsAreAddedWithTheWeightsTheyWereAnsweredWith) {
  const LaneAttachment lane = Attach(Open("c", 0));
  Submit(lane, MakeChunk(1, 0, 10));
  engine_->WaitIdle();
  Write(5);
  Submit(lane, MakeChunk(2, 10, 10));
  engine_->WaitIdle();
  const std::vector<float> gradient = Flush();
  Create({});
  const std::string session = engine_->OpenSession("h", {"c", 0, 1})->info.session_id;
  const LaneAttachment eager = Attach(session);
  Submit(eager, MakeChunk(1, 0, 10));
  engine_->WaitIdle();
  Write(5);
  Submit(eager, MakeChunk(2, 10, 6));
  Submit(eager, MakeChunk(3, 16, 4));
  engine_->WaitIdle();
  EXPECT_TRUE(SameBits(Flush(), gradient));
}

TEST_F(DeterministicTest, AFarPlaceIsRefusedWhereNothingElseCanComeAndWaitsWhereALaneCanBringWhatIsMissing) {
  Create({}, int64_t{1} << 30, kMostTokens * kHidden * 4);
  const LaneAttachment alone = Attach(Open("alone", 0));
  ChunkAnswer answer;
  uint64_t sequence = 0;
  for (int64_t place = 100; place < 10000 && answer.error.ok(); place += kMostTokens) {
    answer = AnswerOf(alone, MakeChunk(++sequence, place, kMostTokens));
  }
  EXPECT_EQ(answer.error.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_GT(sequence, 3U);
  EXPECT_TRUE(AnswerOf(alone, MakeChunk(++sequence, 0, kMostTokens)).error.ok()) << "always has room";

  const std::string session = Open("two", 1, 2);
  const LaneAttachment near = Attach(session, 1);
  const LaneAttachment far = Attach(session, 0);
  const std::shared_ptr<RecordingListener> listener = listeners_.back();
  int64_t place = kMostTokens;
  sequence = 0;
  std::promise<void> resumed;
  Chunk held;
  for (;; place += kMostTokens) {
    ASSERT_LT(place, 10000);
    held = MakeChunk(++sequence, place, kMostTokens);
    const absl::StatusOr<Head::Submission> taken = head_->Submit(far, held, [&] { resumed.set_value(); });
    ASSERT_TRUE(taken.ok()) << taken.status();
    if (*taken == Head::Submission::kTaken) {
      listener->AwaitAnswers(sequence);
      continue;
    }
    break;
  }
  Submit(near, MakeChunk(1, 0, kMostTokens));
  Await("a waiting lane to be resumed", resumed);
  engine_->WaitIdle();
  Submit(far, std::move(held));
  EXPECT_TRUE(listener->AwaitAnswers(sequence).back().error.ok());
}

TEST_F(DeterministicTest, WhatWasRefusedForItsPlaceIsRefusedWhenItIsSentAgain) {
  const std::string session = Open("c", 0);
  LaneAttachment lane = Attach(session);
  EXPECT_TRUE(AnswerOf(lane, MakeChunk(1, 10, 10)).error.ok());
  EXPECT_FALSE(AnswerOf(lane, MakeChunk(2, 12, 3)).error.ok());  // say that this answer was lost
  head_->DetachLane(lane);
  lane = Attach(session);
  const ChunkAnswer again = AnswerOf(lane, MakeChunk(2, 12, 3));
  EXPECT_EQ(again.disposition, Disposition::kRejected) << "it is in no window";
  EXPECT_EQ(FieldOf(again.error), "window_token");
  EXPECT_EQ(AnswerOf(lane, MakeChunk(1, 10, 10)).disposition, Disposition::kRepeated);
}

TEST_F(DeterministicTest, APlaceThatNobodyBringsIsNotWaitedForWithoutEnd) {
  Create({}, int64_t{1} << 30, kMostTokens * kHidden * 4, absl::ZeroDuration());
  const LaneAttachment far = Attach(Open("two", 1, 2));  // whose other lane never comes
  ChunkAnswer answer;
  uint64_t sequence = 0;
  for (int64_t place = kMostTokens; place < 10000 && answer.error.ok(); place += kMostTokens) {
    answer = AnswerOf(far, MakeChunk(++sequence, place, kMostTokens));
  }
  EXPECT_EQ(answer.error.code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(DeterministicTest, AWaitForAPlaceEndsWithTheLook) {
  Create({}, int64_t{1} << 30, kMostTokens * kHidden * 4, absl::Milliseconds(200));
  const LaneAttachment far = Attach(Open("two", 1, 2));
  std::atomic<bool> done = false;
  std::thread looking([&] {
    while (!done) {
      engine_->ExpireSessions();
      absl::SleepFor(absl::Milliseconds(5));
    }
  });
  ChunkAnswer answer;
  uint64_t sequence = 0;
  for (int64_t place = kMostTokens; place < 10000 && answer.error.ok(); place += kMostTokens) {
    answer = AnswerOf(far, MakeChunk(++sequence, place, kMostTokens));
  }
  done = true;
  looking.join();
  EXPECT_EQ(answer.error.code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(DeterministicTest, AFrozenHeadTakesItForGranted) {
  HeadConfig frozen;
  frozen.weight_gradients = WeightGradients::kFrozen;
  Create(frozen);
  const int64_t without = engine_->budget().reserved();
  const LaneAttachment lane = Attach(Open("c", 0));
  Open("d", 0);
  EXPECT_EQ(engine_->budget().reserved(), without);
  Chunk chunk = MakeChunk(1, 0, 4);
  chunk.window_token.reset();
  EXPECT_TRUE(AnswerOf(lane, std::move(chunk)).error.ok());
}

TEST_F(DeterministicTest, AClientMayOverwriteItsRegionOnceItHasTheAnswer) {
  Submit(Attach(Open("c", 0)), MakeChunk(1, 0, 10));
  const std::vector<float> expected = Flush();

  Create({});
  const auto region = engine_->regions().Create(RegionKind::kSystem, 1 << 16);
  ASSERT_TRUE(region.ok()) << region.status();
  Chunk chunk = MakeChunk(1, 0, 10);
  std::byte* const memory = (*region)->memory().data();
  Gather(chunk.hidden_states.parts(), memory);
  chunk.hidden_states = {};
  chunk.hidden_region = TensorRef{(*region)->handle(), 0};
  ASSERT_TRUE(engine_->regions().Attach((*region)->handle(), 1).ok());
  ASSERT_TRUE(AnswerOf(Attach(Open("c", 0)), std::move(chunk)).error.ok());
  std::memset(memory, 0x3C, 1 << 16);  // the chunk does not fill its tile, so that its dW is yet to be made
  EXPECT_TRUE(SameBits(Flush(), expected));
}

TEST_F(DeterministicTest, ADeletedHeadGivesEverythingBack) {
  SendInOrder(Attach(Open("c", 0)));
  std::promise<void> released;
  ASSERT_TRUE(engine_->DeleteHead("h", Engine::DiscardGradient::kYes, [&] { released.set_value(); }).ok());
  Await("the head to be released", released);
  EXPECT_EQ(engine_->budget().reserved(), 1 << 20) << "the device's own";
}

TEST_F(DeterministicTest, StatsInTheMiddleOfAWindowLeaveNoTraceInIt) {
  SendInOrder(Attach(Open("a", 0)));
  const std::vector<float> undisturbed = Flush();
  Create({});
  const LaneAttachment lane = Attach(Open("a", 0));
  const auto ask = [&](std::vector<SessionMarks> marks) {
    std::promise<absl::StatusOr<Head::WindowStats>> answer;
    head_->ReadStats(1, std::move(marks), 1,
                     [&](absl::StatusOr<Head::WindowStats> stats) { answer.set_value(std::move(stats)); });
    return Await("the answer", answer);
  };
  const uint64_t next = SendInOrder(lane, 40);
  ASSERT_TRUE(ask({}).ok());
  std::vector<SessionMarks> wrong = head_->Info().window_marks;
  ++wrong[0].lanes[0].accepted;
  EXPECT_FALSE(ask(wrong).ok());
  uint64_t sequence = next;
  for (int64_t place = 40; place < kTokens;) {
    const int64_t end = std::min({place + kMostTokens, EndOfOptions(place), kTokens});
    Submit(lane, MakeChunk(sequence++, place, end - place));
    place = end;
  }
  const absl::StatusOr<Head::WindowStats> whole = ask(head_->Info().window_marks);
  ASSERT_TRUE(whole.ok()) << whole.status();
  const absl::StatusOr<FlushInfo> flush = BeginFlush();
  ASSERT_TRUE(flush.ok()) << flush.status();
  EXPECT_TRUE(SameBits(Read(*flush), undisturbed));
  EXPECT_EQ(whole->gradient.norm, flush->stats.norm);
  EXPECT_EQ(whole->window_tokens, flush->window_tokens);
}

}  // namespace
}  // namespace lossd::engine::deterministic_test
