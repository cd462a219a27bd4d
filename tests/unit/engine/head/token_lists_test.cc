// Chunks with lists of tokens: what they share a batch with, and where they are refused.
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

namespace lossd::engine::token_lists_test {
namespace {

using ::testing::HasSubstr;

// With a list of so many tokens, from 0 on, the label among them.
Chunk WithList(uint64_t sequence, int32_t size) {
  Chunk chunk = EngineFixture::MakeChunk(sequence, 1);
  chunk.lists.use = ChunkLists::Use::kKept;
  const int64_t offsets[] = {0, size};
  chunk.lists.offsets.assign(reinterpret_cast<const char*>(offsets), sizeof(offsets));
  for (int32_t token = 0; token < size; ++token) {
    chunk.lists.tokens.append(reinterpret_cast<const char*>(&token), sizeof(token));
  }
  return chunk;
}

TEST(KeptTokens, ChunksWithListsShareNoBatchWithOthersOrWithMuchLongerLists) {
  EngineFixture fixture({}, {.rows_per_batch = 10});
  const auto listener = std::make_shared<RecordingListener>();
  const LaneAttachment lane = fixture.Attach(fixture.Open("c"), listener);
  fixture.gate.Hold();
  fixture.Submit(lane, EngineFixture::MakeChunk(1, 1));
  fixture.gate.AwaitArrival();
  fixture.Submit(lane, EngineFixture::MakeChunk(2, 1));
  fixture.Submit(lane, WithList(3, 1));
  fixture.Submit(lane, WithList(4, 1));
  fixture.Submit(lane, WithList(5, 2));
  fixture.gate.LetThrough();
  listener->AwaitAnswers(5);
  fixture.engine->WaitIdle();
  std::vector<int64_t> kinds;
  for (const BatchKey& kind : fixture.gate.kinds()) kinds.push_back(kind.lists.size_class);
  EXPECT_EQ(kinds, (std::vector<int64_t>{0, 0, 1, 2}));
}

// The same as soft targets of equal probabilities.
Chunk WithTargets(uint64_t sequence, int32_t size) {
  Chunk chunk = WithList(sequence, size);
  chunk.lists.use = ChunkLists::Use::kTargets;
  const float probability = 1.0f / static_cast<float>(size);
  for (int32_t token = 0; token < size; ++token) {
    chunk.lists.probabilities.append(reinterpret_cast<const char*>(&probability), sizeof(probability));
  }
  return chunk;
}

TEST(TargetLists, ChunksShareNoBatchWithKeptTokensNorWithOtherWeights) {
  EngineFixture fixture({}, {.rows_per_batch = 10});
  const auto listener = std::make_shared<RecordingListener>();
  const LaneAttachment lane = fixture.Attach(fixture.Open("c"), listener);
  fixture.gate.Hold();
  fixture.Submit(lane, EngineFixture::MakeChunk(1, 1));
  fixture.gate.AwaitArrival();
  fixture.Submit(lane, WithList(2, 2));
  fixture.Submit(lane, WithTargets(3, 2));
  fixture.Submit(lane, WithTargets(4, 2));
  Chunk other = WithTargets(5, 2);
  other.lists.label_weight = 0.5f;
  fixture.Submit(lane, other);
  other = WithTargets(6, 2);
  other.lists.weight = 0.25f;
  fixture.Submit(lane, other);
  fixture.gate.LetThrough();
  listener->AwaitAnswers(6);
  fixture.engine->WaitIdle();
  std::vector<float> weights;
  for (const BatchKey& kind : fixture.gate.kinds()) {
    if (kind.lists.use != ChunkLists::Use::kTargets) continue;
    weights.push_back(kind.lists.targets.weight);
    weights.push_back(kind.lists.targets.label_weight);
  }
  EXPECT_EQ(weights, (std::vector<float>{1.0f, 0.0f, 1.0f, 0.5f, 0.25f, 0.0f}));
  EXPECT_EQ(fixture.gate.kinds().size(), 5U);
}

TEST(TargetLists, AGroupOfDevicesAndAHeadOfFixedSegmentsRefuseThem) {
  HeadConfig fixed;
  fixed.fixed_segments = true;
  EngineFixture alone({}, {.fixed_segments = true}, fixed);
  EngineFixture group({}, {.group = {.ranks = {{}, {}}}});
  for (EngineFixture* fixture : {&alone, &group}) {
    const auto listener = std::make_shared<RecordingListener>();
    const LaneAttachment lane = fixture->Attach(fixture->Open("c"), listener);
    fixture->Submit(lane, WithTargets(1, 2));
    const ChunkAnswer answer = listener->AwaitAnswers(1)[0];
    EXPECT_EQ(answer.disposition, Disposition::kRejected);
    EXPECT_EQ(answer.error.code(), absl::StatusCode::kUnimplemented);
    EXPECT_EQ(FieldOf(answer.error), "token_inputs.target_lists");
    fixture->Submit(lane, EngineFixture::MakeChunk(2, 1));
    EXPECT_EQ(listener->AwaitAnswers(2)[1].disposition, Disposition::kAccumulated);
  }
}

// Their step is over the whole vocabulary anyway.
TEST(TargetLists, AListLongerThanKeptTokensMayBeIsTaken) {
  EngineFixture fixture({}, {.longest_list = 1});
  const auto listener = std::make_shared<RecordingListener>();
  const LaneAttachment lane = fixture.Attach(fixture.Open("c"), listener);
  fixture.Submit(lane, WithTargets(1, 2));
  EXPECT_EQ(listener->AwaitAnswers(1)[0].disposition, Disposition::kAccumulated);
}

TEST(KeptTokens, AGroupOfDevicesRefusesThem) {
  EngineFixture fixture({}, {.group = {.ranks = {{}, {}}}});
  const auto listener = std::make_shared<RecordingListener>();
  const LaneAttachment lane = fixture.Attach(fixture.Open("c"), listener);
  fixture.Submit(lane, WithList(1, 2));
  const ChunkAnswer answer = listener->AwaitAnswers(1)[0];
  EXPECT_EQ(answer.disposition, Disposition::kRejected);
  EXPECT_EQ(answer.error.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(FieldOf(answer.error), "token_inputs.kept_tokens");
  EXPECT_THAT(answer.error.message(), HasSubstr("several devices; use a server of one device"));
  fixture.Submit(lane, EngineFixture::MakeChunk(2, 1));
  EXPECT_EQ(listener->AwaitAnswers(2)[1].disposition, Disposition::kAccumulated);
}

// Gradients of a deterministic session may still have to be computed when it is saved.
TEST(KeptTokens, ACheckpointWithListsIsRefusedWhereTheyCannotBeComputed) {
  const CheckpointFolder folder;
  const auto options = [&folder] {
    EngineOptions with_folder;
    with_folder.checkpoints = *CheckpointStore::Open(folder.path());
    return with_folder;
  };
  {
    EngineFixture fixture(options());
    const auto opened = fixture.engine->OpenSession("h", {"d", 0, 1, Deterministic::kYes});
    ASSERT_TRUE(opened.ok()) << opened.status();
    const auto listener = std::make_shared<RecordingListener>();
    const LaneAttachment lane = fixture.Attach(opened->info.session_id, listener);
    Chunk chunk = WithList(1, 2);
    chunk.window_token = 0;
    fixture.Submit(lane, std::move(chunk));
    ASSERT_EQ(listener->AwaitAnswers(1)[0].disposition, Disposition::kAccumulated);
    ASSERT_TRUE(fixture.engine->SaveCheckpoint("h", "a").ok());
  }
  const auto restore = [&options](FakeOptions device) {
    EngineFixture fixture(options(), std::move(device));
    return fixture.engine->RestoreCheckpoint("h", "a").status();
  };
  absl::Status refused = restore({.longest_list = 1});
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("a list of 2 tokens"));
  refused = restore({.group = {.ranks = {{}, {}}}});
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("several devices"));
  EXPECT_TRUE(restore({}).ok());
}

// Its repeat would otherwise pass for one that was taken.
TEST(KeptTokens, WhatOneServerCouldNotComputeStaysRejectedAtAnother) {
  const CheckpointFolder folder;
  const auto options = [&folder] {
    EngineOptions with_folder;
    with_folder.checkpoints = *CheckpointStore::Open(folder.path());
    return with_folder;
  };
  const auto answer = [](EngineFixture& fixture) {
    const auto listener = std::make_shared<RecordingListener>();
    fixture.Submit(fixture.Attach(fixture.Open("c"), listener), WithList(1, 2));
    return listener->AwaitAnswers(1)[0];
  };
  {
    EngineFixture small(options(), {.longest_list = 1});
    EXPECT_EQ(answer(small).error.code(), absl::StatusCode::kInvalidArgument);
    ASSERT_TRUE(small.engine->SaveCheckpoint("h", "a").ok());
  }
  EngineFixture large(options());
  ASSERT_TRUE(large.engine->RestoreCheckpoint("h", "a").ok());
  const ChunkAnswer repeat = answer(large);
  EXPECT_EQ(repeat.disposition, Disposition::kRejected);
  EXPECT_THAT(repeat.error.message(), HasSubstr("sequence 1 was rejected before"));
}

TEST(KeptTokens, AListThatTheWorkspaceHasNoRoomForIsRejectedAlone) {
  EngineFixture fixture({}, {.longest_list = 1});
  const auto listener = std::make_shared<RecordingListener>();
  const LaneAttachment lane = fixture.Attach(fixture.Open("c"), listener);
  fixture.Submit(lane, WithList(1, 2));
  const ChunkAnswer answer = listener->AwaitAnswers(1)[0];
  EXPECT_EQ(answer.error.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldOf(answer.error), "token_inputs.kept_tokens");
  EXPECT_THAT(answer.error.message(), HasSubstr("a list of 2 tokens"));
  EXPECT_THAT(answer.error.message(), HasSubstr("raise --workspace_bytes"));
  fixture.Submit(lane, WithList(2, 1));
  EXPECT_EQ(listener->AwaitAnswers(2)[1].disposition, Disposition::kAccumulated);
}

TEST(KeptTokens, AFrozenHeadTakesThem) {
  HeadConfig frozen;
  frozen.weight_gradients = WeightGradients::kFrozen;
  EngineFixture fixture({}, {}, frozen);
  const auto listener = std::make_shared<RecordingListener>();
  const LaneAttachment lane = fixture.Attach(fixture.Open("c"), listener);
  fixture.Submit(lane, WithList(1, 2));
  EXPECT_EQ(listener->AwaitAnswers(1)[0].disposition, Disposition::kAccumulated);
}

}  // namespace
}  // namespace lossd::engine::token_lists_test
