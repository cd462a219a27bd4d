// What a teacher's new weights wait for in the tiles of those who learn from it, on a device that can be
// held.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <utility>

#include "server/engine/common/random_id.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/engine_fixture.h"

namespace lossd::engine::deterministic_recall_test {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kTeacherHidden = 3;

class DeterministicRecallTest : public EngineFixture, public ::testing::Test {
 protected:
  DeterministicRecallTest() : EngineFixture(Options()) {
    for (const char* const name : {"t", "other"}) {
      WriteWeights(**engine->CreateHead({.name = name,
                                         .vocab_size = kVocab,
                                         .hidden_size = kTeacherHidden,
                                         .weight_type = kernels::DataType::kFloat32}));
    }
    const absl::StatusOr<OpenedSession> opened = engine->OpenSession("h", {"d", 0, 1, Deterministic::kYes});
    EXPECT_TRUE(opened.ok()) << opened.status();
    lane_ = Attach(opened->info.session_id, listener_);
  }

  // Tiles of two tokens.
  static EngineOptions Options() {
    EngineOptions options;
    options.chunk_limits = {.max_chunk_bytes = 1 << 10, .max_chunk_tokens = 2};
    return options;
  }
  // Taught by this head; "": by none.
  static Chunk Taught(uint64_t sequence, int64_t place, int64_t tokens, float scale,
                      const std::string& teacher) {
    Chunk chunk = MakeChunk(sequence, scale);
    chunk.window_token = place;
    chunk.tokens = tokens;
    const auto bytes_of = [tokens](int64_t values) {
      return std::string(static_cast<size_t>(tokens * values * 4), '\0');
    };
    chunk.labels = bytes_of(2);
    chunk.hidden_states = Payload::Of(bytes_of(kHidden));
    if (teacher.empty()) return chunk;
    chunk.options.distillation = ChunkDistillation{.teacher = teacher};
    chunk.teacher_hidden = Payload::Of(bytes_of(kTeacherHidden));
    return chunk;
  }
  // Ready once "t" has new weights.
  std::future<void> BeginToWrite() {
    Head& teacher = **engine->FindHead("t");
    const std::string write = *teacher.BeginWrite(RandomId(), Head::Replace::kNo, RandomId());
    const std::string rows(static_cast<size_t>(teacher.config().weight_bytes()), '\0');
    EXPECT_TRUE((*teacher.FindWrite(write))->Write(0, kVocab, teacher.config().weight_type, rows).ok());
    auto published = std::make_shared<std::promise<void>>();
    teacher.CommitWrite(write, [published](const absl::StatusOr<uint64_t>&) { published->set_value(); });
    return published->get_future();
  }

  const std::shared_ptr<RecordingListener> listener_ = std::make_shared<RecordingListener>();
  LaneAttachment lane_;
};

// The teacher of what waits, "" being none.
class WaitingPieceTest : public DeterministicRecallTest, public ::testing::WithParamInterface<std::string> {};

INSTANTIATE_TEST_SUITE_P(Teachers, WaitingPieceTest, ::testing::Values("", "other", "t"));

TEST_P(WaitingPieceTest, ItGoesBeforeTheTilesThatAreClosedBehindIt) {
  Submit(lane_, Taught(1, 2, 1, 4, "t"));  // half of a tile
  listener_->AwaitAnswers(1);
  engine->WaitIdle();
  gate.Hold();
  Submit(lane_, Taught(2, 0, 2, 8, GetParam()));  // a tile, whose piece waits when the write is due
  gate.AwaitStarted(2);
  std::future<void> written = BeginToWrite();
  gate.LetThrough();
  testing::Await("weights to be published", std::move(written));
  engine->WaitIdle();
  EXPECT_THAT(gate.batches(), ElementsAre(FakeBatch{4}, FakeBatch{8}, FakeBatch{8}, FakeBatch{4}))
      << "two answers, and then the pieces in order of places";
  EXPECT_EQ(GradientSum(), 12);
}

TEST_F(DeterministicRecallTest, ATeacherWhoseRowsAreAllInTheGradientWaitsForNobody) {
  Submit(lane_, Taught(1, 0, 2, 4, "t"));
  listener_->AwaitAnswers(1);
  engine->WaitIdle();
  gate.Hold();
  Submit(lane_, Taught(2, 2, 1, 8, ""));
  gate.AwaitStarted(3);
  Submit(lane_, Taught(3, 3, 1, 8, "t"));
  head->DetachLane(lane_);  // so that the last one does not come after all
  std::future<void> written = BeginToWrite();
  EXPECT_EQ(written.wait_for(std::chrono::seconds(20)), std::future_status::ready)
      << "a chunk without a teacher is under way";
  gate.LetThrough();
  testing::Await("weights to be published", std::move(written));
}

}  // namespace
}  // namespace lossd::engine::deterministic_recall_test
