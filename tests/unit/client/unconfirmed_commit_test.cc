// A flush whose commit may have been done although no answer came, and what the calls behind it make of it;
// and flushes that an exception ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "lossd/client.h"
#include "tests/unit/client/fake_server.h"

namespace lossd::unconfirmed_commit_test {
namespace {

using testing::FakeServer;
using ::testing::HasSubstr;

constexpr int kAlways = 1000;

// What becomes of commits until they are to be answered.
enum class Fate { kDone, kNeverArrived, kCancelledOnItsWay };

class UnconfirmedCommitTest : public ::testing::TestWithParam<Fate> {
 protected:
  void SetUp() override {
    auto client = Client::Connect(fake_.target(), {.reconnect_timeout = std::chrono::milliseconds(200)});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    auto head = client_->GetHead(FakeServer::kName);
    ASSERT_TRUE(head.ok()) << head.status();
    head_ = std::make_unique<Head>(*std::move(head));
    auto session = head_->OpenSession({});
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = std::make_unique<Session>(*std::move(session));
    Fill();
  }

  void Fill() {
    const std::vector<int64_t> labels = {1, 7};
    const std::vector<float> hidden(labels.size() * FakeServer::kHidden, 3.0F);
    ASSERT_TRUE(session_->Compute({.labels = labels, .hidden_states = hidden.data()}, {}).ok());
    marks_ = {session_->marks()};
  }

  void LoseCommits(int count) {
    if (GetParam() == Fate::kCancelledOnItsWay) fake_.unreached_commit_code = grpc::StatusCode::CANCELLED;
    (GetParam() == Fate::kDone ? fake_.lost_commits : fake_.unreached_commits) = count;
  }
  absl::StatusOr<FlushResult> Flush() { return head_->Flush({}, marks_, gradient_.data()); }

  // Flushes the window of SetUp, whose rows arrive and whose commit is not answered.
  void FlushUnanswered() {
    LoseCommits(kAlways);
    const auto flushed = Flush();
    ASSERT_EQ(flushed.status().code(), absl::StatusCode::kUnavailable) << flushed.status();
    EXPECT_THAT(std::string(flushed.status().message()), HasSubstr("flush-1"));
    ExpectFlush(flushed.status());
    ASSERT_GT(gradient_.at(FakeServer::kHidden), 0);
    gradient_.assign(gradient_.size(), -1.0F);
  }

  // The status tells which flush it is about.
  static void ExpectFlush(const absl::Status& status) {
    const std::optional<FlushResult> flush = FlushOf(status);
    ASSERT_TRUE(flush.has_value()) << status;
    EXPECT_EQ(flush->flush_id, "flush-1");
    EXPECT_EQ(flush->generation, 1U);
    EXPECT_EQ(flush->rows, FakeServer::kVocab);
    EXPECT_EQ(flush->norm, 1.5);
  }
  static void ExpectSettled(const absl::Status& status) {
    ExpectFlush(status);
    EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("flush-1"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("generation 1"));
  }

  FakeServer fake_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Head> head_;
  std::unique_ptr<Session> session_;
  std::vector<SessionMarks> marks_;
  std::vector<float> gradient_ = std::vector<float>(FakeServer::kVocab * FakeServer::kHidden);
};

TEST_P(UnconfirmedCommitTest, TheSameFlushAgainSaysThatItIsDoneAndReadsNothing) {
  FlushUnanswered();
  LoseCommits(0);
  ExpectSettled(Flush().status());
  EXPECT_EQ(gradient_.front(), -1) << "a window was read into it";
  EXPECT_EQ(fake_.generation(), 2U);
  EXPECT_EQ(fake_.window_state(), v1::WINDOW_STATE_OPEN);
  // The window behind it is as any other.
  Fill();
  const auto next = Flush();
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->generation, 2U);
  EXPECT_EQ(fake_.generation(), 3U);
}

TEST_P(UnconfirmedCommitTest, AnotherHandleOfTheHeadKnowsOfItToo) {
  FlushUnanswered();
  LoseCommits(0);
  auto other = client_->GetHead(FakeServer::kName);
  ASSERT_TRUE(other.ok()) << other.status();
  ASSERT_TRUE(other->OpenSession({}).ok());
  ExpectSettled(other->Flush({}, marks_, gradient_.data()).status());
  EXPECT_EQ(gradient_.front(), -1) << "a window was read into it";
  EXPECT_EQ(fake_.observed().flushes.size(), 1U);
}

// The other handle's first session is what it learns of the server from.
TEST_P(UnconfirmedCommitTest, AHandleThatComesToTheServerLaterForgetsNothing) {
  auto other = client_->GetHead(FakeServer::kName);
  ASSERT_TRUE(other.ok()) << other.status();
  FlushUnanswered();
  LoseCommits(0);
  ASSERT_TRUE(other->OpenSession({}).ok());
  ExpectSettled(Flush().status());
  EXPECT_EQ(fake_.observed().flushes.size(), 1U);
}

TEST_P(UnconfirmedCommitTest, AsLongAsThereIsNoAnswerNothingElseHappens) {
  FlushUnanswered();
  EXPECT_EQ(Flush().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(head_->Discard(marks_).status().code(), absl::StatusCode::kUnavailable);
  LoseCommits(0);
  ExpectSettled(Flush().status());
  EXPECT_EQ(fake_.observed().flushes.size(), 1U);
}

TEST_P(UnconfirmedCommitTest, TheSameDiscardAgainAnswersAsTheFirstWouldHave) {
  LoseCommits(kAlways);
  ASSERT_EQ(head_->Discard(marks_).status().code(), absl::StatusCode::kUnavailable);
  LoseCommits(0);
  const auto dropped = head_->Discard(marks_);
  ASSERT_TRUE(dropped.ok()) << dropped.status();
  EXPECT_EQ(dropped->flush_id, "flush-1");
  EXPECT_EQ(dropped->generation, 1U);
  EXPECT_EQ(fake_.generation(), 2U);
  EXPECT_TRUE(head_->Discard({}).ok());
  EXPECT_EQ(fake_.generation(), 3U);
}

// The fake's frozen window takes no chunks, so this is about commits that were done.
class CommitDoneTest : public UnconfirmedCommitTest {};

TEST_P(CommitDoneTest, ChunksSinceAreNotDroppedAndNotReadUnasked) {
  for (const bool discard : {false, true}) {
    LoseCommits(kAlways);
    const std::string flush_id = "flush-" + std::to_string(fake_.generation());
    ASSERT_EQ(Flush().status().code(), absl::StatusCode::kUnavailable);
    LoseCommits(0);
    Fill();
    const std::vector<float> window = fake_.window();
    const uint64_t generation = fake_.generation();
    const auto settled = discard ? head_->Discard(marks_) : Flush();
    EXPECT_EQ(settled.status().code(), absl::StatusCode::kAlreadyExists) << settled.status();
    EXPECT_THAT(std::string(settled.status().message()), HasSubstr(flush_id));
    EXPECT_EQ(fake_.generation(), generation);
    EXPECT_EQ(fake_.window(), window);
  }
  ASSERT_TRUE(Flush().ok());
}

TEST_P(CommitDoneTest, AStepIsOfNoOtherWindowThanTheCallerThinks) {
  FlushUnanswered();
  LoseCommits(0);
  Fill();
  const auto unasked = head_->ApplyStep({.learning_rate = 1}, marks_);
  ExpectSettled(unasked.status());
  EXPECT_EQ(fake_.generation(), 2U);
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
  ASSERT_TRUE(head_->CommitFlush("flush-1").ok());
  Fill();
  const auto next = Flush();
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->generation, 2U);
}

INSTANTIATE_TEST_SUITE_P(DoneOrNot, UnconfirmedCommitTest,
                         ::testing::Values(Fate::kDone, Fate::kNeverArrived, Fate::kCancelledOnItsWay));
INSTANTIATE_TEST_SUITE_P(Done, CommitDoneTest, ::testing::Values(Fate::kDone));

// What is not confirmed by the caller

TEST_P(CommitDoneTest, AFlushThatIsNotConfirmedLeavesTheWindowWhole) {
  const std::vector<float> window = fake_.window();
  for (const bool commit : {true, false}) {
    const int aborts = fake_.observed().aborts;
    const auto refused =
        head_->Flush({.commit = commit, .confirm = [] { return false; }}, marks_, gradient_.data());
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kCancelled) << refused.status();
    EXPECT_FALSE(FlushOf(refused.status()).has_value());
    EXPECT_EQ(fake_.observed().aborts, aborts + 1);
    EXPECT_EQ(fake_.window_state(), v1::WINDOW_STATE_OPEN);
    EXPECT_EQ(fake_.window(), window);
  }
  const auto confirmed = head_->Flush({.confirm = [] { return true; }}, marks_, gradient_.data());
  ASSERT_TRUE(confirmed.ok()) << confirmed.status();
  EXPECT_EQ(fake_.generation(), 2U);
}

// Exceptions

class FlushExceptionTest : public UnconfirmedCommitTest {
 protected:
  void ExpectReopenedAfter(const FlushOptions& options) {
    void* gradient = options.sink ? nullptr : gradient_.data();
    const std::vector<float> window = fake_.window();
    EXPECT_THROW((void)head_->Flush(options, marks_, gradient), std::runtime_error);
    EXPECT_EQ(fake_.observed().aborts, 1);
    EXPECT_EQ(fake_.window_state(), v1::WINDOW_STATE_OPEN);
    EXPECT_EQ(fake_.window(), window);
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
