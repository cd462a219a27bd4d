// What a rank may tell its leader of the batches that it holds.
#include "server/engine/group/awaited_answers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace lossd::engine::awaited_answers_test {
namespace {

using ::testing::HasSubstr;

StartBatchCommand BatchOf(int32_t holder, const std::vector<int64_t>& tokens,
                          const WantedReturns& returns = {}) {
  StartBatchCommand command{.head = 1, .teacher = 0, .gradient = 0, .kind = {}, .chunks = {}};
  command.kind.holder = holder;
  command.kind.returns = returns;
  for (const int64_t count : tokens) {
    command.chunks.push_back({.tokens = count, .labels = std::string(static_cast<size_t>(count) * 8, 'l')});
  }
  return command;
}

AnsweredChunk AnswerOf(uint64_t batch, uint32_t chunk, size_t tokens) {
  return {.batch = batch, .chunk = chunk, .losses = std::string(tokens * 4, 'x'), .returns = {}};
}

TEST(AwaitedAnswers, EachHolderAnswersItsOwnBatchesChunkByChunk) {
  AwaitedAnswers answers;
  answers.Start(BatchOf(0, {1}));
  answers.Start(BatchOf(1, {3, 2}));
  answers.Start(BatchOf(2, {4}));
  EXPECT_EQ(answers.started(), 3u);
  // One rank may be ahead of another.
  EXPECT_EQ(answers.Take(2, AnswerOf(3, 0, 4)), absl::OkStatus());
  EXPECT_EQ(answers.Take(1, AnswerOf(2, 0, 3)), absl::OkStatus());
  EXPECT_EQ(answers.Take(1, AnswerOf(2, 1, 2)), absl::OkStatus());
  for (const uint64_t batch : {1, 2, 3}) {
    for (const int32_t rank : {1, 2}) EXPECT_EQ(answers.CheckApplied(rank, batch), absl::OkStatus());
  }
}

TEST(AwaitedAnswers, NobodyAnswersWhatItWasNotAsked) {
  AwaitedAnswers answers;
  answers.Start(BatchOf(0, {1}));
  answers.Start(BatchOf(1, {3, 2}));
  const std::vector<std::pair<int32_t, AnsweredChunk>> wrong = {
      {1, AnswerOf(0, 0, 1)},  // there is no such batch
      {1, AnswerOf(1, 0, 1)},  // the leader holds it
      {1, AnswerOf(3, 0, 1)},  // not yet
      {2, AnswerOf(2, 0, 3)},  // another rank holds it
      {1, AnswerOf(2, 1, 2)},  // the first chunk comes first
      {1, AnswerOf(2, 2, 2)},
  };
  for (const auto& [rank, answer] : wrong) {
    const absl::Status taken = answers.Take(rank, answer);
    EXPECT_EQ(taken.code(), absl::StatusCode::kInternal) << answer.batch << ", " << answer.chunk;
    EXPECT_THAT(std::string(taken.message()), HasSubstr("nobody waits"));
  }
  ASSERT_EQ(answers.Take(1, AnswerOf(2, 0, 3)), absl::OkStatus());
  EXPECT_FALSE(answers.Take(1, AnswerOf(2, 0, 3)).ok()) << "once";
}

TEST(AwaitedAnswers, AnAnswerHasWhatItsTokensWant) {
  const auto taken = [](const WantedReturns& wanted, const AnsweredChunk& answer) {
    AwaitedAnswers answers;
    answers.Start(BatchOf(1, {2}, wanted));
    return answers.Take(1, answer).code();
  };
  EXPECT_EQ(taken({}, AnswerOf(1, 0, 1)), absl::StatusCode::kInternal);
  EXPECT_EQ(taken({}, AnswerOf(1, 0, 3)), absl::StatusCode::kInternal);
  EXPECT_EQ(taken({}, {.batch = 1, .chunk = 0, .losses = "1234567", .returns = {}}),
            absl::StatusCode::kInternal);
  struct Case {
    WantedReturns wanted;
    std::string TokenReturns::*returned;
    size_t values;
  };
  for (const Case& one : std::vector<Case>{{{.log_sum_exp = true}, &TokenReturns::log_sum_exp, 2},
                                           {{.z_loss = true}, &TokenReturns::z_losses, 2},
                                           {{.log_probability = true}, &TokenReturns::log_probabilities, 2},
                                           {{.entropy = true}, &TokenReturns::entropies, 2},
                                           {{.prediction = true}, &TokenReturns::predictions, 2},
                                           {{.target_rank = true}, &TokenReturns::target_ranks, 2},
                                           {{.divergence = true}, &TokenReturns::divergences, 2}}) {
    AnsweredChunk answer = AnswerOf(1, 0, 2);
    EXPECT_EQ(taken(one.wanted, answer), absl::StatusCode::kInternal) << "it lacks what is wanted";
    answer.returns.*one.returned = std::string(one.values * 4, 'r');
    EXPECT_EQ(taken(one.wanted, answer), absl::StatusCode::kOk);
    EXPECT_EQ(taken({}, answer), absl::StatusCode::kInternal) << "it has what nobody wants";
    (answer.returns.*one.returned).pop_back();
    EXPECT_EQ(taken(one.wanted, answer), absl::StatusCode::kInternal);
  }
  AnsweredChunk top = AnswerOf(1, 0, 2);
  top.returns.top_tokens = std::string(2 * 3 * 4, 't');
  EXPECT_EQ(taken({.top_k = 3}, top), absl::StatusCode::kInternal);
  top.returns.top_log_probabilities = top.returns.top_tokens;
  EXPECT_EQ(taken({.top_k = 3}, top), absl::StatusCode::kOk);
  EXPECT_EQ(taken({.top_k = 2}, top), absl::StatusCode::kInternal);
}

TEST(AwaitedAnswers, ABatchIsNotAppliedBeforeItsHolderHasAnswered) {
  AwaitedAnswers answers;
  answers.Start(BatchOf(1, {3, 2}));
  ASSERT_EQ(answers.Take(1, AnswerOf(1, 0, 3)), absl::OkStatus());
  EXPECT_EQ(answers.CheckApplied(1, 1).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(answers.CheckApplied(2, 1), absl::OkStatus()) << "others do not wait for the holder to be heard";
  ASSERT_EQ(answers.Take(1, AnswerOf(1, 1, 2)), absl::OkStatus());
  EXPECT_EQ(answers.CheckApplied(1, 1), absl::OkStatus());
}

}  // namespace
}  // namespace lossd::engine::awaited_answers_test
