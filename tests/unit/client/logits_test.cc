// Head::Logits at a server that does not stay the same between two calls.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "tests/unit/client/session_fixture.h"

namespace lossd::testing::logits_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

class LogitsTest : public SessionTest {
 protected:
  // Reads the logits of five rows.
  absl::StatusOr<uint64_t> Read(uint64_t weight_version = 0) {
    if (head_ == nullptr) Connect();
    const std::vector<float> hidden(5 * kHidden, 1.0F);
    logits_.assign(5 * FakeServer::kVocab, 0.0F);
    return head_->Logits({.rows = 5, .hidden_states = hidden.data(), .weight_version = weight_version},
                         {.logits = logits_.data()});
  }
  std::vector<float> logits_;
};

TEST_F(LogitsTest, AServerThatStartedAgainMeanwhileIsAskedForAllRows) {
  fake_.restart_before_logits = 3;
  const auto version = Read();
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_THAT(fake_.observed().logits_rows, ElementsAre(2, 2, 1, 2, 2, 1));
  EXPECT_THAT(logits_, Each(2.0F));
}

TEST_F(LogitsTest, SoIsOneThatRestoredACheckpointThoughTheVersionIsTheSame) {
  fake_.restore_before_logits = 2;
  ASSERT_TRUE(Read(/*weight_version=*/1).ok());
  EXPECT_THAT(fake_.observed().logits_rows, ElementsAre(2, 2, 2, 2, 1));
  EXPECT_THAT(logits_, Each(2.0F));
}

}  // namespace
}  // namespace lossd::testing::logits_test
