// Exactly once, whatever happens to the client or to the network: dW is compared with that of an undisturbed
// run, bit by bit where one lane fixes the order of the sums.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "tests/integration/client_resume/numbered_chunks.h"
#include "tests/proxy/fault_proxy.h"
#include "tests/support/program.h"
#include "tests/support/test_server.h"
#include "tests/support/wait.h"

namespace lossd::client_resume_test {
namespace {

using testing::CutAfter;
using testing::FaultProxy;
using testing::kChunkBytes;
using testing::kChunks;
using testing::kNumberedHidden;
using testing::kNumberedVocab;
using testing::kTokensPerChunk;
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

  Session Open(const std::string& client_key = "", int32_t lanes = 1) const {
    auto session = head->OpenSession({.client_key = client_key, .chunk_bytes = kChunkBytes, .lanes = lanes});
    EXPECT_TRUE(session.ok()) << session.status();
    return *std::move(session);
  }

  // dW, with the marks that the server reports; every token of the run is in it once.
  std::vector<float> Flush() const {
    std::vector<float> gradient(kNumberedVocab * kNumberedHidden);
    const auto info = head->Info();
    EXPECT_TRUE(info.ok()) << info.status();
    const auto result = head->Flush({}, info->sessions, gradient.data());
    EXPECT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->window_tokens, static_cast<uint64_t>(kChunks * kTokensPerChunk));
    return gradient;
  }

  std::unique_ptr<Client> client;
  std::unique_ptr<Head> head;
};

class ClientResumeTest : public ::testing::Test {
 protected:
  // Whether this is the dW of the undisturbed run. Chunks of several lanes are added in any order, which
  // changes the last bits of the sums: by a few in ten million of the largest element, where one chunk twice,
  // or not at all, changes it by parts of a hundred.
  ::testing::AssertionResult IsWhole(const std::vector<float>& gradient, int32_t lanes) const {
    if (lanes == 1) {
      if (gradient == gradient_) return ::testing::AssertionSuccess();
      return ::testing::AssertionFailure() << "dW has other bits";
    }
    float largest = 0;
    float difference = 0;
    for (size_t i = 0; i < gradient.size(); ++i) {
      largest = std::max(largest, std::abs(gradient_[i]));
      difference = std::max(difference, std::abs(gradient[i] - gradient_[i]));
    }
    if (difference <= 2e-6F * largest) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "dW is off by " << difference << " of " << largest;
  }

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

// Kills the worker a random moment after the server has added `chunks` more chunks. False if it had finished
// before.
bool KillWorkerAfter(TestServer& server, testing::Program& worker, uint64_t chunks,
                     std::chrono::microseconds delay) {
  const uint64_t target = server.engine().counters().chunks_accumulated + chunks;
  testing::Await("chunks of the worker", [&] {
    return worker.HasEnded() || server.engine().counters().chunks_accumulated >= target;
  });
  if (!worker.HasEnded()) std::this_thread::sleep_for(delay);
  worker.Signal(SIGKILL);
  const int status = worker.AwaitEnd();
  if (status == -SIGKILL) return true;
  EXPECT_EQ(status, 0) << "the worker failed";
  return false;
}

// By number of lanes.
class ClientLanesResumeTest : public ClientResumeTest, public ::testing::WithParamInterface<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Lanes, ClientLanesResumeTest, ::testing::Values(1, 4));

TEST_P(ClientLanesResumeTest, KilledAtFiftyRandomPointsTheGradientIsTheSame) {
  constexpr int kKills = 50;
  const int32_t lanes = GetParam();
  std::mt19937 random(20261121);
  std::uniform_int_distribution<int> delay_microseconds(0, 1500);
  int kills = 0;
  for (int round = 0; kills < kKills && round < 4 * kKills; ++round) {
    const std::string client_key = "killed-" + std::to_string(round);
    // Spread over the whole stream, and sometimes the process that resumes is killed, too.
    std::uniform_int_distribution<uint64_t> position(0, kChunks - 1);
    uint64_t next = position(random);
    for (bool killed = true; killed;) {
      testing::Program worker({RESUME_WORKER, server_->target(), client_key, std::to_string(lanes)});
      killed = KillWorkerAfter(*server_, worker, next, std::chrono::microseconds(delay_microseconds(random)));
      kills += static_cast<int>(killed);
      // Most of the time the second process is left alone: more chunks than there are never come.
      next = random() % 4 == 0 ? position(random) / 3 : kChunks + 1;
    }
    ASSERT_TRUE(IsWhole(direct_->Flush(), lanes)) << "round " << round << " after " << kills << " kills";
    EXPECT_TRUE(direct_->Open(client_key, lanes).Close().ok());
  }
  EXPECT_GE(kills, kKills);
  EXPECT_GT(server_->engine().counters().chunks_withdrawn, 0U);  // some kills met chunks that were queued
}

TEST_P(ClientLanesResumeTest, CutConnectionsLeaveGradientLossesAndDxAsTheyWere) {
  const int32_t lanes = GetParam();
  std::mt19937 random(4711);
  int cuts = 0;
  int64_t reconnects = 0;
  int64_t repeated = 0;
  for (int round = 0; round < 12; ++round) {
    std::uniform_int_distribution<int64_t> bytes(1, 2 * kChunks * kChunkBytes);
    const uint32_t seed = random();
    FaultProxy proxy(server_->target(), [&bytes, budgets = std::mt19937(seed)](int connection) mutable {
      // Every third connection lives as long as it likes, so that the run comes to an end.
      return CutAfter(connection % 3 == 2 ? -1 : bytes(budgets));
    });
    const Connected through(proxy.target());
    Session session = through.Open("", lanes);
    NumberedBatch batch(0);
    const auto result = session.Compute(batch.batch(), batch.outputs());
    ASSERT_TRUE(result.ok()) << "round " << round << ": " << result.status();
    ASSERT_TRUE(batch.losses == undisturbed_.losses) << "round " << round;
    ASSERT_TRUE(batch.dx == undisturbed_.dx) << "round " << round;
    EXPECT_EQ(result->valid_tokens, static_cast<int64_t>(batch.labels.size()));
    ASSERT_TRUE(IsWhole(through.Flush(), lanes)) << "round " << round;
    EXPECT_TRUE(session.Close().ok());
    cuts += proxy.faults();
    reconnects += session.reconnects();
    repeated += result->repeated_chunks;
  }
  // Otherwise nothing was tested.
  EXPECT_GE(cuts, 8);
  EXPECT_GE(reconnects, 5);
  EXPECT_GT(repeated, 0);
}

TEST_P(ClientLanesResumeTest, RestartedServerInTheMiddleOfAWindowIsAWindowLostAndTheReplayIsComplete) {
  FaultProxy proxy(server_->target());
  const Connected through(proxy.target());
  Session session = through.Open("trainer", GetParam());
  NumberedBatch batch(kChunks / 2);
  ASSERT_TRUE(session.Compute(batch.batch(), batch.outputs()).ok());

  proxy.CutAll();
  direct_.reset();
  server_ = std::make_unique<TestServer>();
  proxy.set_backend(server_->target());

  // Without its head, and again with it: the window is gone either way.
  const absl::Status status = session.Compute(batch.batch(), batch.outputs()).status();
  EXPECT_TRUE(IsWindowLost(status)) << status;
  const Connected again(server_->target());
  again.WriteWeights();
  EXPECT_TRUE(IsWindowLost(session.Compute(batch.batch(), batch.outputs()).status()));

  Session replay = through.Open("trainer", GetParam());
  for (const LaneMarks& lane : replay.marks().lanes) EXPECT_EQ(lane.accepted, 0U);
  NumberedBatch whole(0);
  ASSERT_TRUE(replay.Compute(whole.batch(), whole.outputs()).ok());
  EXPECT_TRUE(IsWhole(again.Flush(), GetParam()));
}

TEST_P(ClientLanesResumeTest, RestartedClientGetsTheAnswersItLostWithoutAddingTwice) {
  const int32_t lanes = GetParam();
  {
    Session session = direct_->Open("trainer", lanes);
    NumberedBatch batch(0);
    Batch half = batch.batch();
    half.labels = half.labels.first(half.labels.size() / 2);
    ASSERT_TRUE(session.Compute(half, {}).ok());
  }
  Session session = direct_->Open("trainer", lanes);
  uint64_t accepted = 0;
  for (const LaneMarks& lane : session.marks().lanes) accepted += lane.accepted;
  EXPECT_EQ(accepted, static_cast<uint64_t>(kChunks / 2));
  ASSERT_TRUE(session.ResumeAt(std::vector<uint64_t>(static_cast<size_t>(lanes), 1)).ok());
  NumberedBatch batch(0);
  const auto result = session.Compute(batch.batch(), batch.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->repeated_chunks, kChunks / 2);
  EXPECT_TRUE(batch.losses == undisturbed_.losses);
  EXPECT_TRUE(batch.dx == undisturbed_.dx);
  EXPECT_TRUE(IsWhole(direct_->Flush(), lanes));
}

TEST_P(ClientLanesResumeTest, SecondProcessOfTheSameKeyFencesTheFirst) {
  Session first = direct_->Open("trainer", GetParam());
  NumberedBatch batch(kChunks - 8);
  ASSERT_TRUE(first.Compute(batch.batch(), batch.outputs()).ok());
  Session second = direct_->Open("trainer", GetParam());
  uint64_t accepted = 0;
  for (const LaneMarks& lane : second.marks().lanes) accepted += lane.accepted;
  EXPECT_EQ(accepted, 8U);
  const absl::Status status = first.Compute(batch.batch(), batch.outputs()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_FALSE(IsWindowLost(status));
  EXPECT_TRUE(second.Compute(batch.batch(), batch.outputs()).ok());
}

// Only the first lane of `first` was ever connected: that it was taken over has to keep it from the others.
TEST_F(ClientResumeTest, FencedProcessDoesNotTakeLanesThatItNeverUsedFromItsSuccessor) {
  Session first = direct_->Open("trainer", 4);
  NumberedBatch small(kChunks - 1);
  ASSERT_TRUE(first.Compute(small.batch(), small.outputs()).ok());
  Session second = direct_->Open("trainer", 4);
  NumberedBatch batch(kChunks - 8);
  ASSERT_TRUE(second.Compute(batch.batch(), batch.outputs()).ok());
  const absl::Status status = first.Compute(batch.batch(), batch.outputs()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_TRUE(second.Compute(batch.batch(), batch.outputs()).ok());
  EXPECT_EQ(second.reconnects(), 0);
}

// Chunks that are sent again carry what the teacher needs, and count once.
TEST_F(ClientResumeTest, CutConnectionsLeaveBatchesWithSoftTargetsAsTheyWere) {
  constexpr int64_t kTeacherHidden = 16;
  const auto teacher = direct_->client->CreateHead({.name = "teacher",
                                                    .vocab_size = kNumberedVocab,
                                                    .hidden_size = kTeacherHidden,
                                                    .weight_type = DataType::kFloat32,
                                                    .frozen = true});
  ASSERT_TRUE(teacher.ok()) << teacher.status();
  const std::vector<float> weights = testing::RandomFloats(kNumberedVocab * kTeacherHidden, 3);
  ASSERT_TRUE(teacher->WriteWeights(DataType::kFloat32, weights.data()).ok());
  const std::vector<float> states = testing::RandomFloats(kChunks * kTokensPerChunk * kTeacherHidden, 4);
  const auto taught = [&](const NumberedBatch& numbered) {
    Batch batch = numbered.batch();
    batch.distillation = {
        .teacher = "teacher", .hidden_size = kTeacherHidden, .hidden_states = states.data()};
    return batch;
  };
  NumberedBatch undisturbed(0);
  Session first = direct_->Open();
  ASSERT_TRUE(first.Compute(taught(undisturbed), undisturbed.outputs()).ok());
  const std::vector<float> gradient = direct_->Flush();
  ASSERT_TRUE(first.Close().ok());

  std::mt19937 random(815);
  int cuts = 0;
  int64_t repeated = 0;
  for (int round = 0; round < 6; ++round) {
    std::uniform_int_distribution<int64_t> bytes(1, 2 * kChunks * kChunkBytes);
    const uint32_t seed = random();
    FaultProxy proxy(server_->target(), [&bytes, budgets = std::mt19937(seed)](int connection) mutable {
      return CutAfter(connection % 3 == 2 ? -1 : bytes(budgets));
    });
    const Connected through(proxy.target());
    Session session = through.Open();
    NumberedBatch batch(0);
    const auto result = session.Compute(taught(batch), batch.outputs());
    ASSERT_TRUE(result.ok()) << "round " << round << ": " << result.status();
    EXPECT_TRUE(batch.losses == undisturbed.losses) << "round " << round;
    EXPECT_TRUE(batch.dx == undisturbed.dx) << "round " << round;
    EXPECT_TRUE(through.Flush() == gradient) << "round " << round;
    EXPECT_TRUE(session.Close().ok());
    cuts += proxy.faults();
    repeated += result->repeated_chunks;
  }
  EXPECT_GE(cuts, 3);
  EXPECT_GT(repeated, 0);
}

}  // namespace
}  // namespace lossd::client_resume_test
