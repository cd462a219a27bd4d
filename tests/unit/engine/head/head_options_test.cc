// Loss options on their way through a head: to the device and back, other weights than demanded, frozen
// heads, and flushes with a scale.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/common/errors.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/end_flush.h"
#include "tests/unit/engine/engine_fixture.h"

namespace lossd::engine::head_options_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

template <typename T>
std::string Bytes(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

class HeadOptionsTest : public EngineFixture, public ::testing::Test {
 protected:
  explicit HeadOptionsTest(HeadConfig config = {}) : EngineFixture({}, {}, std::move(config)) {}

  const std::shared_ptr<RecordingListener> listener_ = std::make_shared<RecordingListener>();
};

TEST_F(HeadOptionsTest, InputsReachTheDeviceAndReturnsTheAnswerAlsoOfARepeat) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Chunk chunk = MakeChunk(1, 3);
  chunk.token_weights = Bytes<float>({2});
  chunk.lse_gradients = Bytes<float>({0.5f});
  chunk.options.Set(&kernels::LossOptions::softcap, 30.0f);
  chunk.options.loss.lse_square_scale = 0.25f;
  chunk.options.returns = {.log_sum_exp = true, .target_rank = true, .top_k = 2};
  Submit(lane, chunk);
  Submit(lane, chunk);
  const std::vector<ChunkAnswer> answers = listener_->AwaitAnswers(2);
  EXPECT_EQ(answers[0].disposition, Disposition::kAccumulated);
  EXPECT_EQ(answers[1].disposition, Disposition::kRepeated);
  for (const ChunkAnswer& answer : answers) {
    EXPECT_EQ(answer.losses, Bytes<float>({6}));
    EXPECT_EQ(answer.returns.log_sum_exp, Bytes<float>({0.5f}));
    EXPECT_EQ(answer.returns.target_ranks, Bytes<int32_t>({1}));
    EXPECT_EQ(answer.returns.top_tokens, Bytes<int32_t>({1, 1}));
    EXPECT_EQ(answer.returns.top_log_probabilities, Bytes<float>({1, 1}));
    EXPECT_EQ(answer.z_loss_sum, 0.25);
    EXPECT_THAT(answer.returns.z_losses, IsEmpty()) << "only their sum, unless they were wanted";
    EXPECT_THAT(answer.returns.entropies, IsEmpty());
  }
  EXPECT_EQ(gate.kinds()[0].options, (kernels::LossOptions{.softcap = 30, .lse_square_scale = 0.25f}));
  EXPECT_EQ(GradientSum(), 3);
}

TEST_F(HeadOptionsTest, LossesTimesWeightsOfTokensAreNotCountedAsLosses) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Chunk weighted = MakeChunk(1, 3);
  weighted.token_weights = Bytes<float>({-2});
  Submit(lane, std::move(weighted));
  EXPECT_EQ(listener_->AwaitAnswers(1)[0].loss_sum, -6);
  engine->WaitIdle();
  EXPECT_EQ(head->counters().tokens, 1U) << "it was worked on";
  EXPECT_EQ(head->counters().loss_tokens, 0U);
  EXPECT_EQ(head->counters().loss_nats, 0) << "a counter does not go back";
  EXPECT_EQ(head->counters().loss, 0);
  EXPECT_EQ(engine->counters().tokens_valid, 1U);
  Submit(lane, MakeChunk(2, 5));
  listener_->AwaitAnswers(2);
  engine->WaitIdle();
  EXPECT_EQ(head->counters().tokens, 2U);
  EXPECT_EQ(head->counters().loss_tokens, 1U);
  EXPECT_EQ(head->counters().loss_nats, 5);
  EXPECT_EQ(head->counters().loss, 5);
}

TEST_F(HeadOptionsTest, AChunkThatIsRefusedForAnOptionAddsNothing) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Chunk bad = MakeChunk(1, 3);
  bad.options.loss.label_smoothing = 2;
  Submit(lane, std::move(bad));
  Submit(lane, MakeChunk(2, 5));
  const std::vector<ChunkAnswer> answers = listener_->AwaitAnswers(2);
  EXPECT_EQ(answers[0].disposition, Disposition::kRejected);
  EXPECT_EQ(FieldOf(answers[0].error), "options.label_smoothing");
  EXPECT_EQ(GradientSum(), 5);
}

TEST_F(HeadOptionsTest, AChunkForOtherWeightsIsRejectedWhenItIsStartedAndNotBefore) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Chunk none = MakeChunk(1, 3);
  none.options.weight_version = 0;
  Submit(lane, none);
  listener_->AwaitAnswers(1);
  gate.Hold();
  Submit(lane, MakeChunk(2, 7));
  gate.AwaitArrival();
  Chunk first = MakeChunk(3, 10);
  first.options.weight_version = 1;
  Submit(lane, first);  // behind it: the weights are still of version 1 now, and when it is started
  gate.LetThrough();
  EXPECT_EQ(WriteWeights(), 2U);
  Chunk second = MakeChunk(4, 3);
  second.options.weight_version = 2;
  first.sequence = 5;
  Submit(lane, second);
  Submit(lane, first);
  const std::vector<ChunkAnswer> answers = listener_->AwaitAnswers(5);
  EXPECT_EQ(answers[0].disposition, Disposition::kRejected);
  EXPECT_EQ(answers[0].error.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FieldOf(answers[0].error), "options.weight_version");
  EXPECT_THAT(std::string(answers[0].error.message()), HasSubstr("is 0; the weights are of version 1"));
  EXPECT_EQ(answers[2].disposition, Disposition::kAccumulated);
  EXPECT_EQ(answers[3].disposition, Disposition::kAccumulated);
  EXPECT_EQ(answers[4].disposition, Disposition::kRejected);
  EXPECT_EQ(GradientSum(), 7 + 10 + 3);
  EXPECT_EQ(listener_->applied(), 5U) << "a rejected chunk is applied, as nothing";
}

// Otherwise a chunk that was rejected, and whose answer was lost, would be called a repeat once the weights
// are of that version.
TEST_F(HeadOptionsTest, AChunkForWeightsThatAreYetToComeIsNotTaken) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Chunk chunk = MakeChunk(1, 3);
  chunk.options.weight_version = 2;
  Chunk early = chunk;
  const absl::StatusOr<Head::Submission> refused = head->Submit(lane, early, [] {});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("is 2; the weights are of version 1 yet"));
  EXPECT_EQ(WriteWeights(), 2U);
  Submit(lane, chunk);
  EXPECT_EQ(listener_->AwaitAnswers(1)[0].disposition, Disposition::kAccumulated);
  EXPECT_EQ(GradientSum(), 3);
}

TEST_F(HeadOptionsTest, AWriteBetweenQueueAndStartIsSeen) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 1));
  gate.AwaitArrival();
  const std::string write = *head->BeginWrite("w", Head::Replace::kNo, "id");
  const std::string rows(static_cast<size_t>(kVocab * kHidden * 4), '\0');
  ASSERT_TRUE((*head->FindWrite(write))->Write(0, kVocab, kernels::DataType::kFloat32, rows).ok());
  head->CommitWrite(write, [](const absl::StatusOr<uint64_t>& /*version*/) {});
  Chunk chunk = MakeChunk(2, 3);
  chunk.options.weight_version = 1;  // true now; the write is in front of it
  Submit(lane, std::move(chunk));
  gate.LetThrough();
  EXPECT_EQ(listener_->AwaitAnswers(2)[1].disposition, Disposition::kRejected);
  EXPECT_EQ(GradientSum(), 1);
}

TEST_F(HeadOptionsTest, ARepeatForOtherWeightsIsNotCalledRejectedSinceItMayBeInTheWindow) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Chunk chunk = MakeChunk(1, 3);
  chunk.options.weight_version = 1;
  Submit(lane, chunk);
  listener_->AwaitAnswers(1);
  EXPECT_EQ(WriteWeights(), 2U);
  Submit(lane, chunk);
  engine->WaitIdle();
  ASSERT_TRUE(listener_->ended().has_value());
  EXPECT_EQ(listener_->ended()->code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(listener_->answers(), 1U);
  EXPECT_EQ(GradientSum(), 3);
}

TEST_F(HeadOptionsTest, AFlushWithAScaleReadsAndSumsUpTheScaledGradientAndAbortForgetsIt) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, MakeChunk(1, 6));
  engine->WaitIdle();
  const absl::StatusOr<FlushInfo> flush = BeginFlush(1, Marks(), 0.5f);
  ASSERT_TRUE(flush.ok()) << flush.status();
  EXPECT_EQ(BeginFlush(1, Marks(), 0.5f)->flush_id, flush->flush_id);
  const absl::Status other = BeginFlush(1, Marks(), 0.25f).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FieldOf(other), "gradient_scale");
  EXPECT_DOUBLE_EQ(flush->stats.norm, 3 * std::sqrt(8.0));
  std::vector<float> gradient(kVocab * kHidden);
  head->ReadGradient(flush->flush_id, 0, kVocab, kernels::DataType::kFloat32, {gradient.data()},
                     [](const absl::Status& status) { EXPECT_TRUE(status.ok()); });
  engine->WaitIdle();
  EXPECT_THAT(gradient, ::testing::Each(3));
  EXPECT_TRUE(AbortFlush(*head, flush->flush_id).ok());
  EXPECT_EQ(GradientSum(), 6) << "what is in the window stays as it is";
  EXPECT_EQ(BeginFlush(1, Marks(), std::numeric_limits<float>::infinity()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

class FrozenHeadTest : public HeadOptionsTest {
 protected:
  FrozenHeadTest() : HeadOptionsTest(Frozen()) {}

  static HeadConfig Frozen() {
    HeadConfig config;
    config.weight_gradients = WeightGradients::kFrozen;
    return config;
  }
};

TEST_F(FrozenHeadTest, AnswersChunksAndHasNoWindow) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, MakeChunk(1, 3));
  Submit(lane, MakeChunk(1, 3));
  const std::vector<ChunkAnswer> answers = listener_->AwaitAnswers(2);
  engine->WaitIdle();
  EXPECT_EQ(answers[0].disposition, Disposition::kAccumulated);
  EXPECT_EQ(answers[0].dx.size(), kHidden * 4);
  EXPECT_EQ(answers[1].disposition, Disposition::kRepeated);
  EXPECT_EQ(listener_->applied(), 1U);
  EXPECT_EQ(head->Info().window_tokens, 0U);
  EXPECT_THAT(head->Info().window_marks, IsEmpty());
  EXPECT_EQ(engine->counters().chunks_input_gradient, 1U);
  const absl::Status flush = BeginFlush(1, {}).status();
  EXPECT_EQ(flush.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(flush.message()), HasSubstr("head h is frozen"));
  EXPECT_TRUE(engine->DeleteHead("h", Engine::DiscardGradient::kNo).ok()) << "there is nothing to lose";
}

TEST_F(FrozenHeadTest, ForgetsSessionsThatAreClosedThoughTheirLastChunkIsStillUnderWay) {
  const std::string session = Open("c");
  const LaneAttachment lane = Attach(session, listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 3));
  gate.AwaitArrival();
  EXPECT_TRUE(engine->CloseSession(session).ok());
  gate.LetThrough();
  engine->WaitIdle();
  EXPECT_FALSE(engine->CloseSession(session).ok());
  EXPECT_EQ(head->Info().open_sessions, 0);
  EXPECT_THAT(head->IdleSessions(absl::InfiniteFuture()), IsEmpty());
}

class BiasedHeadTest : public HeadOptionsTest {
 protected:
  BiasedHeadTest() : HeadOptionsTest(Biased()) {}

  static HeadConfig Biased() {
    HeadConfig config;
    config.bias = true;
    return config;
  }
  std::shared_ptr<StagedWrite> Begin(const std::string& id) const {
    return *head->FindWrite(*head->BeginWrite("key of " + id, Head::Replace::kYes, id));
  }
  static absl::Status Write(StagedWrite& write, int64_t first, int64_t rows, const std::vector<float>& bias) {
    const std::string weights(static_cast<size_t>(rows * kHidden * 4), 'x');
    return write.Write(first, rows, kernels::DataType::kFloat32, weights, Bytes(bias));
  }
  absl::StatusOr<uint64_t> Commit(const std::string& id) const {
    std::promise<absl::StatusOr<uint64_t>> version;
    head->CommitWrite(id,
                      [&](absl::StatusOr<uint64_t> published) { version.set_value(std::move(published)); });
    return testing::Await("the answer", version);
  }
  // Rows of the published bias.
  std::vector<float> ReadBias(int64_t first, int64_t rows) const {
    std::vector<float> weights(static_cast<size_t>(rows * kHidden));
    std::vector<float> bias(static_cast<size_t>(rows));
    std::promise<absl::StatusOr<uint64_t>> version;
    head->ReadWeights(first, rows, kernels::DataType::kFloat32, {weights.data(), bias.data()},
                      [&](absl::StatusOr<uint64_t> read) { version.set_value(std::move(read)); });
    EXPECT_TRUE(testing::Await("the answer", version).ok());
    return bias;
  }
};

TEST_F(BiasedHeadTest, WeightsAndBiasArePublishedTogetherOnceAllRowsCame) {
  const std::shared_ptr<StagedWrite> write = Begin("one");
  ASSERT_TRUE(Write(*write, 2, 2, {3, 4}).ok());
  EXPECT_EQ(Commit("one").status().code(), absl::StatusCode::kFailedPrecondition) << "rows are missing";
  EXPECT_EQ(ReadBias(0, kVocab), (std::vector<float>{0, 0, 0, 0}))
      << "nothing of it is seen before the commit";
  ASSERT_TRUE(Write(*write, 0, 3, {1, 2, 5}).ok());
  const absl::StatusOr<uint64_t> version = Commit("one");
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(*version, 2U);
  EXPECT_EQ(ReadBias(0, kVocab), (std::vector<float>{1, 2, 5, 4}));
  EXPECT_EQ(ReadBias(1, 2), (std::vector<float>{2, 5}));
}

TEST_F(BiasedHeadTest, RowsWithoutTheirBiasOrWithABadOneAreRefusedWhole) {
  const std::shared_ptr<StagedWrite> write = Begin("one");
  struct Case {
    std::vector<float> bias;
    std::string message;
  };
  for (const Case& bad :
       {Case{{}, "bias holds 0 bytes; 2 fp32 values are 8"},
        Case{{1}, "bias holds 4 bytes; 2 fp32 values are 8"}, Case{{1, 2, 3}, "bias holds 12 bytes"},
        Case{{1, NAN}, "bias[1] is nan; it must be finite"}, Case{{-HUGE_VALF, 1}, "bias[0] is -inf"}}) {
    const absl::Status status = Write(*write, 0, 2, bad.bias);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(FieldOf(status), "bias");
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.message));
  }
  ASSERT_TRUE(Write(*write, 2, 2, {3, 4}).ok());
  const absl::Status incomplete = Commit("one").status();
  EXPECT_THAT(std::string(incomplete.message()), HasSubstr("lacks 2 of 4 rows, the first is row 0"));
}

TEST_F(HeadOptionsTest, ABiasForAHeadThatHasNoneIsRefused) {
  const std::string write = *head->BeginWrite("w", Head::Replace::kNo, "id");
  const std::string rows(static_cast<size_t>(kVocab * kHidden * 4), '\0');
  const absl::Status status =
      (*head->FindWrite(write))
          ->Write(0, kVocab, kernels::DataType::kFloat32, rows, Bytes<float>({0, 0, 0, 0}));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldOf(status), "bias");
  EXPECT_THAT(std::string(status.message()), HasSubstr("the head was created without a bias"));
}

// The fake's gradient of a bias is twice the one of the weights.
TEST_F(BiasedHeadTest, AFlushReadsScalesAndSumsUpTheGradientOfTheBias) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, MakeChunk(1, 6));
  engine->WaitIdle();
  const absl::StatusOr<FlushInfo> flush = BeginFlush(1, Marks(), 0.5f);
  ASSERT_TRUE(flush.ok()) << flush.status();
  EXPECT_DOUBLE_EQ(flush->stats.bias_norm, 6 * std::sqrt(4.0));
  EXPECT_DOUBLE_EQ(flush->stats.norm, 3 * std::sqrt(8.0)) << "that of the weights alone";
  std::vector<float> narrow(kVocab * kHidden);
  std::vector<float> bias(kVocab);
  head->ReadGradient(flush->flush_id, 0, kVocab, kernels::DataType::kBFloat16, {narrow.data(), bias.data()},
                     [](const absl::Status& status) { EXPECT_TRUE(status.ok()); });
  engine->WaitIdle();
  EXPECT_THAT(bias, ::testing::Each(6)) << "in fp32 whatever the rows are in";
  EXPECT_TRUE(CommitFlush(*head, flush->flush_id).ok());
  EXPECT_EQ(BeginFlush(2, Marks())->stats.bias_norm, 0);
}

TEST_F(BiasedHeadTest, ChunksThatDoWithoutTheBiasAreOfAnotherKind) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, MakeChunk(1, 1));
  Chunk chunk = MakeChunk(2, 1);
  chunk.options.bias = Bias::kIgnore;
  Submit(lane, std::move(chunk));
  listener_->AwaitAnswers(2);
  EXPECT_EQ(gate.kinds()[0].bias, Bias::kUse);
  EXPECT_EQ(gate.kinds()[1].bias, Bias::kIgnore);
}

TEST_F(BiasedHeadTest, AnotherHeadOfTheNameWithoutABiasIsNotTheSame) {
  HeadConfig plain = head->config();
  EXPECT_TRUE(engine->CreateHead(plain).ok());
  plain.bias = false;
  const absl::Status status = engine->CreateHead(plain).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(status.message()), HasSubstr("with a bias"));
}

}  // namespace
}  // namespace lossd::engine::head_options_test
