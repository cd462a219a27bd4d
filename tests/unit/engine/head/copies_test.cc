// Copies of heads and moving averages: what a copy takes over, that calls which are repeated do nothing
// twice, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/common/errors.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/engine_fixture.h"

namespace lossd::engine::copies_test {
namespace {

using lossd::testing::Await;
using ::testing::HasSubstr;

// Every weight of "h" is 0 at version 1, and -step at version 2: the fake optimizer.
class CopiesTest : public EngineFixture, public ::testing::Test {
 protected:
  explicit CopiesTest(EngineOptions options = {})
      : EngineFixture(std::move(options), {}, {.name = {}, .optimizer = {.kind = OptimizerKind::kAdam}}) {}

  using Version = absl::StatusOr<uint64_t>;

  LaneAttachment Lane() { return Attach(Open("c"), listener_); }
  // One more chunk of the lane, in the window.
  void Add(const LaneAttachment& lane, float scale) {
    ++sequence_;
    Submit(lane, MakeChunk(sequence_, scale, head->Info().generation));
    listener_->AwaitAnswers(sequence_);
    engine->WaitIdle();
  }
  void Step() {
    const auto stepped = ApplyStep(head->Info().generation, Marks(), {.learning_rate = 1});
    ASSERT_TRUE(stepped.ok()) << stepped.status();
  }
  absl::StatusOr<CopiedHead> Copy(HeadCopy copy) {
    if (copy.source.empty()) copy.source = "h";
    if (copy.name.empty()) copy.name = "copy";
    if (copy.copy_id.empty()) copy.copy_id = "id";
    return engine->CopyHead(copy);
  }
  std::shared_ptr<Head> FrozenCopy(const std::string& name = "copy") {
    const auto copy = Copy({.name = name, .training = HeadCopy::Training::kFrozen, .copy_id = name});
    EXPECT_TRUE(copy.ok()) << copy.status();
    return copy->head;
  }
  // Puts some of `source` into `target`.
  static std::future<Version> BeginBlend(Head& target, const std::shared_ptr<Head>& source,
                                         const BlendRequest& request) {
    const auto answer = std::make_shared<std::promise<Version>>();
    target.Blend(source, request, [answer](Version version) { answer->set_value(std::move(version)); });
    return answer->get_future();
  }
  static Version Blend(Head& target, const std::shared_ptr<Head>& source, const BlendRequest& request) {
    return Await("the blend", BeginBlend(target, source, request));
  }
  static float WeightOf(Head& of) {
    std::promise<float> read;
    std::vector<float> row(kHidden);
    of.ReadWeights(0, 1, kernels::DataType::kFloat32, {row.data()},
                   [&](const Version& /*version*/) { read.set_value(row[0]); });
    return Await("what is read", read);
  }
  static void ExpectError(const absl::Status& status, absl::StatusCode code, RejectReason reason,
                          const std::string& text) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(ReasonOf(status), reason) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }

  uint64_t sequence_ = 0;
  const std::shared_ptr<RecordingListener> listener_ = std::make_shared<RecordingListener>();
};

TEST_F(CopiesTest, ACopyHasWeightsVersionAndOptimizerButNoWindow) {
  const LaneAttachment lane = Lane();
  Add(lane, 3);
  Step();
  Add(lane, 5);
  const auto copy = Copy({});
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(copy->weight_version, 2U);
  EXPECT_EQ(WeightOf(*copy->head), -3);
  EXPECT_EQ(*engine->FindHead("copy"), copy->head);
  const HeadInfo info = copy->head->Info();
  EXPECT_EQ(info.weight_version, 2U);
  EXPECT_EQ(info.optimizer_steps, 1);
  EXPECT_EQ(info.generation, 1U);
  EXPECT_EQ(info.window_tokens, 0U);
  EXPECT_TRUE(info.window_marks.empty());
  EXPECT_EQ(copy->head->config().optimizer, head->config().optimizer);
  // The source is as it was, and goes its own way.
  Step();
  EXPECT_EQ(Weight(), -3 - 5 - 3) << "with the moment";
  EXPECT_EQ(WeightOf(*copy->head), -3);

  // The copy has that moment, too.
  const std::string session = engine->OpenSession("copy", {"of copy", 0, 1})->info.session_id;
  const auto listener = std::make_shared<RecordingListener>();
  Chunk chunk = MakeChunk(1, 5);
  ASSERT_TRUE(copy->head->Submit(*copy->head->AttachLane(session, 0, listener), chunk, [] {}).ok());
  listener->AwaitAnswers(1);
  engine->WaitIdle();
  std::promise<absl::StatusOr<StepResult>> stepped;
  copy->head->ApplyStep(1, copy->head->Info().window_marks, {.learning_rate = 1},
                        [&](absl::StatusOr<StepResult> step) { stepped.set_value(std::move(step)); });
  EXPECT_EQ(Await("the step", stepped)->weight_version, 3U);
  EXPECT_EQ(WeightOf(*copy->head), -3 - 5 - 3);
}

TEST_F(CopiesTest, AFrozenCopyHasTheWeightsAloneUnlessAMasterIsWanted) {
  const std::shared_ptr<Head> copy = FrozenCopy();
  EXPECT_EQ(copy->config().weight_gradients, WeightGradients::kFrozen);
  EXPECT_EQ(copy->config().optimizer.kind, OptimizerKind::kNone);
  EXPECT_FALSE(copy->config().master_weights);
  EXPECT_EQ(copy->Info().optimizer_steps, 0);
  // fp32 weights are their own.
  const auto fp32 = Copy({.name = "fp32", .master = HeadCopy::Master::kKept, .copy_id = "fp32"});
  ASSERT_TRUE(fp32.ok()) << fp32.status();
  EXPECT_FALSE(fp32->head->config().master_weights);
  HeadConfig config{.name = "b", .vocab_size = kVocab, .hidden_size = kHidden};
  WriteWeights(**engine->CreateHead(config));
  const auto kept = Copy({.source = "b",
                          .name = "kept",
                          .training = HeadCopy::Training::kFrozen,
                          .master = HeadCopy::Master::kKept,
                          .copy_id = "kept"});
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_TRUE(kept->head->config().master_weights);
}

TEST_F(CopiesTest, ARepeatedCopyIsThatHeadAndAnotherIsRefused) {
  const auto first = Copy({});
  const auto again = Copy({});
  ASSERT_TRUE(first.ok() && again.ok()) << again.status();
  EXPECT_EQ(again->head, first->head);
  EXPECT_EQ(again->weight_version, 1U);
  EXPECT_EQ(engine->Heads().size(), 2U);
  const auto taken = [](const absl::Status& status) {
    ExpectError(status, absl::StatusCode::kAlreadyExists, RejectReason::kConflict, "head copy exists");
  };
  taken(Copy({.copy_id = "other"}).status());
  WriteWeights(*first->head);
  taken(Copy({}).status());
  // Its source may have gone since.
  const std::shared_ptr<Head> other = FrozenCopy("other");
  ASSERT_TRUE(engine->DeleteHead("h", Engine::DiscardGradient::kYes).ok());
  EXPECT_EQ(FrozenCopy("other"), other);
}

TEST_F(CopiesTest, WhatCannotBeCopiedLeavesNothingBehind) {
  ASSERT_TRUE(engine->CreateHead({.name = "bare", .vocab_size = kVocab, .hidden_size = kHidden}).ok());
  const int64_t reserved = engine->budget().reserved();
  ExpectError(Copy({.source = "bare"}).status(), absl::StatusCode::kFailedPrecondition,
              RejectReason::kNoWeights, "bare has no weights yet");
  ExpectError(Copy({.source = "stranger"}).status(), absl::StatusCode::kNotFound, RejectReason::kUnknownHead,
              "'stranger' does not exist");
  ExpectError(Copy({.source_version = 2}).status(), absl::StatusCode::kFailedPrecondition,
              RejectReason::kWeightVersion, "source_version is 2; the weights of head h are of version 1");
  ExpectError(Copy({.name = "h"}).status(), absl::StatusCode::kInvalidArgument, RejectReason::kOption,
              "name is h, which is the source");
  ExpectError(Copy({.name = "../h"}).status(), absl::StatusCode::kInvalidArgument, RejectReason::kOption,
              "name must be");
  EXPECT_EQ(engine->Heads().size(), 2U);
  EXPECT_EQ(engine->budget().reserved(), reserved);
}

class CrowdedCopiesTest : public CopiesTest {
 protected:
  // Room for the source (weights and gradient) and for a frozen copy.
  static constexpr int64_t kWeights = kVocab * kHidden * 4;
  CrowdedCopiesTest() : CopiesTest(SmallLimits()) {}

 private:
  static EngineOptions SmallLimits() {
    EngineOptions options;
    options.memory_limit_bytes = 3 * kWeights;
    options.max_heads = 2;
    return options;
  }
};

TEST_F(CrowdedCopiesTest, CopiesCountAgainstMemoryAndTheNumberOfHeads) {
  ExpectError(Copy({}).status(), absl::StatusCode::kResourceExhausted, RejectReason::kOutOfMemory, "free");
  EXPECT_FALSE(engine->FindHead("copy").ok());
  FrozenCopy();
  EXPECT_EQ(engine->budget().reserved(), 3 * kWeights);
  ExpectError(Copy({.name = "third", .copy_id = "third"}).status(), absl::StatusCode::kResourceExhausted,
              RejectReason::kOverload, "there are 2 heads; the limit is 2");
}

TEST_F(CopiesTest, ACopyThatTheDeviceFailsInIsNotThere) {
  gate.Fail();
  const auto copy = Copy({});
  EXPECT_EQ(copy.status().code(), absl::StatusCode::kInternal);
  EXPECT_FALSE(engine->FindHead("copy").ok());
}

TEST_F(CopiesTest, ABlendIsANewVersion) {
  const std::shared_ptr<Head> average = FrozenCopy();
  Add(Lane(), 4);
  Step();
  EXPECT_EQ(*Blend(*average, head, {.decay = 0.75, .blend_id = "1"}), 2U);
  EXPECT_EQ(WeightOf(*average), -1);
  EXPECT_EQ(*Blend(*average, head, {.decay = 0.5, .blend_id = "2"}), 3U);
  EXPECT_EQ(WeightOf(*average), -2.5F);
  EXPECT_EQ(*Blend(*average, head, {.decay = 1, .blend_id = "3"}), 4U);
  EXPECT_EQ(WeightOf(*average), -2.5F);
  EXPECT_EQ(*Blend(*average, head, {.decay = 0, .blend_id = "4"}), 5U);
  EXPECT_EQ(WeightOf(*average), -4);
  EXPECT_EQ(head->weight_version(), 2U);
  EXPECT_EQ(Weight(), -4);
}

TEST_F(CopiesTest, ARepeatedBlendBlendsOnce) {
  const std::shared_ptr<Head> average = FrozenCopy();
  Add(Lane(), 4);
  Step();
  const BlendRequest request{.decay = 0.5, .blend_id = "1", .target_version = 1};
  // The second comes before the first is done, the third after it; the version is another one then.
  std::future<Version> first = BeginBlend(*average, head, request);
  std::future<Version> second = BeginBlend(*average, head, request);
  EXPECT_EQ(*Await("the first blend", std::move(first)), 2U);
  EXPECT_EQ(*Await("the second blend", std::move(second)), 2U);
  EXPECT_EQ(*Blend(*average, head, request), 2U);
  EXPECT_EQ(WeightOf(*average), -2);
  // Behind somebody else's the version alone can tell.
  EXPECT_EQ(*Blend(*average, head, {.decay = 0.5, .blend_id = "2"}), 3U);
  ExpectError(Blend(*average, head, request).status(), absl::StatusCode::kFailedPrecondition,
              RejectReason::kWeightVersion, "target_version is 1; the weights of head copy are of version 3");
  EXPECT_EQ(WeightOf(*average), -3);
}

TEST_F(CopiesTest, ABlendIntoAWindowThatIsNotEmptyIsRefused) {
  const std::shared_ptr<Head> source = FrozenCopy("source");
  const LaneAttachment lane = Lane();
  Add(lane, 4);
  ExpectError(Blend(*head, source, {.decay = 0.5, .blend_id = "1"}).status(),
              absl::StatusCode::kFailedPrecondition, RejectReason::kConflict,
              "the window of head h is not empty (1 tokens)");
  EXPECT_EQ(head->weight_version(), 1U);
  Step();
  EXPECT_EQ(*Blend(*head, source, {.decay = 0.5, .blend_id = "1"}), 3U);
  EXPECT_EQ(Weight(), -2);
}

// Such a window has no gradient: an evaluation stands in no blend's way.
TEST_F(CopiesTest, ABlendIntoAWindowOfLossesAloneIsMade) {
  const std::shared_ptr<Head> source = FrozenCopy("source");
  const LaneAttachment lane = Lane();
  Chunk losses = MakeChunk(1, 4);
  losses.mode = ComputeMode::kLossOnly;
  Submit(lane, std::move(losses));
  listener_->AwaitAnswers(1);
  engine->WaitIdle();
  EXPECT_EQ(*Blend(*head, source, {.decay = 0.5, .blend_id = "1"}), 2U);
  Submit(lane, MakeChunk(2, 4));
  listener_->AwaitAnswers(2);
  engine->WaitIdle();
  ExpectError(Blend(*head, source, {.decay = 0.5, .blend_id = "2"}).status(),
              absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, "is not empty (1 tokens)");
}

// Whoever does not wait for the answer of a step has it in the average all the same.
TEST_F(CopiesTest, ABlendComesBehindWhatWasAskedForBefore) {
  const std::shared_ptr<Head> source = FrozenCopy("source");
  const LaneAttachment lane = Lane();
  gate.Hold();
  Submit(lane, MakeChunk(1, 4));
  gate.AwaitArrival();
  std::promise<absl::StatusOr<StepResult>> stepped;
  head->ApplyStep(1, Marks(), {.learning_rate = 1},
                  [&](absl::StatusOr<StepResult> step) { stepped.set_value(std::move(step)); });
  std::future<Version> blended = BeginBlend(*head, source, {.decay = 0.5, .blend_id = "1"});
  gate.LetThrough();
  EXPECT_EQ(Await("the step", stepped)->weight_version, 2U);
  EXPECT_EQ(*Await("the blend", std::move(blended)), 3U);
  EXPECT_EQ(Weight(), -2);
}

TEST_F(CopiesTest, ABlendDuringAWriteIsRefused) {
  const std::shared_ptr<Head> average = FrozenCopy();
  const std::string write = *average->BeginWrite("key", Head::Replace::kNo, "write");
  ExpectError(Blend(*average, head, {.decay = 0.5, .blend_id = "1"}).status(),
              absl::StatusCode::kFailedPrecondition, RejectReason::kWeightWrite,
              "a write of head copy is under way (0 rows have arrived)");
  average->DropWrite(write);
  EXPECT_EQ(*Blend(*average, head, {.decay = 0.5, .blend_id = "1"}), 2U);
}

TEST_F(CopiesTest, HeadsThatDoNotFitAreNotBlended) {
  const auto refused = [this](HeadConfig config, RejectReason reason, const std::string& text) {
    config.name = "other";
    if (config.vocab_size == 0) config.vocab_size = kVocab;
    config.hidden_size = kHidden;
    const auto other = engine->CreateHead(config);
    ASSERT_TRUE(other.ok()) << other.status();
    WriteWeights(**other);
    ExpectError(Blend(**other, head, {.decay = 0.5, .blend_id = "1"}).status(),
                absl::StatusCode::kInvalidArgument, reason, text);
    EXPECT_EQ((*other)->weight_version(), 1U);
    ASSERT_TRUE(engine->DeleteHead("other", Engine::DiscardGradient::kYes).ok());
  };
  constexpr kernels::DataType kFloat = kernels::DataType::kFloat32;
  refused({.name = {}, .vocab_size = kVocab + 1, .weight_type = kFloat}, RejectReason::kShape,
          "their sizes differ");
  refused({.name = {}, .weight_type = kernels::DataType::kBFloat16}, RejectReason::kDtype,
          "their types differ");
  refused({.name = {}, .weight_type = kFloat, .bias = true}, RejectReason::kOption, "their biases differ");
  refused({.name = {}, .weight_type = kFloat, .logit_scale = 2}, RejectReason::kOption, "their scales");
  refused({.name = {}, .weight_type = kFloat, .softcap = 30}, RejectReason::kOption, "softcaps differ");
  ExpectError(Blend(*head, head, {.decay = 0.5, .blend_id = "1"}).status(),
              absl::StatusCode::kInvalidArgument, RejectReason::kOption,
              "source is h, which is the target too");
}

TEST_F(CopiesTest, ADecayOutsideOfZeroToOneIsRefused) {
  const std::shared_ptr<Head> average = FrozenCopy();
  for (const double decay : {-1e-9, 1.0000001, std::nan(""), HUGE_VAL}) {
    ExpectError(Blend(*average, head, {.decay = decay, .blend_id = "1"}).status(),
                absl::StatusCode::kInvalidArgument, RejectReason::kOption, "it must be in [0, 1]");
  }
  EXPECT_EQ(average->weight_version(), 1U);
}

TEST_F(CopiesTest, ABlendNeedsWeightsOfTheVersionsThatAreNamed) {
  const std::shared_ptr<Head> average = FrozenCopy();
  HeadConfig config = average->config();
  config.name = "bare";
  const std::shared_ptr<Head> bare = *engine->CreateHead(config);
  ExpectError(Blend(*bare, head, {.decay = 0.5, .blend_id = "1"}).status(),
              absl::StatusCode::kFailedPrecondition, RejectReason::kNoWeights, "bare has no weights yet");
  ExpectError(Blend(*average, bare, {.decay = 0.5, .blend_id = "1"}).status(),
              absl::StatusCode::kFailedPrecondition, RejectReason::kNoWeights, "bare has no weights yet");
  WriteWeights();
  ExpectError(Blend(*average, head, {.decay = 0.5, .blend_id = "1", .source_version = 1}).status(),
              absl::StatusCode::kFailedPrecondition, RejectReason::kWeightVersion,
              "source_version is 1; the weights of head h are of version 2");
  EXPECT_EQ(*Blend(*average, head, {.decay = 0.5, .blend_id = "1", .source_version = 2}), 2U);
}

TEST_F(CopiesTest, ABlendWithAHeadThatIsDeletedMeanwhileIsRefused) {
  const std::shared_ptr<Head> average = FrozenCopy();
  const std::shared_ptr<Head> source = FrozenCopy("source");
  ASSERT_TRUE(engine->DeleteHead("source", Engine::DiscardGradient::kYes).ok());
  EXPECT_EQ(Blend(*average, source, {.decay = 0.5, .blend_id = "1"}).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(Blend(*source, average, {.decay = 0.5, .blend_id = "1"}).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(average->weight_version(), 1U);
}

}  // namespace
}  // namespace lossd::engine::copies_test
