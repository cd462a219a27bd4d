// Steps of the optimizer without gRPC: what they wait for, what they answer when they are asked for again,
// and that they happen once or not at all. The device, and its arithmetic, is the fake's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <future>

#include "server/engine/common/errors.h"
#include "server/engine/common/random_id.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/end_flush.h"
#include "tests/unit/engine/engine_fixture.h"

namespace lossd::engine::step_test {
namespace {

using lossd::testing::Await;
using ::testing::HasSubstr;

HeadConfig WithOptimizer() {
  HeadConfig config;
  config.optimizer.kind = OptimizerKind::kSgd;
  return config;
}

class StepTest : public ::testing::Test, protected EngineFixture {
 protected:
  explicit StepTest(HeadConfig config = WithOptimizer()) : EngineFixture({}, {}, std::move(config)) {}

  static StepRequest Rate(double learning_rate) { return {.learning_rate = learning_rate}; }
  static Chunk LossOnly(uint64_t sequence, uint64_t generation = 1) {
    Chunk chunk = MakeChunk(sequence, 1, generation);
    chunk.mode = ComputeMode::kLossOnly;
    return chunk;
  }
  static void ExpectError(const absl::Status& status, absl::StatusCode code, const std::string& text) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }

  std::shared_ptr<RecordingListener> listener_ = std::make_shared<RecordingListener>();
};

TEST_F(StepTest, WaitsForWhatIsQueuedUpdatesTheWeightsAndEndsTheWindow) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 2));
  Submit(lane, MakeChunk(2, 3));
  gate.AwaitArrival();
  std::promise<absl::StatusOr<StepResult>> answer;
  head->ApplyStep(1, Marks(), {.learning_rate = 0.5, .gradient_scale = 2},
                  [&](absl::StatusOr<StepResult> step) { answer.set_value(std::move(step)); });
  EXPECT_EQ(head->Info().window_state, WindowState::kSealing);
  gate.LetThrough();
  const absl::StatusOr<StepResult> step = Await("the answer", answer);
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->generation, 2U);
  EXPECT_EQ(step->weight_version, 2U);
  EXPECT_EQ(step->step, 1);
  EXPECT_FALSE(step->skipped);
  EXPECT_EQ(step->window_tokens, 2U);
  EXPECT_DOUBLE_EQ(step->stats.norm, 10 * std::sqrt(8.0));
  EXPECT_EQ(Weight(), -5);  // 0 - 0.5 * 2 * (2 + 3)
  const HeadInfo info = head->Info();
  EXPECT_EQ(info.generation, 2U);
  EXPECT_EQ(info.weight_version, 2U);
  EXPECT_EQ(info.optimizer_steps, 1);
  EXPECT_EQ(info.window_state, WindowState::kOpen);
  EXPECT_EQ(info.window_tokens, 0U);
  EXPECT_TRUE(info.window_marks.empty());
  Submit(lane, MakeChunk(3, 7, 2));
  EXPECT_EQ(GradientSum(), 7) << "nothing of the window before is in this one";
  EXPECT_EQ(engine->counters().steps_applied, 1U);
}

TEST_F(StepTest, ChunksWaitWhileItIsUnderWayAndGoIntoTheNextWindow) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 2));
  gate.AwaitArrival();
  std::promise<absl::StatusOr<StepResult>> answer;
  head->ApplyStep(1, Marks(), Rate(1),
                  [&](const absl::StatusOr<StepResult>& step) { answer.set_value(step); });
  Chunk chunk = MakeChunk(2, 5, 2);
  std::promise<void> resumed;
  EXPECT_EQ(*head->Submit(lane, chunk, [&] { resumed.set_value(); }), Head::Submission::kWait);
  gate.LetThrough();
  EXPECT_TRUE(Await("the answer", answer).ok());
  Await("a waiting lane to be resumed", resumed);
  EXPECT_EQ(*head->Submit(lane, chunk, [] {}), Head::Submission::kTaken);
  EXPECT_EQ(GradientSum(), 5);
  EXPECT_EQ(listener_->AwaitAnswers(2)[1].weight_version, 2U);
}

TEST_F(StepTest, TheSameAgainAnswersTheSameAndStepsOnce) {
  Submit(Attach(Open("c"), listener_), MakeChunk(1, 2));
  const std::vector<SessionMarks> marks = Marks();
  const absl::StatusOr<StepResult> first = ApplyStep(1, marks, Rate(1));
  ASSERT_TRUE(first.ok()) << first.status();
  for (int repeat = 0; repeat < 2; ++repeat) {
    const absl::StatusOr<StepResult> again = ApplyStep(1, marks, Rate(1));
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->generation, 2U);
    EXPECT_EQ(again->weight_version, first->weight_version);
    EXPECT_EQ(again->step, 1);
    EXPECT_EQ(again->stats.norm, first->stats.norm);
    EXPECT_EQ(again->window_tokens, 1U);
  }
  EXPECT_EQ(Weight(), -2);
  EXPECT_EQ(engine->counters().steps_applied, 1U);
}

TEST_F(StepTest, TheSameAgainWithMarksThatLossesAloneHaveMovedIsTheSameStep) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  const LaneAttachment other = Attach(Open("evaluation"), std::make_shared<RecordingListener>());
  Submit(lane, MakeChunk(1, 2));
  ASSERT_TRUE(ApplyStep(1, Marks(), Rate(1)).ok());  // and the answer is lost
  Submit(lane, LossOnly(2, 2));
  Submit(other, LossOnly(1, 2));
  listener_->AwaitAnswers(2);
  const std::vector<SessionMarks> moved = Marks();
  // A mark of the step that is missing, or one that nobody has come to, is another call.
  std::vector<SessionMarks> wrong = moved;
  wrong[0].lanes[0].accepted = 7;
  EXPECT_EQ(ApplyStep(1, wrong, Rate(1)).status().code(), absl::StatusCode::kFailedPrecondition);
  wrong = moved;
  std::erase_if(wrong, [&](const SessionMarks& marks) { return marks.session_id == lane.session_id; });
  EXPECT_EQ(ApplyStep(1, wrong, Rate(1)).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Marks().size(), 2U);
  for (int repeat = 0; repeat < 2; ++repeat) {
    const absl::StatusOr<StepResult> again = ApplyStep(1, moved, Rate(1));
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_TRUE(Marks().empty()) << "what it names is behind its caller";
    EXPECT_EQ(again->step, 1);
    EXPECT_EQ(again->generation, 2U);
    EXPECT_EQ(again->window_tokens, 1U);
  }
  EXPECT_EQ(Weight(), -2);
  ExpectError(ApplyStep(1, moved, Rate(2)).status(), absl::StatusCode::kFailedPrecondition,
              "was applied with learning_rate 1; this call names 2");
  // Another call is one with marks that gradients have moved, be it of a chunk that only waits for the
  // device.
  gate.Hold();
  Submit(lane, LossOnly(3, 2));
  gate.AwaitArrival();
  Submit(lane, MakeChunk(4, 3, 2));
  const std::vector<SessionMarks> marks = Marks();
  EXPECT_EQ(ApplyStep(1, marks, Rate(1)).status().code(), absl::StatusCode::kFailedPrecondition);
  gate.LetThrough();
  engine->WaitIdle();
  EXPECT_EQ(ApplyStep(1, marks, Rate(1)).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(head->Info().optimizer_steps, 1);
  EXPECT_EQ(ApplyStep(2, marks, Rate(1))->step, 2);
  EXPECT_EQ(Weight(), -5);
}

TEST_F(StepTest, AWindowWithoutATokenIsSkippedAndEnds) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, LossOnly(1));
  Chunk ignored = MakeChunk(2, 2);
  ignored.ignore_index = *reinterpret_cast<const int64_t*>(ignored.labels.data());
  Submit(lane, std::move(ignored));
  Chunk refused = MakeChunk(3, 2);
  refused.labels.assign(sizeof(int64_t), '\x7f');
  Submit(lane, std::move(refused));
  const std::vector<SessionMarks> marks = Marks();
  for (int repeat = 0; repeat < 2; ++repeat) {
    const absl::StatusOr<StepResult> step = ApplyStep(1, marks, Rate(1));
    ASSERT_TRUE(step.ok()) << step.status();
    EXPECT_TRUE(step->skipped);
    EXPECT_EQ(step->generation, 2U);
    EXPECT_EQ(step->weight_version, 1U);
    EXPECT_EQ(step->step, 0);
    EXPECT_EQ(step->window_tokens, 0U);
    EXPECT_EQ(step->stats.norm, 0);
  }
  ExpectError(ApplyStep(1, marks, Rate(2)).status(), absl::StatusCode::kFailedPrecondition, "learning_rate");
  EXPECT_EQ(head->Info().generation, 2U);
  EXPECT_EQ(head->Info().optimizer_steps, 0);
  EXPECT_EQ(engine->counters().steps_empty, 1U);
  EXPECT_EQ(engine->counters().steps_applied, 0U);
  EXPECT_EQ(engine->counters().steps_skipped, 0U);
  Submit(lane, MakeChunk(4, 3, 2));
  const absl::StatusOr<StepResult> step = ApplyStep(2, Marks(), Rate(1));
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_FALSE(step->skipped);
  EXPECT_EQ(step->step, 1);
  EXPECT_EQ(Weight(), -3);
}

TEST_F(StepTest, TheSameAgainAnswersTheSameEvenBehindAFlushOfTheNextWindow) {
  ASSERT_TRUE(ApplyStep(1, {}, Rate(1)).ok());
  const absl::StatusOr<FlushInfo> flush = BeginFlush(2, {});
  ASSERT_TRUE(flush.ok());
  EXPECT_EQ(ApplyStep(1, {}, Rate(1))->generation, 2U);
  ASSERT_TRUE(CommitFlush(*head, flush->flush_id).ok());
  EXPECT_EQ(ApplyStep(1, {}, Rate(1))->generation, 2U);
}

TEST_F(StepTest, TheSameAgainWhileItIsUnderWayWaitsWithTheFirst) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 2));
  gate.AwaitArrival();
  const std::vector<SessionMarks> marks = Marks();
  std::promise<absl::StatusOr<StepResult>> first;
  std::promise<absl::StatusOr<StepResult>> second;
  head->ApplyStep(1, marks, Rate(1), [&](const absl::StatusOr<StepResult>& step) { first.set_value(step); });
  head->ApplyStep(1, marks, Rate(1), [&](const absl::StatusOr<StepResult>& step) { second.set_value(step); });
  ExpectError(ApplyStep(1, marks, Rate(2)).status(), absl::StatusCode::kFailedPrecondition,
              "a step of generation 1 is under way with learning_rate 1; this call names 2");
  gate.LetThrough();
  EXPECT_EQ(Await("the first answer", first)->weight_version, 2U);
  EXPECT_EQ(Await("the second answer", second)->weight_version, 2U);
  EXPECT_EQ(Weight(), -2);
}

TEST_F(StepTest, OtherArgumentsForAConsumedGenerationAreRefusedByName) {
  Submit(Attach(Open("c"), listener_), MakeChunk(1, 2));
  const std::vector<SessionMarks> marks = Marks();
  ASSERT_TRUE(ApplyStep(1, marks, Rate(1)).ok());
  const auto refused = [&](const std::vector<SessionMarks>& named, const StepRequest& request,
                           const std::string& text) {
    ExpectError(ApplyStep(1, named, request).status(), absl::StatusCode::kFailedPrecondition, text);
  };
  refused(marks, Rate(0.5), "was applied with learning_rate 1; this call names 0.5");
  refused(marks, {.learning_rate = 1, .gradient_scale = 3}, "gradient_scale 1; this call names 3");
  refused(marks, {.learning_rate = 1, .non_finite = NonFinite::kSkip}, "skip_non_finite false");
  refused(marks, {.learning_rate = 1, .weight_decay = 0.0}, "weight_decay unset; this call names 0");
  refused(marks, {.learning_rate = 1, .momentum = 0.0}, "momentum unset; this call names 0");
  std::vector<SessionMarks> others = marks;
  others[0].lanes[0].accepted = 2;
  const std::string id = marks[0].session_id;
  refused(others, Rate(1), "with marks " + id + "/0=1; this call names " + id + "/0=2");
  refused({}, Rate(0.5), "was applied with learning_rate 1; this call names 0.5");
  const absl::StatusOr<StepResult> without_marks = ApplyStep(1, {}, Rate(1));
  ASSERT_TRUE(without_marks.ok()) << without_marks.status();
  EXPECT_EQ(without_marks->step, 1);
  EXPECT_EQ(Weight(), -2);
  EXPECT_EQ(head->Info().generation, 2U);
}

TEST_F(StepTest, AnyOtherGenerationIsAbortedWithThePosition) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, MakeChunk(1, 2));
  ASSERT_TRUE(ApplyStep(1, Marks(), Rate(1)).ok());
  Submit(lane, MakeChunk(2, 2, 2));
  ASSERT_TRUE(ApplyStep(2, Marks(), Rate(1)).ok());
  for (const uint64_t generation : {uint64_t{0}, uint64_t{1}, uint64_t{4}}) {
    const absl::Status status = ApplyStep(generation, {}, Rate(1)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << generation;
    ASSERT_TRUE(PositionOf(status).has_value());
    EXPECT_EQ(PositionOf(status)->generation, 3U);
  }
  EXPECT_EQ(head->Info().optimizer_steps, 2);
}

TEST_F(StepTest, MarksThatDoNotMatchAreRefusedAndNothingChanges) {
  Submit(Attach(Open("c"), listener_), MakeChunk(1, 2));
  ExpectError(ApplyStep(1, {}, Rate(1)).status(), absl::StatusCode::kFailedPrecondition,
              "the marks do not name it");
  EXPECT_EQ(head->Info().window_state, WindowState::kOpen);
  EXPECT_EQ(GradientSum(), 2);
}

TEST_F(StepTest, MarksThatGoBackWhileItWaitsFailItAndTheWindowStaysOpen) {
  const std::string session = Open("c");
  const LaneAttachment lane = Attach(session, listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 2));
  Submit(lane, MakeChunk(2, 3));
  gate.AwaitArrival();  // 1 is started
  std::promise<absl::StatusOr<StepResult>> answer;
  head->ApplyStep(1, Marks(), Rate(1),
                  [&](const absl::StatusOr<StepResult>& step) { answer.set_value(step); });
  head->DetachLane(lane);
  gate.LetThrough();
  ExpectError(Await("the answer", answer).status(), absl::StatusCode::kFailedPrecondition,
              "marks name accepted 2, the server has accepted 1");
  EXPECT_EQ(head->Info().window_state, WindowState::kOpen);
  EXPECT_EQ(head->Info().weight_version, 1U);
  EXPECT_EQ(Weight(), 0);
  Submit(Attach(session, listener_), MakeChunk(2, 4));
  EXPECT_EQ(GradientSum(), 6);
  EXPECT_EQ(ApplyStep(1, Marks(), Rate(1))->step, 1);
  EXPECT_EQ(Weight(), -6);
}

TEST_F(StepTest, AGradientThatIsNotFiniteIsSkippedIfAskedAndTheWindowEnds) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, MakeChunk(1, 3e38f));
  Submit(lane, MakeChunk(2, 3e38f));
  const StepRequest skip{.learning_rate = 1, .non_finite = NonFinite::kSkip};
  const absl::StatusOr<StepResult> skipped = ApplyStep(1, Marks(), skip);
  ASSERT_TRUE(skipped.ok()) << skipped.status();
  EXPECT_TRUE(skipped->skipped);
  EXPECT_EQ(skipped->stats.non_finite, 8);
  EXPECT_EQ(skipped->generation, 2U);
  EXPECT_EQ(skipped->weight_version, 1U);
  EXPECT_EQ(skipped->step, 0);
  EXPECT_EQ(Weight(), 0);
  EXPECT_EQ(engine->counters().steps_skipped, 1U);
  EXPECT_EQ(engine->counters().steps_applied, 0U);
  Submit(lane, MakeChunk(3, 4, 2));
  const absl::StatusOr<StepResult> applied = ApplyStep(2, Marks(), skip);
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_FALSE(applied->skipped);
  EXPECT_EQ(applied->step, 1);
  EXPECT_EQ(Weight(), -4);
}

TEST_F(StepTest, AFlushAndAStepExcludeEachOther) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 2));
  gate.AwaitArrival();
  std::promise<absl::StatusOr<StepResult>> answer;
  head->ApplyStep(1, Marks(), Rate(1),
                  [&](const absl::StatusOr<StepResult>& step) { answer.set_value(step); });
  ExpectError(BeginFlush(1, Marks()).status(), absl::StatusCode::kFailedPrecondition,
              "generation 1 is being consumed by a step");
  gate.LetThrough();
  ASSERT_TRUE(Await("the answer", answer).ok());

  Submit(lane, MakeChunk(2, 3, 2));
  gate.Hold();
  Submit(lane, MakeChunk(3, 3, 2));
  gate.AwaitArrival();
  std::promise<absl::StatusOr<FlushInfo>> begun;
  head->BeginFlush(2, Marks(), 1, [&](const absl::StatusOr<FlushInfo>& flush) { begun.set_value(flush); });
  ExpectError(ApplyStep(2, Marks(), Rate(1)).status(), absl::StatusCode::kFailedPrecondition,
              "about to be sealed by a flush");
  gate.LetThrough();
  const absl::StatusOr<FlushInfo> flush = Await("the flush to begin", begun);
  ASSERT_TRUE(flush.ok()) << flush.status();
  ExpectError(ApplyStep(2, Marks(), Rate(1)).status(), absl::StatusCode::kFailedPrecondition,
              "is sealed by a flush");
  EXPECT_TRUE(AbortFlush(*head, flush->flush_id).ok());
  ASSERT_TRUE(ApplyStep(2, Marks(), Rate(1)).ok());
  EXPECT_EQ(Weight(), -8);
}

TEST_F(StepTest, ArgumentsAreCheckedByName) {
  ExpectError(ApplyStep(1, {}, Rate(-1)).status(), absl::StatusCode::kInvalidArgument,
              "learning_rate is -1; it must be in [0, 1e18]");
  EXPECT_EQ(head->Info().generation, 1U);
}

TEST_F(StepTest, ArgumentsThatLeaveFp32AreRefused) {
  ExpectError(ApplyStep(1, {}, Rate(1e39)).status(), absl::StatusCode::kInvalidArgument,
              "learning_rate is 1e+39; it must be in [0, 1e18]");
  StepRequest scaled = Rate(1);
  scaled.gradient_scale = 1e39;
  ExpectError(ApplyStep(1, {}, scaled).status(), absl::StatusCode::kInvalidArgument,
              "gradient_scale is 1e+39; it must be finite in fp32");
  EXPECT_EQ(head->Info().generation, 1U);
}

TEST_F(StepTest, AHeadWithoutWeightsIsNotStepped) {
  HeadConfig config = head->config();
  config.name = "empty";
  head = *engine->CreateHead(config);
  ExpectError(ApplyStep(1, {}, Rate(1)).status(), absl::StatusCode::kFailedPrecondition,
              "head empty has no weights yet");
}

TEST_F(StepTest, WeightsThatWereCommittedBeforeAreTheOnesThatAreStepped) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 2));
  gate.AwaitArrival();
  const std::string write = *head->BeginWrite("w", Head::Replace::kNo, RandomId());
  const std::vector<float> ones(static_cast<size_t>(head->config().elements()), 1.0f);
  ASSERT_TRUE((*head->FindWrite(write))
                  ->Write(0, kVocab, kernels::DataType::kFloat32,
                          {reinterpret_cast<const char*>(ones.data()), ones.size() * sizeof(float)})
                  .ok());
  std::promise<uint64_t> published;
  head->CommitWrite(write, [&](const absl::StatusOr<uint64_t>& version) { published.set_value(*version); });
  std::promise<absl::StatusOr<StepResult>> answer;
  head->ApplyStep(1, Marks(), Rate(1),
                  [&](const absl::StatusOr<StepResult>& step) { answer.set_value(step); });
  gate.LetThrough();
  EXPECT_EQ(Await("weights to be published", published), 2U);
  EXPECT_EQ(Await("the answer", answer)->weight_version, 3U);
  EXPECT_EQ(Weight(), -1);
}

TEST_F(StepTest, AHeadThatTeachesHasTheNewVersion) {
  Submit(Attach(Open("c"), std::make_shared<RecordingListener>()), MakeChunk(1, 2));
  ASSERT_TRUE(ApplyStep(1, Marks(), Rate(1)).ok());
  HeadConfig config = head->config();
  config.name = "student";
  const std::shared_ptr<Head> student = *engine->CreateHead(config);
  WriteWeights(*student);
  const absl::StatusOr<OpenedSession> session = engine->OpenSession("student", {"s", 0, 1});
  const LaneAttachment lane = *student->AttachLane(session->info.session_id, 0, listener_);
  Chunk chunk = MakeChunk(1, 1);
  chunk.options.distillation = ChunkDistillation{.teacher = "h"};
  chunk.teacher_hidden = Payload::Of(std::string(kHidden * 4, '\0'));
  EXPECT_EQ(*student->Submit(lane, chunk, [] {}), Head::Submission::kTaken);
  EXPECT_EQ(listener_->AwaitAnswers(1)[0].teacher_weight_version, 2U);
}

TEST_F(StepTest, ADrainTakesNoNewStepOrFlushAndFinishesWhatIsUnderWay) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 2));
  gate.AwaitArrival();
  const std::vector<SessionMarks> marks = Marks();
  std::promise<absl::StatusOr<StepResult>> answer;
  head->ApplyStep(1, marks, Rate(1), [&](const absl::StatusOr<StepResult>& step) { answer.set_value(step); });
  engine->BeginDrain();
  gate.LetThrough();
  ASSERT_TRUE(Await("the answer", answer).ok());
  EXPECT_TRUE(ApplyStep(1, marks, Rate(1)).ok()) << "what was done is still told";
  EXPECT_EQ(ApplyStep(2, {}, Rate(1)).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(BeginFlush(2, {}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(head->Info().generation, 2U);
  EXPECT_EQ(head->Info().window_state, WindowState::kOpen);
}

TEST_F(StepTest, ADeviceThatFailsEndsTheHeadAndNothingIsAnswered) {
  Submit(Attach(Open("c"), listener_), MakeChunk(1, 2));
  engine->WaitIdle();
  const std::vector<SessionMarks> marks = Marks();
  gate.Fail();
  EXPECT_EQ(ApplyStep(1, marks, Rate(1)).status().code(), absl::StatusCode::kInternal);
  EXPECT_FALSE(ApplyStep(1, marks, Rate(1)).ok());
  EXPECT_EQ(head->Info().weight_version, 1U);
  EXPECT_EQ(head->Info().generation, 1U);
  EXPECT_TRUE(listener_->ended().has_value());
}

TEST_F(StepTest, AHeadThatIsDeletedMeanwhileIsNotStepped) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 2));
  gate.AwaitArrival();
  std::promise<absl::StatusOr<StepResult>> answer;
  head->ApplyStep(1, Marks(), Rate(1),
                  [&](const absl::StatusOr<StepResult>& step) { answer.set_value(step); });
  ASSERT_TRUE(engine->DeleteHead("h", Engine::DiscardGradient::kYes).ok());
  gate.LetThrough();
  EXPECT_EQ(Await("the answer", answer).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(StepTest, StatsTellOfTheGradientAndLeaveItAsItIs) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 3));
  gate.AwaitArrival();
  std::promise<absl::StatusOr<Head::WindowStats>> answer;
  head->ReadStats(1, Marks(), 2,
                  [&](const absl::StatusOr<Head::WindowStats>& stats) { answer.set_value(stats); });
  EXPECT_EQ(head->Info().window_state, WindowState::kOpen) << "chunks go on";
  gate.LetThrough();
  const absl::StatusOr<Head::WindowStats> stats = Await("the answer", answer);
  ASSERT_TRUE(stats.ok()) << stats.status();
  EXPECT_DOUBLE_EQ(stats->gradient.norm, 6 * std::sqrt(8.0));
  EXPECT_EQ(stats->gradient.largest, 6);
  EXPECT_EQ(stats->gradient.non_finite, 0);
  EXPECT_EQ(stats->window_tokens, 1U);
  Submit(lane, MakeChunk(2, 1));
  EXPECT_EQ(ReadStats(1, {})->gradient.largest, 4) << "without marks: of what is there";
  EXPECT_EQ(GradientSum(), 4);
}

TEST_F(StepTest, StatsAreRefusedLikeStepsAre) {
  Submit(Attach(Open("c"), listener_), MakeChunk(1, 3));
  std::vector<SessionMarks> marks = Marks();
  marks[0].lanes[0].accepted = 7;
  ExpectError(ReadStats(1, marks).status(), absl::StatusCode::kFailedPrecondition, "marks name accepted 7");
  EXPECT_EQ(ReadStats(2, {}).status().code(), absl::StatusCode::kAborted);
  ExpectError(ReadStats(1, {}, std::nan("")).status(), absl::StatusCode::kInvalidArgument, "gradient_scale");
  const absl::StatusOr<FlushInfo> flush = BeginFlush(1, Marks());
  ExpectError(ReadStats(1, {}).status(), absl::StatusCode::kFailedPrecondition, "sealed by a flush");
}

TEST_F(StepTest, StatsBehindAStepAreOfNoWindowThatThereIs) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 3));
  gate.AwaitArrival();
  std::promise<absl::StatusOr<Head::WindowStats>> answer;
  head->ApplyStep(1, Marks(), Rate(1), [](const absl::StatusOr<StepResult>&) {});
  head->ReadStats(1, Marks(), 1,
                  [&](const absl::StatusOr<Head::WindowStats>& stats) { answer.set_value(stats); });
  gate.LetThrough();
  EXPECT_EQ(Await("the answer", answer).status().code(), absl::StatusCode::kAborted);
}

// Deterministic sessions

TEST_F(StepTest, GradientsOfDeterministicSessionsAreInIt) {
  std::vector<LaneAttachment> lanes;
  for (int32_t rank = 0; rank < 2; ++rank) {
    const absl::StatusOr<OpenedSession> opened =
        engine->OpenSession("h", {"d" + std::to_string(rank), rank, 1, Deterministic::kYes});
    ASSERT_TRUE(opened.ok()) << opened.status();
    lanes.push_back(Attach(opened->info.session_id, std::make_shared<RecordingListener>()));
  }
  const auto place = [](Chunk chunk, int64_t token) {
    chunk.window_token = token;
    return chunk;
  };
  Submit(lanes[0], place(MakeChunk(1, 2), 0));
  Submit(lanes[1], place(MakeChunk(1, 30), 0));
  Submit(Attach(Open("c"), listener_), MakeChunk(1, 500));
  EXPECT_EQ(ReadStats(1, Marks())->gradient.largest, 532);
  const absl::StatusOr<StepResult> step = ApplyStep(1, Marks(), Rate(1));
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->window_tokens, 3U);
  EXPECT_EQ(Weight(), -532);
  // The places of the next window begin anew, and its gradients are empty.
  Submit(lanes[1], place(MakeChunk(2, 4, 2), 0));
  EXPECT_EQ(GradientSum(), 4);
}

// Heads of other kinds

class StepBiasTest : public StepTest {
 protected:
  static HeadConfig Config() {
    HeadConfig config = WithOptimizer();
    config.bias = true;
    config.optimizer.kind = OptimizerKind::kAdamW;
    config.optimizer.weight_decay = 0.25;
    return config;
  }
  StepBiasTest() : StepTest(Config()) {}
};

TEST_F(StepBiasTest, WhatAStepSaysOtherwiseCountsForThatStepAlone) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, MakeChunk(1, 4));
  const absl::StatusOr<StepResult> first =
      ApplyStep(1, Marks(), {.learning_rate = 1, .weight_decay = 0.0, .beta1 = 0.5});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_DOUBLE_EQ(first->stats.bias_norm, 8 * std::sqrt(4.0));
  EXPECT_EQ(Weight(), -4);
  ASSERT_TRUE(ApplyStep(2, {}, Rate(1))->skipped);
  EXPECT_EQ(Weight(), -4) << "neither weight decay nor the moment is at work without a gradient";
  Submit(lane, MakeChunk(2, 0, 3));
  EXPECT_EQ(ApplyStep(3, Marks(), Rate(1))->step, 2);
  EXPECT_EQ(Weight(), -7);  // -4 * (1 - 0.25) - the moment, 4: a gradient of zeros is one
}

class NoOptimizerTest : public StepTest {
 protected:
  NoOptimizerTest() : StepTest(HeadConfig()) {}
};

TEST_F(NoOptimizerTest, AHeadWithoutAnOptimizerSaysSo) {
  ExpectError(ApplyStep(1, {}, Rate(1)).status(), absl::StatusCode::kFailedPrecondition,
              "head h was created without an optimizer");
  EXPECT_TRUE(ReadStats(1, {}).ok());
}

TEST_F(NoOptimizerTest, AFrozenHeadHasNoGradient) {
  HeadConfig config = head->config();
  config.name = "frozen";
  config.weight_gradients = WeightGradients::kFrozen;
  head = *engine->CreateHead(config);
  ExpectError(ApplyStep(1, {}, Rate(1)).status(), absl::StatusCode::kFailedPrecondition, "it is frozen");
  ExpectError(ReadStats(1, {}).status(), absl::StatusCode::kFailedPrecondition, "it has no gradient");
}

}  // namespace
}  // namespace lossd::engine::step_test
