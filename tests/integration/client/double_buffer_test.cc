// Sessions of a head with two gradients while a flush of this process holds the window.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/session_data.h"
#include "tests/support/session_fixture.h"

namespace lossd::testing::double_buffer_test {
namespace {

class ClientDoubleBufferTest : public SessionTest {
 protected:
  ClientDoubleBufferTest() { server_.config.double_buffer = true; }

  std::vector<float> gradient_ = std::vector<float>(kVocab * kHidden);
};

TEST_F(ClientDoubleBufferTest, BatchesOfTheNextWindowAreTakenWhileThisOneIsRead) {
  Session session = Open();
  Data data(4);
  Data next(4, 2);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  const SessionMarks marks = session.marks();
  int frozen = 0;
  FlushOptions options;
  options.on_frozen = [&] {
    ++frozen;
    const auto result = session.Compute(next.batch(), next.outputs());
    EXPECT_TRUE(result.ok()) << result.status();
  };
  const auto flushed = head_->Flush(options, {&marks, 1}, gradient_.data());
  ASSERT_TRUE(flushed.ok()) << flushed.status();
  EXPECT_EQ(frozen, 1);
  EXPECT_EQ(gradient_, data.Window());
  EXPECT_EQ(server_.window(), next.Window());
  EXPECT_EQ(server_.observed().streams, 1) << "nothing was refused";
  EXPECT_EQ(server_.observed().chunks.back().generation(), 2U);
  next.ExpectOutputs();
}

TEST_F(ClientDoubleBufferTest, AfterAnAbortBatchesGoToTheReopenedWindowAgain) {
  Session session = Open();
  Data data(4);
  Data during(4, 2);
  Data after(4, 5);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  const SessionMarks marks = session.marks();
  const auto flushed = head_->Flush({.commit = false}, {&marks, 1}, gradient_.data());
  ASSERT_TRUE(flushed.ok()) << flushed.status();
  ASSERT_TRUE(session.Compute(during.batch(), during.outputs()).ok());
  ASSERT_TRUE(head_->AbortFlush(flushed->flush_id).ok());
  ASSERT_TRUE(session.Compute(after.batch(), after.outputs()).ok());
  std::vector<float> window = data.Window();
  during.AddTo(&window, 0, 4);
  after.AddTo(&window, 0, 4);
  EXPECT_EQ(server_.window(), window);
  EXPECT_EQ(server_.observed().streams, 1) << "nothing was refused";
  EXPECT_EQ(session.marks().lanes[0].accepted, 6U);
}

TEST_F(ClientDoubleBufferTest, AnAbortInTheMiddleOfABatchCountsEveryChunkOnce) {
  Session session = Open();
  Data data(4);
  Data during(10, 2);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  const SessionMarks marks = session.marks();
  const auto flushed = head_->Flush({.commit = false}, {&marks, 1}, gradient_.data());
  ASSERT_TRUE(flushed.ok()) << flushed.status();
  server_.Before(5, [this] {  // chunks 3 and 4 of it are in the second gradient
    server_.AwaitApplied(4);
    server_.Abort();
  });
  const auto result = session.Compute(during.batch(), during.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->repeated_chunks, 0);
  std::vector<float> window = data.Window();
  during.AddTo(&window, 0, 10);
  EXPECT_EQ(server_.window(), window);
  EXPECT_EQ(server_.observed().chunks.back().generation(), 1U);
  during.ExpectOutputs();
}

TEST_F(ClientDoubleBufferTest, AFlushOfAnotherProcessIsFollowedToo) {
  Session session = Open();
  Data data(4);
  Data next(4, 2);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  const SessionMarks marks = session.marks();
  auto other = Client::Connect(server_.target(), {});
  ASSERT_TRUE(other.ok()) << other.status();
  const Head head = *(*other)->GetHead(kHeadName);
  const auto flushed = head.Flush({.commit = false}, {&marks, 1}, gradient_.data());
  ASSERT_TRUE(flushed.ok()) << flushed.status();
  ASSERT_TRUE(session.Compute(next.batch(), next.outputs()).ok());
  EXPECT_EQ(server_.window(), data.Window());
  ASSERT_TRUE(head.AbortFlush(flushed->flush_id).ok());
  ASSERT_TRUE(session.Compute(next.batch(), next.outputs()).ok());
  std::vector<float> window = data.Window();
  next.AddTo(&window, 0, 4);
  next.AddTo(&window, 0, 4);
  EXPECT_EQ(server_.window(), window);
}

TEST_F(ClientDoubleBufferTest, AFlushThatAnotherProcessEndsLeavesNoWrongHint) {
  Session session = Open();
  Data data(4);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  const SessionMarks marks = session.marks();
  const auto flushed = head_->Flush({.commit = false}, {&marks, 1}, gradient_.data());
  ASSERT_TRUE(flushed.ok()) << flushed.status();
  auto other = Client::Connect(server_.target(), {});
  ASSERT_TRUE(other.ok()) << other.status();
  ASSERT_TRUE((*other)->GetHead(kHeadName)->AbortFlush(flushed->flush_id).ok());
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(server_.observed().chunks.back().generation(), 1U);
  EXPECT_EQ(server_.observed().streams, 2) << "refused once";
}

TEST_F(ClientDoubleBufferTest, AnAbortBehindALostAnswerCountsEveryChunkOnce) {
  Session session = Open();
  Data data(4);
  Data during(10, 2);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  const SessionMarks marks = session.marks();
  const auto flushed = head_->Flush({.commit = false}, {&marks, 1}, gradient_.data());
  ASSERT_TRUE(flushed.ok()) << flushed.status();
  server_.recorder().on_chunk = [this](int, uint64_t sequence, int attempt) {
    if (sequence == 4 && attempt == 0) return Fate::kCutBeforeAnswer;
    if (sequence == 4 && attempt == 1) {
      server_.AwaitApplied(4);
      server_.Abort();
    }
    return Fate::kTake;
  };
  const auto result = session.Compute(during.batch(), during.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  std::vector<float> window = data.Window();
  during.AddTo(&window, 0, 10);
  EXPECT_EQ(server_.window(), window);
  during.ExpectOutputs();
}

}  // namespace
}  // namespace lossd::testing::double_buffer_test
