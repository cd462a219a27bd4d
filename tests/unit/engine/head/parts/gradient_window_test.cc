#include "server/engine/head/parts/gradient_window.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/time/time.h"

namespace lossd::engine::gradient_window_test {
namespace {

using Turn = GradientWindow::Turn;
using ::testing::HasSubstr;

const std::vector<SessionMarks> kMarks = {{"s", {{0, 3, 0}}}};
const std::vector<SessionMarks> kOtherMarks = {{"s", {{0, 2, 0}}}};

FlushInfo Flush(const std::string& id) {
  FlushInfo info;
  info.flush_id = id;
  return info;
}

// Seals the window by a flush of this id.
void SealBy(GradientWindow& window, const std::string& id) {
  window.BeginFlush(kMarks, {"f", 1.0f}, [](const auto&) {});
  absl::StatusOr<FlushInfo> answer = Flush(id);
  (void)window.Seal(&answer);
}

TEST(GradientWindow, AnOpenWindowTakesItsOwnGenerationAlone) {
  const GradientWindow window(Gradients::kOne);
  EXPECT_EQ(window.TurnOf(1), Turn::kNow);
  EXPECT_EQ(window.TurnOf(2), Turn::kNever);
  EXPECT_EQ(window.TurnOf(0), Turn::kNever);
}

TEST(GradientWindow, WhileItIsSealedChunksOfThisAndTheNextWait) {
  GradientWindow window(Gradients::kTwo);
  window.BeginFlush(kMarks, {"f", 1.0f}, [](const auto&) {});
  EXPECT_EQ(window.TurnOf(1), Turn::kWait) << "the flush may yet fail";
  EXPECT_EQ(window.TurnOf(2), Turn::kWait);
  EXPECT_EQ(window.TurnOf(3), Turn::kNever);
}

TEST(GradientWindow, ASealedWindowLetsTheNextBeginOnlyIfThereIsASecondGradient) {
  for (const Gradients gradients : {Gradients::kOne, Gradients::kTwo}) {
    GradientWindow window(gradients);
    SealBy(window, "f");
    EXPECT_EQ(window.TurnOf(1), Turn::kNever);
    EXPECT_EQ(window.TurnOf(2), gradients == Gradients::kTwo ? Turn::kNext : Turn::kWait);
  }
}

TEST(GradientWindow, ACommitChangesTheGradientAndKeepsWhatTheNextWindowHasTaken) {
  GradientWindow window(Gradients::kTwo);
  window.Count(1, 5, absl::UnixEpoch());
  SealBy(window, "f");
  window.Count(2, 7, absl::UnixEpoch() + absl::Seconds(1));
  EXPECT_EQ(window.tokens(), 5U);
  EXPECT_FALSE(window.InSecond(1));
  EXPECT_TRUE(window.InSecond(2));
  window.Commit();
  EXPECT_EQ(window.generation(), 2U);
  EXPECT_EQ(window.tokens(), 7U);
  EXPECT_TRUE(window.InSecond(2));
  EXPECT_EQ(window.since(), absl::UnixEpoch() + absl::Seconds(1));
}

TEST(GradientWindow, AnAbortTakesBackWhatTheNextWindowHasTaken) {
  GradientWindow window(Gradients::kTwo);
  window.Count(1, 5, absl::UnixEpoch());
  SealBy(window, "f");
  window.Count(2, 7, absl::UnixEpoch() + absl::Seconds(1));
  window.Abort();
  EXPECT_EQ(window.generation(), 1U);
  EXPECT_EQ(window.tokens(), 12U);
  EXPECT_EQ(window.state(), WindowState::kOpen);
  EXPECT_FALSE(window.InSecond(1));
}

TEST(GradientWindow, TheSameFlushAgainWaitsWithTheFirstAndGetsItsAnswer) {
  GradientWindow window(Gradients::kOne);
  int answered = 0;
  FlushCallback done = [&answered](const absl::StatusOr<FlushInfo>& info) { answered += info.ok() ? 1 : 0; };
  window.BeginFlush(kMarks, {"f", 2.0f}, done);
  FlushCallback again = done;
  EXPECT_FALSE(window.JoinFlush(kMarks, 2.0f, again).has_value());
  absl::StatusOr<FlushInfo> answer = Flush("f");
  for (const FlushCallback& waiter : window.Seal(&answer)) waiter(answer);
  EXPECT_EQ(answered, 2);
  const auto later = window.JoinFlush(kMarks, 2.0f, done);
  ASSERT_TRUE(later.has_value() && later->ok());
  EXPECT_EQ((*later)->flush_id, "f");
}

TEST(GradientWindow, AFlushWithOtherArgumentsIsToldTheDifference) {
  GradientWindow window(Gradients::kOne);
  window.BeginFlush(kMarks, {"f", 2.0f}, [](const auto&) {});
  FlushCallback done;
  EXPECT_THAT(window.JoinFlush(kOtherMarks, 2.0f, done)->status().message(), HasSubstr("marks"));
  EXPECT_THAT(window.JoinFlush(kMarks, 1.0f, done)->status().message(),
              HasSubstr("gradient_scale 2; this call names 1"));
}

TEST(GradientWindow, AStepAndAFlushDoNotJoinEachOther) {
  GradientWindow stepped(Gradients::kOne);
  stepped.BeginStep(kMarks, StepRequest{}, [](const auto&) {});
  FlushCallback flush;
  EXPECT_THAT(stepped.JoinFlush(kMarks, 1.0f, flush)->status().message(), HasSubstr("consumed by a step"));
  GradientWindow flushed(Gradients::kOne);
  SealBy(flushed, "f");
  StepCallback step;
  EXPECT_THAT(flushed.JoinStep(kMarks, StepRequest{}, step)->status().message(),
              HasSubstr("sealed by a flush"));
}

TEST(GradientWindow, AStepThatWasTakenIsRememberedAndOneThatFailedIsNot) {
  GradientWindow window(Gradients::kOne);
  window.Count(1, 9, absl::UnixEpoch());
  window.BeginStep(kMarks, StepRequest{.learning_rate = 0.5}, [](const auto&) {});
  absl::StatusOr<StepResult> failed = absl::InternalError("lost");
  EXPECT_EQ(window.EndStep(&failed).size(), 1U);
  EXPECT_EQ(window.state(), WindowState::kOpen);
  EXPECT_FALSE(window.RepeatedStep(1, kMarks, StepRequest{.learning_rate = 0.5}).has_value());

  window.BeginStep(kMarks, StepRequest{.learning_rate = 0.5}, [](const auto&) {});
  absl::StatusOr<StepResult> taken = StepResult{};
  (void)window.EndStep(&taken);
  EXPECT_EQ(taken->generation, 2U);
  EXPECT_EQ(window.tokens(), 0U);
  const auto repeated = window.RepeatedStep(1, {}, StepRequest{.learning_rate = 0.5});
  ASSERT_TRUE(repeated.has_value() && repeated->ok()) << "who asks what became of it may name no marks";
  EXPECT_THAT(window.RepeatedStep(1, kMarks, StepRequest{.learning_rate = 0.1})->status().message(),
              HasSubstr("learning_rate"));
}

TEST(GradientWindow, CommitsAndAbortsThatAreRepeatedAreAnsweredAlike) {
  GradientWindow window(Gradients::kOne);
  SealBy(window, "a");
  EXPECT_TRUE(absl::IsAborted(window.CheckCommit("other").status()));
  ASSERT_EQ(*window.CheckAbort("a"), std::nullopt);
  window.Abort();
  EXPECT_EQ(*window.CheckAbort("a"), 1U);
  SealBy(window, "b");
  ASSERT_EQ(*window.CheckCommit("b"), std::nullopt);
  window.Commit();
  EXPECT_EQ(*window.CheckCommit("b"), 2U);
  EXPECT_TRUE(absl::IsAborted(window.CheckCommit("").status())) << "an empty id was never committed";
}

TEST(GradientWindow, ACheckpointOfASealedWindowHasItOpen) {
  GradientWindow window(Gradients::kOne);
  window.BeginFlush(kMarks, {"f", 1.0f}, [](const auto&) {});
  EXPECT_EQ(window.Capture().state, WindowState::kOpen);
  absl::StatusOr<FlushInfo> answer = Flush("f");
  (void)window.Seal(&answer);
  GradientWindow restored(Gradients::kOne);
  restored.Install(window.Capture(), absl::UnixEpoch());
  EXPECT_TRUE(restored.IsSealedBy("f"));
  EXPECT_EQ(restored.flush_since(), absl::UnixEpoch());
}

}  // namespace
}  // namespace lossd::engine::gradient_window_test
