// Which batches have their sums made over fixed segments, and heads on devices that cannot.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/checkpoint/checkpoint_store.h"
#include "server/engine/common/errors.h"
#include "tests/unit/engine/checkpoint/checkpoint_folder.h"
#include "tests/unit/engine/engine_fixture.h"

namespace lossd::engine::fixed_segments_test {
namespace {

using kernels::Segments;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

HeadConfig WithFixedSegments() {
  HeadConfig config;
  config.fixed_segments = true;
  return config;
}

class FixedSegmentsTest : public ::testing::Test, protected EngineFixture {
 protected:
  explicit FixedSegmentsTest(HeadConfig config = {}, bool device_has_them = true, EngineOptions options = {})
      : EngineFixture(std::move(options), {.fixed_segments = device_has_them}, std::move(config)) {}

  LaneAttachment OpenDeterministic() {
    const absl::StatusOr<OpenedSession> opened = engine->OpenSession("h", {"d", 0, 1, Deterministic::kYes});
    EXPECT_TRUE(opened.ok()) << opened.status();
    return Attach(opened->info.session_id, listener_);
  }
  static Chunk PlacedChunk(uint64_t sequence, int64_t place) {
    Chunk chunk = MakeChunk(sequence, 1);
    chunk.window_token = place;
    return chunk;
  }
  // Those of all batches so far, in order.
  std::vector<Segments> BatchSegments() {
    std::vector<Segments> segments;
    for (const BatchKey& kind : gate.kinds()) segments.push_back(kind.segments);
    return segments;
  }
  // A chunk of a deterministic session, one without dW, and the product that brings the first into dW.
  void ComputeDeterministic() {
    const LaneAttachment lane = OpenDeterministic();
    Submit(lane, PlacedChunk(1, 0));
    Chunk loss_only = MakeChunk(2, 1);
    loss_only.mode = ComputeMode::kLossOnly;
    Submit(lane, std::move(loss_only));
    listener_->AwaitAnswers(2);
    engine->WaitIdle();
    EXPECT_EQ(GradientSum(), 1);
    ASSERT_EQ(gate.kinds().size(), 3U);
    EXPECT_EQ(gate.kinds()[2].mode, ComputeMode::kWeightGradientOnly);
  }

  const std::shared_ptr<RecordingListener> listener_ = std::make_shared<RecordingListener>();
};

TEST_F(FixedSegmentsTest, ChunksOfDeterministicSessionsAndTheirPiecesAlwaysHaveThem) {
  ComputeDeterministic();
  EXPECT_THAT(BatchSegments(), Each(Segments::kFixed));
}

TEST_F(FixedSegmentsTest, OtherChunksHaveThemOnlyIfTheHeadSaysSo) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, MakeChunk(1, 1));
  Submit(lane, PlacedChunk(2, 0));  // whose place means nothing to the session
  listener_->AwaitAnswers(2);
  EXPECT_THAT(BatchSegments(), ElementsAre(Segments::kOfRanks, Segments::kOfRanks));
}

struct WithFolder {
  EngineOptions Options() const {
    EngineOptions options;
    options.checkpoints = *CheckpointStore::Open(folder.path());
    return options;
  }
  CheckpointFolder folder;
};

class RestoredFixedSegmentsTest : private WithFolder, public FixedSegmentsTest {
 protected:
  RestoredFixedSegmentsTest() : FixedSegmentsTest({}, /*device_has_them=*/true, Options()) {}
};

TEST_F(RestoredFixedSegmentsTest, PiecesOfARestoredWindowHaveThem) {
  Submit(OpenDeterministic(), PlacedChunk(1, 0));
  listener_->AwaitAnswers(1);
  engine->WaitIdle();
  ASSERT_TRUE(engine->SaveCheckpoint("h", "a").ok());
  ASSERT_TRUE(engine->RestoreCheckpoint("h", "a").ok());
  EXPECT_EQ(GradientSum(), 1);
  ASSERT_EQ(gate.kinds().size(), 2U);
  EXPECT_EQ(gate.kinds()[1].mode, ComputeMode::kWeightGradientOnly);
  EXPECT_THAT(BatchSegments(), Each(Segments::kFixed));
}

class HeadWithFixedSegmentsTest : public FixedSegmentsTest {
 protected:
  HeadWithFixedSegmentsTest() : FixedSegmentsTest(WithFixedSegments()) {}
};

TEST_F(HeadWithFixedSegmentsTest, EveryChunkHasThem) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, MakeChunk(1, 1));
  Chunk loss_only = MakeChunk(2, 1);
  loss_only.mode = ComputeMode::kLossOnly;
  Submit(lane, std::move(loss_only));
  listener_->AwaitAnswers(2);
  EXPECT_THAT(BatchSegments(), ElementsAre(Segments::kFixed, Segments::kFixed));
}

TEST_F(HeadWithFixedSegmentsTest, AHeadWithoutThemIsAnotherHead) {
  HeadConfig same = head->config();
  EXPECT_TRUE(engine->CreateHead(same).ok());
  same.fixed_segments = false;
  const absl::Status other = engine->CreateHead(same).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(other.message()), HasSubstr("exists as [4, 2] float32, fixed_segments; asked for"));
}

class DeviceWithoutFixedSegmentsTest : public FixedSegmentsTest {
 protected:
  DeviceWithoutFixedSegmentsTest() : FixedSegmentsTest({}, /*device_has_them=*/false) {}
};

TEST_F(DeviceWithoutFixedSegmentsTest, HeadsThatWantThemAreRefused) {
  HeadConfig config = WithFixedSegments();
  config.name = "wanting";
  config.vocab_size = kVocab;
  config.hidden_size = kHidden;
  const absl::Status refused = engine->CreateHead(config).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldOf(refused), "fixed_segments");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("device fake does not have them"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("create the head without"));
  EXPECT_EQ(engine->FindHead("wanting").status().code(), absl::StatusCode::kNotFound);
  config.fixed_segments = false;
  EXPECT_TRUE(engine->CreateHead(config).ok());
}

TEST_F(DeviceWithoutFixedSegmentsTest, DeterministicSessionsDoWithoutThem) {
  ComputeDeterministic();
  EXPECT_THAT(BatchSegments(), Each(Segments::kOfRanks));
}

}  // namespace
}  // namespace lossd::engine::fixed_segments_test
