// A flush whose commit may have been done although no answer came, and what the calls behind it make of it;
// and flushes that an exception ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "lossd/client.h"
#include "tests/support/call_recorder.h"
#include "tests/support/session_data.h"
#include "tests/support/session_fixture.h"

namespace lossd::unconfirmed_commit_test {
namespace {

using ::testing::HasSubstr;
using testing::kHidden;
using testing::kVocab;
using testing::SessionTest;

constexpr int kAlways = 1000;

// What becomes of commits until they are to be answered.
enum class Fate { kDone, kNeverArrived, kCancelledOnItsWay };

class UnconfirmedCommitTest : public SessionTest, public ::testing::WithParamInterface<Fate> {
 protected:
  UnconfirmedCommitTest() { server_.config.optimizer.kind = OptimizerKind::kSgd; }
  void SetUp() override {
    Connect({.reconnect_timeout = std::chrono::milliseconds(200)});
    auto session = head_->OpenSession({});
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = std::make_unique<Session>(*std::move(session));
    Fill();
  }

  void Fill() {
    const std::vector<int64_t> labels = {1, 7};
    const std::vector<float> hidden(labels.size() * kHidden, 3.0F);
    ASSERT_TRUE(session_->Compute({.labels = labels, .hidden_states = hidden.data()}, {}).ok());
    marks_ = {session_->marks()};
  }

  void LoseCommits(int count) {
    testing::CallRecorder& recorder = server_.recorder();
    if (GetParam() == Fate::kDone) return recorder.LoseAnswers("CommitFlush", count);
    const bool is_cancelled = GetParam() == Fate::kCancelledOnItsWay;
    recorder.Refuse("CommitFlush", count, is_cancelled ? grpc::Status::CANCELLED : testing::Broken());
  }
  absl::StatusOr<FlushResult> Flush() { return head_->Flush({}, marks_, gradient_.data()); }

  // Flushes the window of SetUp, whose rows arrive and whose commit is not answered.
  void FlushUnanswered() {
    LoseCommits(kAlways);
    const auto flushed = Flush();
    ASSERT_EQ(flushed.status().code(), absl::StatusCode::kUnavailable) << flushed.status();
    flush_id_ = FlushOf(flushed.status()).value_or(FlushResult()).flush_id;
    EXPECT_THAT(std::string(flushed.status().message()), HasSubstr(flush_id_));
    ExpectFlush(flushed.status());
    ASSERT_GT(gradient_.at(kHidden), 0);
    gradient_.assign(gradient_.size(), -1.0F);
  }

  // The status tells which flush it is about.
  void ExpectFlush(const absl::Status& status) const {
    const std::optional<FlushResult> flush = FlushOf(status);
    ASSERT_TRUE(flush.has_value()) << status;
    EXPECT_NE(flush_id_, "");
    EXPECT_EQ(flush->flush_id, flush_id_);
    EXPECT_EQ(flush->generation, 1U);
    EXPECT_EQ(flush->rows, kVocab);
    EXPECT_EQ(flush->norm, 1.5);
  }
  void ExpectSettled(const absl::Status& status) const {
    ExpectFlush(status);
    EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(flush_id_));
    EXPECT_THAT(std::string(status.message()), HasSubstr("generation 1"));
  }

  std::unique_ptr<Session> session_;
  std::string flush_id_;
  std::vector<SessionMarks> marks_;
  std::vector<float> gradient_ = std::vector<float>(kVocab * kHidden);
};

TEST_P(UnconfirmedCommitTest, TheSameFlushAgainSaysThatItIsDoneAndReadsNothing) {
  FlushUnanswered();
  LoseCommits(0);
  ExpectSettled(Flush().status());
  EXPECT_EQ(gradient_.front(), -1) << "a window was read into it";
  EXPECT_EQ(server_.generation(), 2U);
  EXPECT_EQ(server_.window_state(), v1::WINDOW_STATE_OPEN);
  // The window behind it is as any other.
  Fill();
  const auto next = Flush();
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->generation, 2U);
  EXPECT_EQ(server_.generation(), 3U);
}

TEST_P(UnconfirmedCommitTest, AnotherHandleOfTheHeadKnowsOfItToo) {
  FlushUnanswered();
  LoseCommits(0);
  auto other = client_->GetHead(testing::kHeadName);
  ASSERT_TRUE(other.ok()) << other.status();
  ASSERT_TRUE(other->OpenSession({}).ok());
  ExpectSettled(other->Flush({}, marks_, gradient_.data()).status());
  EXPECT_EQ(gradient_.front(), -1) << "a window was read into it";
  EXPECT_EQ(server_.observed().flushes.size(), 1U);
}

// The other handle's first session is what it learns of the server from.
TEST_P(UnconfirmedCommitTest, AHandleThatComesToTheServerLaterForgetsNothing) {
  auto other = client_->GetHead(testing::kHeadName);
  ASSERT_TRUE(other.ok()) << other.status();
  FlushUnanswered();
  LoseCommits(0);
  ASSERT_TRUE(other->OpenSession({}).ok());
  ExpectSettled(Flush().status());
  EXPECT_EQ(server_.observed().flushes.size(), 1U);
}

TEST_P(UnconfirmedCommitTest, AsLongAsThereIsNoAnswerNothingElseHappens) {
  FlushUnanswered();
  EXPECT_EQ(Flush().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(head_->Discard(marks_).status().code(), absl::StatusCode::kUnavailable);
  LoseCommits(0);
  ExpectSettled(Flush().status());
  EXPECT_EQ(server_.observed().flushes.size(), 1U);
}

TEST_P(UnconfirmedCommitTest, TheSameDiscardAgainAnswersAsTheFirstWouldHave) {
  LoseCommits(kAlways);
  const absl::Status unanswered = head_->Discard(marks_).status();
  ASSERT_EQ(unanswered.code(), absl::StatusCode::kUnavailable);
  const auto open = FlushOf(unanswered);
  ASSERT_TRUE(open.has_value()) << unanswered;
  LoseCommits(0);
  const auto dropped = head_->Discard(marks_);
  ASSERT_TRUE(dropped.ok()) << dropped.status();
  EXPECT_EQ(dropped->flush_id, open->flush_id);
  EXPECT_EQ(dropped->generation, 1U);
  EXPECT_EQ(server_.generation(), 2U);
  EXPECT_TRUE(head_->Discard({}).ok());
  EXPECT_EQ(server_.generation(), 3U);
}

// A frozen window takes no chunks, so this is about commits that were done.
class CommitDoneTest : public UnconfirmedCommitTest {};

TEST_P(CommitDoneTest, ChunksSinceAreNotDroppedAndNotReadUnasked) {
  for (const bool discard : {false, true}) {
    LoseCommits(kAlways);
    const absl::Status unanswered = Flush().status();
    ASSERT_EQ(unanswered.code(), absl::StatusCode::kUnavailable);
    const auto open = FlushOf(unanswered);
    ASSERT_TRUE(open.has_value()) << unanswered;
    LoseCommits(0);
    Fill();
    const std::vector<float> window = server_.window();
    const uint64_t generation = server_.generation();
    const auto settled = discard ? head_->Discard(marks_) : Flush();
    EXPECT_EQ(settled.status().code(), absl::StatusCode::kAlreadyExists) << settled.status();
    EXPECT_THAT(std::string(settled.status().message()), HasSubstr(open->flush_id));
    EXPECT_EQ(server_.generation(), generation);
    EXPECT_EQ(server_.window(), window);
  }
  ASSERT_TRUE(Flush().ok());
}

TEST_P(CommitDoneTest, AStepIsOfNoOtherWindowThanTheCallerThinks) {
  FlushUnanswered();
  LoseCommits(0);
  Fill();
  const auto unasked = head_->ApplyStep({.learning_rate = 1}, marks_);
  ExpectSettled(unasked.status());
  EXPECT_EQ(server_.generation(), 2U);
  const auto step = head_->ApplyStep({.learning_rate = 1}, marks_);
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->generation, 3U);
}

TEST_P(CommitDoneTest, AStepOfAWindowThatIsNamedGoesOn) {
  FlushUnanswered();
  LoseCommits(0);
  Fill();
  const auto step = head_->ApplyStep({.learning_rate = 1, .generation = 2}, marks_);
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->generation, 3U);
  ASSERT_TRUE(head_->Discard({}).ok()) << "nothing is open any more";
}

TEST_P(CommitDoneTest, ACallerThatCommitsByIdIsToldNoMore) {
  FlushUnanswered();
  LoseCommits(0);
  ASSERT_TRUE(head_->CommitFlush(flush_id_).ok());
  Fill();
  const auto next = Flush();
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->generation, 2U);
}

INSTANTIATE_TEST_SUITE_P(DoneOrNot, UnconfirmedCommitTest,
                         ::testing::Values(Fate::kDone, Fate::kNeverArrived, Fate::kCancelledOnItsWay));
INSTANTIATE_TEST_SUITE_P(Done, CommitDoneTest, ::testing::Values(Fate::kDone));

// What began without an answer

TEST_P(CommitDoneTest, AFlushWhoseBeginningWasNotAnsweredDoesNotKeepTheWindow) {
  const std::vector<float> window = server_.window();
  server_.recorder().LoseAnswers("BeginFlush", kAlways);
  ASSERT_EQ(Flush().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(server_.window_state(), v1::WINDOW_STATE_FROZEN);
  server_.recorder().LoseAnswers("BeginFlush", 0);
  // Another flush than that one, which it would join.
  const auto other = head_->Flush({.gradient_scale = 2}, marks_, gradient_.data());
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(gradient_.at(kHidden), 2 * window.at(kHidden));
  EXPECT_EQ(server_.observed().aborts, 1);
}

// What is not confirmed by the caller

TEST_P(CommitDoneTest, AFlushThatIsNotConfirmedLeavesTheWindowWhole) {
  const std::vector<float> window = server_.window();
  for (const bool commit : {true, false}) {
    const int aborts = server_.observed().aborts;
    const auto refused =
        head_->Flush({.commit = commit, .confirm = [] { return false; }}, marks_, gradient_.data());
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kCancelled) << refused.status();
    EXPECT_FALSE(FlushOf(refused.status()).has_value());
    EXPECT_EQ(server_.observed().aborts, aborts + 1);
    EXPECT_EQ(server_.window_state(), v1::WINDOW_STATE_OPEN);
    EXPECT_EQ(server_.window(), window);
  }
  const auto confirmed = head_->Flush({.confirm = [] { return true; }}, marks_, gradient_.data());
  ASSERT_TRUE(confirmed.ok()) << confirmed.status();
  EXPECT_EQ(server_.generation(), 2U);
}

// Exceptions

class FlushExceptionTest : public UnconfirmedCommitTest {
 protected:
  void ExpectReopenedAfter(const FlushOptions& options) {
    void* gradient = options.sink ? nullptr : gradient_.data();
    const std::vector<float> window = server_.window();
    EXPECT_THROW((void)head_->Flush(options, marks_, gradient), std::runtime_error);
    EXPECT_EQ(server_.observed().aborts, 1);
    EXPECT_EQ(server_.window_state(), v1::WINDOW_STATE_OPEN);
    EXPECT_EQ(server_.window(), window);
  }
};

TEST_P(FlushExceptionTest, OfASinkReopensTheWindow) {
  ExpectReopenedAfter({.sink = [](int64_t /*first_row*/, int64_t /*rows*/, const void* /*gradient*/,
                                  std::span<const float> /*bias*/) -> absl::Status {
    throw std::runtime_error("of the sink");
  }});
}

TEST_P(FlushExceptionTest, OfOnFrozenReopensTheWindow) {
  ExpectReopenedAfter({.on_frozen = [] { throw std::runtime_error("of on_frozen"); }});
}

TEST_P(FlushExceptionTest, OfProgressReopensTheWindow) {
  ExpectReopenedAfter(
      {.progress = [](int64_t /*done*/, int64_t /*total*/) { throw std::runtime_error("of progress"); }});
}

TEST_P(FlushExceptionTest, OfConfirmReopensTheWindow) {
  ExpectReopenedAfter({.confirm = []() -> bool { throw std::runtime_error("of confirm"); }});
}

INSTANTIATE_TEST_SUITE_P(Exceptions, FlushExceptionTest, ::testing::Values(Fate::kDone));

}  // namespace
}  // namespace lossd::unconfirmed_commit_test
