#include "server/engine/head/parts/weight_store.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "server/engine/memory/host_buffer.h"

namespace lossd::engine::weight_store_test {
namespace {

HeadConfig Config() {
  HeadConfig config;
  config.name = "h";
  config.vocab_size = 2;
  config.hidden_size = 4;
  config.weight_type = kernels::DataType::kFloat32;
  return config;
}

// A write of this id and key, with all of its rows.
std::shared_ptr<StagedWrite> Write(const std::string& id, const std::string& key) {
  const HeadConfig config = Config();
  WeightBuffers buffers{*HostBuffer::Create(config.staged_bytes(), Commit::kNow),
                        *HostBuffer::Create(config.bias_bytes(), Commit::kNow)};
  auto write = std::make_shared<StagedWrite>(id, key, config, std::move(buffers));
  EXPECT_TRUE(write->Write(0, 2, kernels::DataType::kFloat32, std::string(32, '\0')).ok());
  return write;
}

class WeightStoreTest : public ::testing::Test {
 protected:
  // Commits the staged write and publishes it; its version.
  uint64_t Publish(const std::string& id) {
    CommitCallback done = [](const auto&) {};
    EXPECT_FALSE(store_.BeginCommit(id, done).answer.has_value());
    absl::StatusOr<uint64_t> answer = uint64_t{0};
    (void)store_.EndCommit(absl::OkStatus(), &answer);
    return *answer;
  }

  WeightStore store_{"h"};
};

TEST_F(WeightStoreTest, AWriteWithTheSameKeyJoinsAndAnotherIsRefusedUnlessItReplaces) {
  EXPECT_EQ(*store_.Admit("a", Replace::kNo), "");
  store_.Stage(Write("1", "a"));
  EXPECT_EQ(*store_.Admit("a", Replace::kNo), "1");
  EXPECT_TRUE(absl::IsFailedPrecondition(store_.Admit("b", Replace::kNo).status()));
  EXPECT_EQ(*store_.Admit("b", Replace::kYes), "");
}

TEST_F(WeightStoreTest, AWriteThatIsBeingPublishedIsNeitherReplacedNorDropped) {
  store_.Stage(Write("1", "a"));
  CommitCallback done = [](const auto&) {};
  const WeightStore::Commit commit = store_.BeginCommit("1", done);
  EXPECT_NE(commit.to_publish, nullptr);
  EXPECT_FALSE(commit.answer.has_value());
  EXPECT_TRUE(absl::IsFailedPrecondition(store_.Admit("b", Replace::kYes).status()));
  EXPECT_EQ(store_.Drop("1"), nullptr);
}

TEST_F(WeightStoreTest, NothingIsPublishedAnyMoreOnceTheHeadIsReleased) {
  store_.Stage(Write("1", "a"));
  CommitCallback done = [](const auto&) {};
  (void)store_.BeginCommit("1", done);
  EXPECT_EQ(store_.committing(), "1");
  EXPECT_NE(store_.Release(), nullptr);
  EXPECT_EQ(store_.committing(), "");
}

TEST_F(WeightStoreTest, ACommitThatIsRepeatedWaitsWithTheFirstAndIsAnsweredTheSameLater) {
  store_.Stage(Write("1", "a"));
  CommitCallback first = [](const auto&) {};
  CommitCallback second = [](const auto&) {};
  EXPECT_NE(store_.BeginCommit("1", first).to_publish, nullptr);
  EXPECT_EQ(store_.BeginCommit("1", second).to_publish, nullptr) << "it is posted once";
  absl::StatusOr<uint64_t> answer = uint64_t{0};
  EXPECT_EQ(store_.EndCommit(absl::OkStatus(), &answer).size(), 2U);
  EXPECT_EQ(*answer, 1U);
  CommitCallback later = [](const auto&) {};
  EXPECT_EQ(**store_.BeginCommit("1", later).answer, 1U);
}

TEST_F(WeightStoreTest, WeightsThatCouldNotBePublishedAreNoVersion) {
  store_.Stage(Write("1", "a"));
  CommitCallback done = [](const auto&) {};
  (void)store_.BeginCommit("1", done);
  absl::StatusOr<uint64_t> answer = uint64_t{0};
  (void)store_.EndCommit(absl::InternalError("lost"), &answer);
  EXPECT_FALSE(answer.ok());
  EXPECT_EQ(store_.version(), 0U);
  EXPECT_FALSE(store_.CheckPresent().ok());
}

TEST_F(WeightStoreTest, WhatARestoreUndidIsToldSo) {
  store_.Stage(Write("1", "a"));
  EXPECT_EQ(Publish("1"), 1U);
  store_.Stage(Write("2", "b"));
  CommitCallback waits = [](const auto&) {};
  (void)store_.BeginCommit("2", waits);
  const WeightStore::Undone undone = store_.UndoWrites();
  EXPECT_NE(undone.staged, nullptr);
  EXPECT_EQ(undone.waiters.size(), 1U);
  EXPECT_TRUE(absl::IsAborted(undone.status));
  store_.Install(
      {.version = 5, .optimizer_steps = 2, .last_committed_write = "", .last_committed_version = 0});
  EXPECT_TRUE(absl::IsAborted(store_.Find("1").status()));
  EXPECT_TRUE(absl::IsAborted(store_.Find("2").status()));
  EXPECT_TRUE(absl::IsNotFound(store_.Find("3").status()));
  EXPECT_EQ(store_.version(), 5U);
}

TEST_F(WeightStoreTest, AStepMakesAVersion) {
  store_.Stage(Write("1", "a"));
  (void)Publish("1");
  store_.NoteStep();
  EXPECT_EQ(store_.version(), 2U);
  EXPECT_EQ(store_.optimizer_steps(), 1);
}

}  // namespace
}  // namespace lossd::engine::weight_store_test
