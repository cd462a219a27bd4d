// Head::Logits: what is refused, the calls that rows are asked for in, and what these have in common, also at
// a server that does not stay the same between two of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/session_data.h"
#include "tests/support/session_fixture.h"

namespace lossd::testing::logits_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class LogitsTest : public SessionTest {
 protected:
  // Reads the logits of five rows.
  absl::StatusOr<uint64_t> Read(uint64_t weight_version = 0) {
    if (head_ == nullptr) Connect();
    const std::vector<float> hidden(5 * kHidden, 1.0F);
    logits_.assign(5 * kVocab, 0.0F);
    return head_->Logits({.rows = 5, .hidden_states = hidden.data(), .weight_version = weight_version},
                         {.logits = logits_.data()});
  }
  std::vector<float> logits_;
};

TEST_F(LogitsTest, ACallHasAsManyRowsAsTheServerTakes) {
  server_.options.engine.chunk_limits.max_chunk_tokens = 2;
  std::vector<float> weights(kVocab * kHidden);
  for (int64_t row = 0; row < kVocab; ++row) weights[static_cast<size_t>(row * kHidden)] = 1;
  server_.set_weights(weights);
  ASSERT_TRUE(Read().ok());
  EXPECT_THAT(server_.observed().logits_rows, ElementsAre(2, 2, 1));
  EXPECT_THAT(logits_, Each(1.0F));
}

TEST_F(LogitsTest, MoreElementsThanAnyArrayHasAreRefused) {
  Connect();
  const std::vector<float> hidden(kHidden);
  std::vector<int32_t> tokens(8);  // as many as the product would be, had it come round to 8 again
  const int64_t rows = std::numeric_limits<int64_t>::max() / 4 + 2;
  const auto version =
      head_->Logits({.rows = rows, .hidden_states = hidden.data()}, {.top_k = 8, .top_tokens = tokens});
  EXPECT_EQ(version.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(version.status().message()), HasSubstr("rows is 2305843009213693953 and top_k 8"));
}

TEST_F(LogitsTest, AServerThatStartedAgainMeanwhileIsAskedForAllRows) {
  server_.options.engine.chunk_limits.max_chunk_tokens = 2;
  server_.set_weights(std::vector<float>(kVocab * kHidden, 1));
  server_.recorder().before_call = [this](const std::string& method, int number) {
    if (method == "Logits" && number == 3) server_.Restart();  // with weights that are all 0
  };
  ASSERT_TRUE(Read().ok());
  const std::vector<int64_t> rows = server_.observed().logits_rows;
  ASSERT_GE(rows.size(), 6U) << "the third call may have been made again";
  EXPECT_THAT(std::vector<int64_t>(rows.end() - 3, rows.end()), ElementsAre(2, 2, 1));
  EXPECT_THAT(logits_, Each(0.0F));
}

TEST_F(LogitsTest, SoIsOneThatRestoredACheckpointThoughTheVersionIsTheSame) {
  server_.options.engine.chunk_limits.max_chunk_tokens = 2;
  int calls = 0;
  server_.recorder().Edit<v1::LogitsResponse>("Logits", [&calls](auto* response) {
    if (++calls >= 2) response->set_restores(1);
  });
  ASSERT_TRUE(Read(/*weight_version=*/1).ok());
  EXPECT_THAT(server_.observed().logits_rows, ElementsAre(2, 2, 2, 2, 1));
}

}  // namespace
}  // namespace lossd::testing::logits_test
