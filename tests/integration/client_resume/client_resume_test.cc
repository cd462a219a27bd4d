// Exactly once, whatever happens to the client or to the network: dW is compared bit by bit with that of an
// undisturbed run.
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "tests/integration/client_resume/cutting_proxy.h"
#include "tests/integration/client_resume/numbered_chunks.h"
#include "tests/integration/server/test_server.h"

namespace lossd {
namespace {

using testing::CuttingProxy;
using testing::kChunkBytes;
using testing::kChunks;
using testing::kHidden;
using testing::kVocab;
using testing::NumberedBatch;
using testing::NumberedHead;
using testing::NumberedWeights;
using testing::TestServer;

// A client of its own with the numbered head ready for chunks.
struct Connected {
  explicit Connected(const std::string& target) {
    auto connected = Client::Connect(target, {});
    EXPECT_TRUE(connected.ok()) << connected.status();
    client = *std::move(connected);
    auto created = client->CreateHead(NumberedHead());
    EXPECT_TRUE(created.ok()) << created.status();
    head = std::make_unique<Head>(*std::move(created));
  }

  void WriteWeights() const {
    const auto version = head->WriteWeights(DataType::kFloat32, NumberedWeights().data());
    ASSERT_TRUE(version.ok()) << version.status();
  }

  Session Open(const std::string& client_key = "") const {
    auto session = head->OpenSession({.client_key = client_key, .chunk_bytes = kChunkBytes});
    EXPECT_TRUE(session.ok()) << session.status();
    return *std::move(session);
  }

  // dW, with the marks that the server reports.
  std::vector<float> Flush() const {
    std::vector<float> gradient(kVocab * kHidden);
    const auto info = head->Info();
    EXPECT_TRUE(info.ok()) << info.status();
    const auto result = head->Flush({}, info->sessions, gradient.data());
    EXPECT_TRUE(result.ok()) << result.status();
    return gradient;
  }

  std::unique_ptr<Client> client;
  std::unique_ptr<Head> head;
};

class ClientResumeTest : public ::testing::Test {
 protected:
  ClientResumeTest()
      : server_(std::make_unique<TestServer>()), direct_(std::make_unique<Connected>(server_->target())) {
    direct_->WriteWeights();
    Session session = direct_->Open();
    const auto result = session.Compute(undisturbed_.batch(), undisturbed_.outputs());
    EXPECT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->chunks, kChunks);  // otherwise chunks and sequences do not correspond
    gradient_ = direct_->Flush();
    EXPECT_TRUE(session.Close().ok());
  }

  std::unique_ptr<TestServer> server_;
  std::unique_ptr<Connected> direct_;
  NumberedBatch undisturbed_{0};
  std::vector<float> gradient_;
};

pid_t StartWorker(const std::string& target, const std::string& client_key) {
  std::vector<std::string> arguments{RESUME_WORKER, target, client_key};
  char* const pointers[] = {arguments[0].data(), arguments[1].data(), arguments[2].data(), nullptr};
  pid_t pid = -1;
  EXPECT_EQ(posix_spawn(&pid, RESUME_WORKER, nullptr, nullptr, pointers, environ), 0);
  return pid;
}

// Kills the worker a random moment after the server has added `chunks` more chunks. False if it had finished
// before.
bool KillWorkerAfter(TestServer& server, pid_t pid, uint64_t chunks, std::chrono::microseconds delay) {
  const uint64_t target = server.engine().counters().chunks_accumulated + chunks;
  int status = 0;
  while (server.engine().counters().chunks_accumulated < target) {
    if (waitpid(pid, &status, WNOHANG) == pid) {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the worker failed";
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  std::this_thread::sleep_for(delay);
  kill(pid, SIGKILL);
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  if (WIFSIGNALED(status)) return true;
  EXPECT_EQ(WEXITSTATUS(status), 0) << "the worker failed";
  return false;
}

TEST_F(ClientResumeTest, KilledAtFiftyRandomPointsTheGradientIsBitwiseTheSame) {
  constexpr int kKills = 50;
  std::mt19937 random(20261121);
  std::uniform_int_distribution<int> delay_microseconds(0, 1500);
  int kills = 0;
  for (int round = 0; kills < kKills && round < 4 * kKills; ++round) {
    const std::string client_key = "killed-" + std::to_string(round);
    // Spread over the whole stream, and sometimes the process that resumes is killed, too.
    std::uniform_int_distribution<uint64_t> position(0, kChunks - 1);
    uint64_t next = position(random);
    for (bool killed = true; killed;) {
      const pid_t pid = StartWorker(server_->target(), client_key);
      killed = KillWorkerAfter(*server_, pid, next, std::chrono::microseconds(delay_microseconds(random)));
      kills += static_cast<int>(killed);
      // Most of the time the second process is left alone: more chunks than there are never come.
      next = random() % 4 == 0 ? position(random) / 3 : kChunks + 1;
    }
    ASSERT_TRUE(direct_->Flush() == gradient_) << "round " << round << " after " << kills << " kills";
    EXPECT_TRUE(direct_->Open(client_key).Close().ok());
  }
  EXPECT_GE(kills, kKills);
  EXPECT_GT(server_->engine().counters().chunks_withdrawn, 0U);  // some kills met chunks that were queued
}

TEST_F(ClientResumeTest, CutConnectionsLeaveGradientLossesAndDxAsTheyWere) {
  std::mt19937 random(4711);
  int cuts = 0;
  int64_t reconnects = 0;
  int64_t repeated = 0;
  for (int round = 0; round < 12; ++round) {
    std::uniform_int_distribution<int64_t> bytes(1, 2 * kChunks * kChunkBytes);
    const uint32_t seed = random();
    CuttingProxy proxy(server_->port(), [&bytes, budgets = std::mt19937(seed)](int connection) mutable {
      // Every third connection lives as long as it likes, so that the run comes to an end.
      return connection % 3 == 2 ? -1 : bytes(budgets);
    });
    const Connected through(proxy.target());
    Session session = through.Open();
    NumberedBatch batch(0);
    const auto result = session.Compute(batch.batch(), batch.outputs());
    ASSERT_TRUE(result.ok()) << "round " << round << ": " << result.status();
    ASSERT_TRUE(batch.losses == undisturbed_.losses) << "round " << round;
    ASSERT_TRUE(batch.dx == undisturbed_.dx) << "round " << round;
    EXPECT_EQ(result->valid_tokens, static_cast<int64_t>(batch.labels.size()));
    ASSERT_TRUE(through.Flush() == gradient_) << "round " << round;
    EXPECT_TRUE(session.Close().ok());
    cuts += proxy.cuts();
    reconnects += session.reconnects();
    repeated += result->repeated_chunks;
  }
  // Otherwise nothing was tested.
  EXPECT_GE(cuts, 8);
  EXPECT_GE(reconnects, 5);
  EXPECT_GT(repeated, 0);
}

TEST_F(ClientResumeTest, RestartedServerInTheMiddleOfAWindowIsAWindowLostAndTheReplayIsComplete) {
  CuttingProxy proxy(server_->port());
  const Connected through(proxy.target());
  Session session = through.Open("trainer");
  NumberedBatch batch(kChunks / 2);
  ASSERT_TRUE(session.Compute(batch.batch(), batch.outputs()).ok());

  proxy.CutAll();
  direct_.reset();
  server_ = std::make_unique<TestServer>();
  proxy.set_backend(server_->port());

  // Without its head, and again with it: the window is gone either way.
  const absl::Status status = session.Compute(batch.batch(), batch.outputs()).status();
  EXPECT_TRUE(IsWindowLost(status)) << status;
  const Connected again(server_->target());
  again.WriteWeights();
  EXPECT_TRUE(IsWindowLost(session.Compute(batch.batch(), batch.outputs()).status()));

  Session replay = through.Open("trainer");
  EXPECT_EQ(replay.marks().lanes.at(0).accepted, 0U);
  NumberedBatch whole(0);
  ASSERT_TRUE(replay.Compute(whole.batch(), whole.outputs()).ok());
  EXPECT_TRUE(again.Flush() == gradient_);
}

TEST_F(ClientResumeTest, RestartedClientGetsTheAnswersItLostWithoutAddingTwice) {
  {
    Session session = direct_->Open("trainer");
    NumberedBatch batch(0);
    Batch half = batch.batch();
    half.labels = half.labels.first(half.labels.size() / 2);
    ASSERT_TRUE(session.Compute(half, {}).ok());
  }
  Session session = direct_->Open("trainer");
  EXPECT_EQ(session.marks().lanes.at(0).accepted, static_cast<uint64_t>(kChunks / 2));
  ASSERT_TRUE(session.ResumeAt({1}).ok());
  NumberedBatch batch(0);
  const auto result = session.Compute(batch.batch(), batch.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->repeated_chunks, kChunks / 2);
  EXPECT_TRUE(batch.losses == undisturbed_.losses);
  EXPECT_TRUE(batch.dx == undisturbed_.dx);
  EXPECT_TRUE(direct_->Flush() == gradient_);
}

TEST_F(ClientResumeTest, SecondProcessOfTheSameKeyFencesTheFirst) {
  Session first = direct_->Open("trainer");
  NumberedBatch batch(kChunks - 2);
  ASSERT_TRUE(first.Compute(batch.batch(), batch.outputs()).ok());
  Session second = direct_->Open("trainer");
  EXPECT_EQ(second.marks().lanes.at(0).accepted, 2U);
  const absl::Status status = first.Compute(batch.batch(), batch.outputs()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_FALSE(IsWindowLost(status));
  EXPECT_TRUE(second.Compute(batch.batch(), batch.outputs()).ok());
}

}  // namespace
}  // namespace lossd
