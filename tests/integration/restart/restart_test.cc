// A client's view of a server that is drained, or killed, and started again with --restore.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "lossd/client.h"
#include "tests/integration/client_resume/numbered_chunks.h"
#include "tests/integration/restart/lossd_process.h"
#include "tests/support/wait.h"

namespace lossd::restart_test {
namespace {

using ::testing::HasSubstr;
using testing::kChunkBytes;
using testing::kChunks;
using testing::kNumberedHidden;
using testing::kNumberedVocab;
using testing::kTokensPerChunk;
using testing::LossdProcess;
using testing::NumberedBatch;
using testing::NumberedHead;
using testing::NumberedWeights;

constexpr int64_t kBatchTokens = kChunks * kTokensPerChunk;

class RestartTest : public ::testing::Test {
 protected:
  RestartTest() { Connect(); }

  void Connect() {
    auto connected = Client::Connect(server_.target(), {});
    ASSERT_TRUE(connected.ok()) << connected.status();
    client_ = *std::move(connected);
    HeadConfig config = NumberedHead();
    config.optimizer.kind = OptimizerKind::kAdamW;
    auto head = client_->CreateHead(config);
    ASSERT_TRUE(head.ok()) << head.status();
    head_ = std::make_unique<Head>(*std::move(head));
    ASSERT_TRUE(head_->WriteWeights(DataType::kFloat32, NumberedWeights().data()).ok());
  }
  Session Open(const std::string& client_key, int32_t lanes = 1,
               Deterministic deterministic = Deterministic::kNo) {
    auto session = head_->OpenSession({.client_key = client_key,
                                       .chunk_bytes = kChunkBytes,
                                       .lanes = lanes,
                                       .deterministic = deterministic});
    EXPECT_TRUE(session.ok()) << session.status();
    return *std::move(session);
  }
  static absl::Status Compute(Session& session, int64_t first = 0) {
    NumberedBatch batch(first);
    return session.Compute(batch.batch(), batch.outputs()).status();
  }
  // The window, which is over then.
  std::vector<float> Flush(int64_t tokens) {
    std::vector<float> gradient(kNumberedVocab * kNumberedHidden);
    const auto info = head_->Info();
    EXPECT_TRUE(info.ok()) << info.status();
    const auto result = head_->Flush({}, info->sessions, gradient.data());
    EXPECT_TRUE(result.ok()) << result.status();
    if (result.ok()) {
      EXPECT_EQ(static_cast<int64_t>(result->window_tokens), tokens);
    }
    return gradient;
  }
  std::string Incarnation() { return client_->Status()->incarnation; }

  LossdProcess server_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Head> head_;
};

// Batches one after the other, while the server is drained and started again and again beneath them.
TEST_F(RestartTest, DrainsInTheMiddleOfBatchesLoseNothingAndCountNothingTwice) {
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  SCOPED_TRACE(seed);
  const std::string incarnation = Incarnation();
  struct Case {
    int32_t lanes;
    Deterministic deterministic;
  };
  for (const auto& [lanes, deterministic] :
       {Case{1, Deterministic::kNo}, Case{3, Deterministic::kNo}, Case{3, Deterministic::kYes}}) {
    SCOPED_TRACE(lanes);
    Session session = Open("", lanes, deterministic);
    std::atomic<bool> stop = false;
    std::atomic<int64_t> batches = 0;
    absl::Status status;
    std::thread trainer([&] {
      while (!stop && status.ok()) {
        status = Compute(session);
        ++batches;
      }
    });
    for (int round = 0; round < 3; ++round) {
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 100));
      EXPECT_EQ(server_.Terminate(), 0);
      server_.Start();
    }
    stop = true;
    trainer.join();
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_GT(session.reconnects(), 0);
    EXPECT_EQ(Incarnation(), incarnation);
    const int64_t count = batches;
    const std::vector<float> gradient = Flush(count * kBatchTokens);
    for (int64_t i = 0; i < count; ++i) ASSERT_TRUE(Compute(session).ok());
    const std::vector<float> undisturbed = Flush(count * kBatchTokens);
    if (lanes == 1 || deterministic == Deterministic::kYes) {
      EXPECT_TRUE(gradient == undisturbed);
    }
    ASSERT_TRUE(session.Close().ok());
  }
}

// What was staged goes with the old process; the caller holds it all.
TEST_F(RestartTest, AWriteOfAllWeightsGoesOnAcrossADrain) {
  std::vector<float> weights = NumberedWeights();
  for (float& weight : weights) weight *= 2;
  const auto impatient =
      Client::Connect(server_.target(), {.reconnect_timeout = std::chrono::milliseconds(0)});
  ASSERT_TRUE(impatient.ok()) << impatient.status();
  std::thread restart;
  const auto version =
      head_->WriteWeights(DataType::kFloat32, weights.data(), [&](int64_t done, int64_t total) {
        if (done < total || restart.joinable()) return;
        restart = std::thread([this] {
          EXPECT_EQ(server_.Terminate(), 0);
          server_.Start();
        });
        // It takes no commit after that.
        testing::Await("the drain", [&] { return !(*impatient)->Status().ok(); });
      });
  if (restart.joinable()) restart.join();
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(*version, 2U);
  std::vector<float> read(weights.size());
  ASSERT_TRUE(head_->ReadWeights(DataType::kFloat32, read.data()).ok());
  EXPECT_TRUE(read == weights);
}

TEST_F(RestartTest, AFlushAndAStepGoOnAcrossADrain) {
  Session session = Open("c");
  ASSERT_TRUE(Compute(session).ok());
  std::vector<float> gradient(kNumberedVocab * kNumberedHidden);
  const SessionMarks marks = session.marks();
  const auto flush = head_->Flush({.commit = false}, {&marks, 1}, gradient.data());
  ASSERT_TRUE(flush.ok()) << flush.status();
  EXPECT_EQ(server_.Terminate(), 0);
  server_.Start();
  ASSERT_TRUE(head_->CommitFlush(flush->flush_id).ok());
  ASSERT_TRUE(Compute(session).ok());
  EXPECT_EQ(server_.Terminate(), 0);
  server_.Start();
  const SessionMarks now = session.marks();
  const auto step = head_->ApplyStep({.learning_rate = 0.01}, {&now, 1});
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->window_tokens, static_cast<uint64_t>(kBatchTokens));
  EXPECT_EQ(server_.Terminate(), 0);
  server_.Start();
  EXPECT_EQ(head_->Info()->weight_version, 2U);
  EXPECT_TRUE(Compute(session).ok());
}

TEST_F(RestartTest, AfterAKillTheClientLearnsWhatToReplayAndTheMarksSayFromWhere) {
  Session session = Open("trainer");
  NumberedBatch batch(0);
  Batch half = batch.batch();
  half.labels = half.labels.first(half.labels.size() / 2);
  ASSERT_TRUE(session.Compute(half, {}).ok());
  ASSERT_TRUE(head_->SaveCheckpoint("half").ok());
  ASSERT_TRUE(Compute(session, kChunks / 2).ok());
  const std::string incarnation = Incarnation();
  server_.Kill();
  server_.Start();
  const absl::Status lost = Compute(session);
  EXPECT_TRUE(IsWindowLost(lost)) << lost;
  EXPECT_THAT(std::string(lost.message()), HasSubstr("replay since generation 1"));
  EXPECT_NE(Incarnation(), incarnation);

  // A session that is opened again under its key stands where the checkpoint does.
  Session again = Open("trainer");
  EXPECT_EQ(again.marks().lanes.at(0).accepted, static_cast<uint64_t>(kChunks / 2));
  // A client that replays everything under another key cannot flush it as if it were alone.
  {
    Session naive = Open("naive");
    NumberedBatch one(kChunks - 1);
    ASSERT_TRUE(naive.Compute(one.batch(), one.outputs()).ok());
    std::vector<float> gradient(kNumberedVocab * kNumberedHidden);
    const SessionMarks marks = naive.marks();
    EXPECT_EQ(head_->Flush({}, {&marks, 1}, gradient.data()).status().code(),
              absl::StatusCode::kFailedPrecondition);
  }
}

TEST_F(RestartTest, TheRestAfterAKillMakesTheSameWindow) {
  Session session = Open("trainer");
  ASSERT_TRUE(Compute(session).ok());
  const std::vector<float> undisturbed = Flush(kBatchTokens);
  NumberedBatch batch(0);
  Batch half = batch.batch();
  half.labels = half.labels.first(half.labels.size() / 2);
  ASSERT_TRUE(session.Compute(half, {}).ok());
  ASSERT_TRUE(head_->SaveCheckpoint("half").ok());
  ASSERT_TRUE(Compute(session, kChunks / 2).ok());
  server_.Kill();
  server_.Start();
  Session again = Open("trainer");
  ASSERT_TRUE(Compute(again, kChunks / 2).ok());
  EXPECT_TRUE(Flush(kBatchTokens) == undisturbed);
}

// Steps are undone by a kill even where the window was empty: a silent change of weights would be worse.
TEST_F(RestartTest, StepsThatAKillHasUndoneAreALostWindow) {
  Session session = Open("trainer");
  ASSERT_TRUE(head_->SaveCheckpoint("start").ok());
  ASSERT_TRUE(Compute(session).ok());
  const SessionMarks marks = session.marks();
  ASSERT_TRUE(head_->ApplyStep({.learning_rate = 0.01}, {&marks, 1}).ok());
  server_.Kill();
  server_.Start();
  EXPECT_TRUE(IsWindowLost(Compute(session)));
}

// A trainer pairs the checkpoint with a state of its own: the one that the server has gone back to is not it.
TEST_F(RestartTest, ASaveThatMeetsARestoredHeadSavesNothing) {
  Session session = Open("trainer");
  ASSERT_TRUE(head_->SaveCheckpoint("a").ok());
  ASSERT_TRUE(Compute(session).ok());
  const SessionMarks marks = session.marks();
  ASSERT_TRUE(head_->ApplyStep({.learning_rate = 0.01}, {&marks, 1}).ok());
  std::thread restart([this] {
    server_.Kill();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    server_.Start();
  });
  absl::Status saved;
  testing::Await("a save to meet the restart",
                 [&] { return !(saved = head_->SaveCheckpoint("b").status()).ok(); });
  restart.join();
  EXPECT_TRUE(IsWindowLost(saved)) << saved;
  Session again = Open("trainer");
  EXPECT_TRUE(head_->SaveCheckpoint("c").ok());
  ASSERT_TRUE(client_->RestoreCheckpoint("numbered", "a").ok());
  EXPECT_TRUE(IsWindowLost(head_->SaveCheckpoint("d").status()));
  EXPECT_TRUE(client_->GetHead("numbered")->SaveCheckpoint("e").ok())
      << "who knows nothing takes what there is";
}

// The trainer goes back to its own checkpoint, and the server, which is killed once more, to the newest: that
// of a drain since, where the session had come to the same marks with other chunks.
TEST_F(RestartTest, MarksOfAnotherPastEndNoWindowAlthoughTheirNumbersAreThose) {
  const auto send_half = [](Session& session, int64_t first) {
    NumberedBatch batch(first);
    Batch half = batch.batch();
    half.labels = half.labels.first(static_cast<size_t>(kBatchTokens / 2));
    EXPECT_TRUE(session.Compute(half, {}).ok());
  };
  std::vector<float> gradient(kNumberedVocab * kNumberedHidden);
  const auto expect_lost = [this, &gradient](const SessionMarks& marks) {
    const auto stats = head_->GradientStats({&marks, 1});
    EXPECT_TRUE(IsWindowLost(stats.status())) << stats.status();
    const auto flush = head_->Flush({}, {&marks, 1}, gradient.data());
    EXPECT_TRUE(IsWindowLost(flush.status())) << flush.status();
    const auto discard = head_->Discard({&marks, 1});
    EXPECT_TRUE(IsWindowLost(discard.status())) << discard.status();
    const auto step = head_->ApplyStep({.learning_rate = 0.01}, {&marks, 1});
    EXPECT_TRUE(IsWindowLost(step.status())) << step.status();
    const auto info = head_->Info();
    ASSERT_TRUE(info.ok()) << info.status();
    EXPECT_EQ(info->generation, 1U);
    EXPECT_EQ(info->window_tokens, static_cast<uint64_t>(kBatchTokens / 2));
    EXPECT_EQ(info->sessions.at(0).lanes.at(0).accepted, marks.lanes.at(0).accepted);
  };
  Session first = Open("trainer");
  ASSERT_TRUE(head_->SaveCheckpoint("a").ok());
  send_half(first, 0);
  ASSERT_TRUE(head_->SaveCheckpoint("b").ok());
  EXPECT_EQ(server_.Terminate(), 0);
  server_.Start();

  ASSERT_TRUE(client_->RestoreCheckpoint("numbered", "a").ok());
  Session second = Open("trainer");
  send_half(second, kChunks / 2);
  server_.Kill();
  server_.Start();
  expect_lost(second.marks());

  // Likewise if somebody restores it while the server runs.
  ASSERT_TRUE(client_->RestoreCheckpoint("numbered", "a").ok());
  Session third = Open("trainer");
  send_half(third, kChunks / 2);
  ASSERT_TRUE(client_->RestoreCheckpoint("numbered", "b").ok());
  expect_lost(third.marks());
  EXPECT_TRUE(IsWindowLost(Compute(third)));

  // Who opens the session there knows what it stands for.
  Session fourth = Open("trainer");
  const SessionMarks marks = fourth.marks();
  ASSERT_TRUE(head_->Flush({}, {&marks, 1}, gradient.data()).ok());
}

TEST_F(RestartTest, ARestoreOfALiveHeadEndsSessionsThatAreAheadOfItAndNoOthers) {
  Session ahead = Open("ahead");
  Session idle = Open("idle");
  ASSERT_TRUE(Compute(ahead).ok());
  ASSERT_TRUE(Compute(idle).ok());
  const auto saved = head_->SaveCheckpoint("a");
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(saved->info.window_tokens, static_cast<uint64_t>(2 * kBatchTokens));
  ASSERT_TRUE(Compute(ahead).ok());
  Session later = Open("later");
  ASSERT_TRUE(Compute(later).ok());
  const auto restored = client_->RestoreCheckpoint("numbered", "");
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(restored->tag, "a");
  const absl::Status lost = Compute(ahead);
  EXPECT_TRUE(IsWindowLost(lost)) << lost;
  EXPECT_THAT(std::string(lost.message()), HasSubstr("restored from a checkpoint"));
  EXPECT_TRUE(IsWindowLost(Compute(later)));
  EXPECT_TRUE(Compute(idle).ok()) << "it stands where the checkpoint does";
  Session again = Open("ahead");
  ASSERT_TRUE(Compute(again).ok());
  Flush(4 * kBatchTokens);
  ASSERT_TRUE(Compute(again).ok()) << "in the next window";
  const auto list = client_->ListCheckpoints();
  ASSERT_TRUE(list.ok());
  ASSERT_EQ(list->size(), 1U);
  EXPECT_EQ(list->at(0).head, "numbered");
}

// It knows then which windows of that past are over.
TEST_F(RestartTest, WhoHasASessionThatWentOnOverARestoreHasHeardOfIt) {
  Session session = Open("trainer");
  ASSERT_TRUE(Compute(session).ok());
  ASSERT_TRUE(head_->SaveCheckpoint("a").ok());
  ASSERT_TRUE(client_->RestoreCheckpoint("numbered", "a").ok());
  ASSERT_TRUE(Compute(session).ok());
  const auto saved = head_->SaveCheckpoint("b");
  EXPECT_TRUE(saved.ok()) << saved.status();
  const SessionMarks marks = session.marks();
  std::vector<float> gradient(kNumberedVocab * kNumberedHidden);
  ASSERT_TRUE(head_->Flush({}, {&marks, 1}, gradient.data()).ok());
  ASSERT_TRUE(client_->RestoreCheckpoint("numbered", "b").ok());
  const SessionMarks again = session.marks();
  const auto flush = head_->Flush({}, {&again, 1}, gradient.data());
  EXPECT_TRUE(IsWindowLost(flush.status())) << flush.status();
}

TEST_F(RestartTest, ASessionThatWasOpenedBehindACheckpointIsLostWhenThatIsRestored) {
  Session first = Open("trainer");
  ASSERT_TRUE(Compute(first).ok());
  ASSERT_TRUE(head_->SaveCheckpoint("a").ok());
  ASSERT_TRUE(Compute(first).ok());
  Session second = Open("trainer");
  ASSERT_TRUE(client_->RestoreCheckpoint("numbered", "a").ok());
  const absl::Status lost = Compute(second);
  EXPECT_TRUE(IsWindowLost(lost)) << lost;
}

TEST_F(RestartTest, AStepOfAWindowThatARestoreHasUndoneIsALostWindow) {
  Session session = Open("trainer");
  ASSERT_TRUE(head_->SaveCheckpoint("a").ok());
  ASSERT_TRUE(Compute(session).ok());
  Flush(kBatchTokens);
  ASSERT_TRUE(Compute(session).ok());
  ASSERT_TRUE(client_->RestoreCheckpoint("numbered", "a").ok());
  const SessionMarks marks = session.marks();
  const auto step = head_->ApplyStep({.learning_rate = 0.01, .generation = 2}, {&marks, 1});
  EXPECT_TRUE(IsWindowLost(step.status())) << step.status();
}

// What is to be replayed begins where the server is: the step is in its weights.
TEST_F(RestartTest, AStepThatWasTakenBeforeTheCheckpointIsNotToBeReplayed) {
  Session first = Open("trainer");
  ASSERT_TRUE(Compute(first).ok());
  const SessionMarks stepped = first.marks();
  ASSERT_TRUE(head_->ApplyStep({.learning_rate = 0.01, .generation = 1}, {&stepped, 1}).ok());
  ASSERT_TRUE(head_->SaveCheckpoint("b").ok());
  server_.Kill();
  server_.Start();
  Session second = Open("trainer");
  const SessionMarks marks = second.marks();
  server_.Kill();
  server_.Start();
  const auto step = head_->ApplyStep({.learning_rate = 0.01, .generation = 1}, {&marks, 1});
  EXPECT_TRUE(IsWindowLost(step.status())) << step.status();
  EXPECT_THAT(std::string(step.status().message()), HasSubstr("replay since generation 2"));
}

// What a process knows of generations is undone with them.
TEST_F(RestartTest, AProcessGoesBackToAnEarlierGenerationWithTheHead) {
  Session session = Open("trainer");
  ASSERT_TRUE(Compute(session).ok());
  Flush(kBatchTokens);
  ASSERT_TRUE(head_->SaveCheckpoint("two").ok());
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(Compute(session).ok());
    Flush(kBatchTokens);
  }
  ASSERT_TRUE(client_->RestoreCheckpoint("numbered", "two").ok());
  EXPECT_TRUE(IsWindowLost(Compute(session)));
  Session again = Open("trainer");
  ASSERT_TRUE(Compute(again).ok());
  EXPECT_EQ(head_->Info()->generation, 2U);
  Flush(kBatchTokens);
  ASSERT_TRUE(Compute(again).ok());
}

}  // namespace
}  // namespace lossd::restart_test
