// Sessions of a head with two gradients when a flush is given up behind an answer that was lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/client/session_fixture.h"

namespace lossd::testing::double_buffer_test {
namespace {

class ClientDoubleBufferTest : public SessionTest {
 protected:
  ClientDoubleBufferTest() { fake_.double_buffer = true; }

  std::vector<float> gradient_ = std::vector<float>(FakeServer::kVocab * kHidden);
};

TEST_F(ClientDoubleBufferTest, AnAbortBehindALostAnswerCountsEveryChunkOnce) {
  Session session = Open();
  Data data(4);
  Data during(10, 2);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  const SessionMarks marks = session.marks();
  const auto flushed = head_->Flush({.commit = false}, {&marks, 1}, gradient_.data());
  ASSERT_TRUE(flushed.ok()) << flushed.status();
  fake_.on_chunk = [](uint64_t sequence, int attempt) {
    if (sequence == 4 && attempt == 0) return Fate::kCutBeforeAnswer;
    return sequence == 4 && attempt == 1 ? Fate::kAbortBefore : Fate::kTake;
  };
  const auto result = session.Compute(during.batch(), during.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  std::vector<float> window = data.Window();
  during.AddTo(&window, 0, 10);
  EXPECT_EQ(fake_.window(), window);
  during.ExpectOutputs();
}

}  // namespace
}  // namespace lossd::testing::double_buffer_test
