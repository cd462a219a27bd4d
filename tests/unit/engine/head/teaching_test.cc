// Heads that teach others: whose weights their chunks see, what happens to chunks whose teacher goes away,
// and to the teacher's memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/engine/common/errors.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/engine_fixture.h"

namespace lossd::engine::teaching_test {
namespace {

using lossd::testing::Await;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr char kField[] = "options.distillation.teacher";

class TeachingTest : public EngineFixture, public ::testing::Test {
 protected:
  explicit TeachingTest(FakeOptions device = {}) : EngineFixture({}, std::move(device)) {}

  std::shared_ptr<Head> MakeTeacher(const std::string& name = "t") {
    std::shared_ptr<Head> teacher = *engine->CreateHead(
        {.name = name, .vocab_size = kVocab, .hidden_size = 3, .weight_type = kernels::DataType::kFloat32});
    EXPECT_EQ(WriteWeights(*teacher), 1U);
    return teacher;
  }
  static Chunk Taught(uint64_t sequence, float scale, const std::string& teacher = "t") {
    Chunk chunk = MakeChunk(sequence, scale);
    chunk.options.distillation = ChunkDistillation{.teacher = teacher};
    const int64_t hidden = teacher == "h" ? kHidden : 3;
    chunk.teacher_hidden = Payload::Of(std::string(static_cast<size_t>(hidden * 4), '\0'));
    return chunk;
  }
  absl::Status Refused(const LaneAttachment& lane, Chunk chunk) const {
    return head->Submit(lane, chunk, [] {}).status();
  }
  // Until the device thread has done all that it can of what `head` was given.
  static void AwaitTasks(Head& head) {
    std::promise<void> done;
    float out = 0;
    head.ReadWeights(0, 0, kernels::DataType::kFloat32, {&out},
                     [&](const absl::StatusOr<uint64_t>&) { done.set_value(); });
    Await("what is read", done);
  }

  const std::shared_ptr<RecordingListener> listener_ = std::make_shared<RecordingListener>();
};

TEST_F(TeachingTest, AnswersTellTheSumOfDivergencesAndTheVersionOfTheTeachersWeights) {
  const std::shared_ptr<Head> teacher = MakeTeacher();
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, Taught(1, 3));
  listener_->AwaitAnswers(1);
  EXPECT_EQ(WriteWeights(*teacher), 2U);
  Chunk wanted = Taught(2, 5);
  wanted.options.returns.divergence = true;
  Submit(lane, wanted);
  Submit(lane, MakeChunk(3, 7));
  const std::vector<ChunkAnswer> answers = listener_->AwaitAnswers(3);
  EXPECT_EQ(answers[0].disposition, Disposition::kAccumulated);
  EXPECT_EQ(answers[0].teacher_weight_version, 1U);
  EXPECT_EQ(answers[0].weight_version, 1U);
  EXPECT_EQ(answers[0].divergence_sum, 1);
  EXPECT_TRUE(answers[0].returns.divergences.empty()) << "only their sum, unless they were wanted";
  EXPECT_EQ(answers[1].teacher_weight_version, 2U);
  EXPECT_THAT(answers[1].returns.divergences, SizeIs(4));
  EXPECT_EQ(answers[2].teacher_weight_version, 0U);
  EXPECT_EQ(answers[2].divergence_sum, 0);
  EXPECT_EQ(GradientSum(), 15);
}

TEST_F(TeachingTest, ATeacherThatIsNotThereOrHasNoWeightsIsNamed) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, Taught(1, 3));
  ASSERT_TRUE(engine->CreateHead({.name = "t", .vocab_size = kVocab, .hidden_size = 3}).ok());
  Submit(lane, Taught(2, 3));
  ASSERT_TRUE(engine->CreateHead({.name = "other", .vocab_size = kVocab + 1, .hidden_size = 3}).ok());
  WriteWeights(**engine->FindHead("other"));
  Submit(lane, Taught(3, 3, "other"));
  Submit(lane, MakeChunk(4, 7));
  const std::vector<ChunkAnswer> answers = listener_->AwaitAnswers(4);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(answers[i].disposition, Disposition::kRejected);
    EXPECT_EQ(FieldOf(answers[i].error), kField);
  }
  EXPECT_EQ(answers[0].error.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(answers[0].error.message()), HasSubstr("head 't' does not exist"));
  EXPECT_EQ(answers[1].error.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(answers[1].error.message()), HasSubstr("is t, which has no weights yet"));
  EXPECT_EQ(answers[2].error.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(answers[2].error.message()), HasSubstr("of vocab_size 5; head h has 4"));
  EXPECT_EQ(GradientSum(), 7);
  EXPECT_EQ(listener_->applied(), 4U);
}

// The client that lost the answer would take a repeat that is computed for one that is in the window.
TEST_F(TeachingTest, AChunkThatWasRejectedStaysRejectedWhenItsTeacherComes) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, Taught(1, 3));
  listener_->AwaitAnswers(1);
  MakeTeacher();
  Submit(lane, Taught(1, 3));
  Submit(lane, Taught(2, 5));
  Submit(lane, Taught(2, 5));
  const std::vector<ChunkAnswer> answers = listener_->AwaitAnswers(4);
  EXPECT_EQ(answers[1].disposition, Disposition::kRejected);
  EXPECT_THAT(std::string(answers[1].error.message()), HasSubstr("sequence 1 was rejected before"));
  EXPECT_EQ(answers[2].disposition, Disposition::kAccumulated);
  EXPECT_EQ(answers[3].disposition, Disposition::kRepeated);
  EXPECT_EQ(GradientSum(), 5);
}

TEST_F(TeachingTest, AChunkThatWasTakenIsNotCalledRejectedWhenItsTeacherIsGone) {
  MakeTeacher();
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, Taught(1, 3));
  listener_->AwaitAnswers(1);
  ASSERT_TRUE(engine->DeleteHead("t", Engine::DiscardGradient::kNo).ok());
  const absl::Status refused = Refused(lane, Taught(1, 3));
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FieldOf(refused), kField);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("sequence 1 was taken before and cannot be computed again"));
  EXPECT_EQ(GradientSum(), 3);
}

TEST_F(TeachingTest, ARepeatThatWaitsWhileItsTeacherIsDeletedEndsTheStream) {
  MakeTeacher();
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, Taught(1, 3));
  listener_->AwaitAnswers(1);
  gate.Hold();
  Submit(lane, MakeChunk(2, 5));
  gate.AwaitStarted(2);
  Submit(lane, Taught(1, 3));
  ASSERT_TRUE(engine->DeleteHead("t", Engine::DiscardGradient::kNo).ok());
  gate.LetThrough();
  engine->WaitIdle();
  ASSERT_TRUE(listener_->ended().has_value());
  EXPECT_EQ(listener_->ended()->code(), absl::StatusCode::kFailedPrecondition) << *listener_->ended();
  EXPECT_EQ(FieldOf(*listener_->ended()), kField);
  EXPECT_EQ(GradientSum(), 8);
}

TEST_F(TeachingTest, ChunksThatWaitWhileTheirTeacherIsDeletedAreRejectedAndStaySo) {
  MakeTeacher();
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 3));
  gate.AwaitArrival();
  Submit(lane, Taught(2, 5));
  Submit(lane, Taught(3, 7));
  ASSERT_TRUE(engine->DeleteHead("t", Engine::DiscardGradient::kNo).ok());
  MakeTeacher();  // another one
  gate.LetThrough();
  listener_->AwaitAnswers(3);
  Submit(lane, Taught(3, 7));
  const std::vector<ChunkAnswer> answers = listener_->AwaitAnswers(4);
  EXPECT_EQ(answers[0].disposition, Disposition::kAccumulated);
  for (size_t i = 1; i < 4; ++i) {
    EXPECT_EQ(answers[i].disposition, Disposition::kRejected);
    EXPECT_EQ(FieldOf(answers[i].error), kField);
  }
  EXPECT_EQ(answers[1].error.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(answers[1].error.message()), HasSubstr("head t was deleted"));
  EXPECT_EQ(GradientSum(), 3);
}

TEST_F(TeachingTest, ATeacherThatIsDeletedKeepsItsMemoryUntilItsLastBatchIsDone) {
  const int64_t before = engine->budget().reserved();
  const std::shared_ptr<Head> teacher = MakeTeacher();
  const int64_t with_teacher = engine->budget().reserved();
  ASSERT_GT(with_teacher, before);
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, Taught(1, 3));
  gate.AwaitArrival();
  std::atomic<bool> released = false;
  ASSERT_TRUE(engine->DeleteHead("t", Engine::DiscardGradient::kNo, [&] { released = true; }).ok());
  AwaitTasks(*teacher);
  EXPECT_FALSE(released);
  EXPECT_EQ(engine->budget().reserved(), with_teacher);
  gate.LetThrough();
  EXPECT_EQ(listener_->AwaitAnswers(1)[0].disposition, Disposition::kAccumulated);
  engine->WaitIdle();
  EXPECT_TRUE(released);
  EXPECT_EQ(engine->budget().reserved(), before);
  EXPECT_EQ(GradientSum(), 3);
}

TEST_F(TeachingTest, AHeadMayTeachItselfAndBeDeletedMeanwhile) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, Taught(1, 3, "h"));
  const ChunkAnswer answer = listener_->AwaitAnswers(1)[0];
  EXPECT_EQ(answer.disposition, Disposition::kAccumulated);
  EXPECT_EQ(answer.teacher_weight_version, 1U);
  gate.Hold();
  Submit(lane, Taught(2, 5, "h"));
  gate.AwaitStarted(2);
  std::promise<void> released;
  ASSERT_TRUE(engine->DeleteHead("h", Engine::DiscardGradient::kYes, [&] { released.set_value(); }).ok());
  gate.LetThrough();
  Await("the head to be released", released);
}

TEST_F(TeachingTest, ADeletedTeacherIsReleasedAlsoWhenTheDeviceFails) {
  MakeTeacher();
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, Taught(1, 3));
  gate.AwaitArrival();
  std::promise<void> released;
  ASSERT_TRUE(engine->DeleteHead("t", Engine::DiscardGradient::kNo, [&] { released.set_value(); }).ok());
  gate.Fail();
  gate.LetThrough();
  Await("the head to be released", released);
}

TEST_F(TeachingTest, RejectedChunksAreRememberedUpToALimitAndThenNotTaken) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  constexpr uint64_t kMost = 1024;
  for (uint64_t sequence = 1; sequence <= kMost; ++sequence) {
    Submit(lane, Taught(sequence, 3));
    listener_->AwaitAnswers(sequence);
  }
  const absl::Status refused = Refused(lane, Taught(kMost + 1, 3));
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("sequence 1025 was not taken"));
  Submit(lane, MakeChunk(kMost + 1, 5));
  EXPECT_EQ(GradientSum(), 5);
}

class GatheringTeachersTest : public TeachingTest {
 protected:
  GatheringTeachersTest() : TeachingTest({.rows_per_batch = 8}) {}
};

TEST_F(GatheringTeachersTest, ChunksOfOneTeacherAndTheSameNumbersGoTogetherAndOthersDoNot) {
  MakeTeacher("t");
  MakeTeacher("u");
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 1));
  gate.AwaitArrival();
  Submit(lane, Taught(2, 2, "t"));
  Submit(lane, Taught(3, 3, "t"));
  Submit(lane, Taught(4, 4, "u"));
  Chunk warm = Taught(5, 5, "u");
  warm.options.distillation->loss.temperature = 2;
  Submit(lane, warm);
  Submit(lane, MakeChunk(6, 6));
  gate.LetThrough();
  listener_->AwaitAnswers(6);
  EXPECT_THAT(gate.batches(), ::testing::ElementsAre(FakeBatch{1}, FakeBatch{2, 3}, FakeBatch{4},
                                                     FakeBatch{5}, FakeBatch{6}));
  EXPECT_EQ(gate.kinds()[3].teacher.distillation.temperature, 2);
  EXPECT_EQ(gate.kinds()[4].teacher.backend, nullptr);
}

class CrampedTest : public TeachingTest {
 protected:
  CrampedTest() : TeachingTest({.room_for_teachers = false}) {}
};

TEST_F(CrampedTest, AChunkWhoseTeacherTheDeviceHasNoRoomForIsRejected) {
  MakeTeacher();
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, Taught(1, 3));
  Submit(lane, MakeChunk(2, 5));
  const std::vector<ChunkAnswer> answers = listener_->AwaitAnswers(2);
  EXPECT_EQ(answers[0].disposition, Disposition::kRejected);
  EXPECT_EQ(answers[0].error.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldOf(answers[0].error), kField);
  EXPECT_EQ(GradientSum(), 5);
}

// For ThreadSanitizer: two heads that teach each other, with streams of their own, while one of them is
// written to, deleted and made again.
TEST_F(TeachingTest, HeadsTeachEachOtherWhileTheyAreWrittenAndDeleted) {
  constexpr uint64_t kChunks = 200;
  std::atomic<bool> over = false;
  std::thread owner([&] {
    while (!over) {
      const std::shared_ptr<Head> teacher = MakeTeacher();
      const absl::StatusOr<OpenedSession> session = engine->OpenSession("t", {"other", 0, 1});
      const auto listener = std::make_shared<RecordingListener>();
      const LaneAttachment lane = *teacher->AttachLane(session->info.session_id, 0, listener);
      for (uint64_t sequence = 1; sequence <= 5; ++sequence) {
        Chunk chunk = Taught(sequence, 1, "h");
        chunk.hidden_states = Payload::Of(std::string(3 * 4, '\0'));
        EXPECT_TRUE(teacher->Submit(lane, chunk, [] {}).ok());
      }
      WriteWeights(*teacher);
      EXPECT_TRUE(engine->DeleteHead("t", Engine::DiscardGradient::kYes).ok());
    }
  });
  const LaneAttachment lane = Attach(Open("c"), listener_);
  for (uint64_t sequence = 1; sequence <= kChunks; ++sequence) {
    Submit(lane, Taught(sequence, 1));
    if (sequence % 50 == 0) WriteWeights();
  }
  const std::vector<ChunkAnswer> answers = listener_->AwaitAnswers(kChunks);
  over = true;
  owner.join();
  float accumulated = 0;
  for (const ChunkAnswer& answer : answers) {
    if (answer.disposition == Disposition::kAccumulated) accumulated += 1;
  }
  EXPECT_EQ(GradientSum(), accumulated);
}

}  // namespace
}  // namespace lossd::engine::teaching_test
