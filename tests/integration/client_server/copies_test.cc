// Copies of heads and moving averages through the client library and real gRPC.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "server/engine/common/errors.h"
#include "tests/integration/client_server/client_server_fixture.h"

namespace lossd::testing::copies_test {
namespace {

using ::testing::HasSubstr;

class CopiesTest : public ClientServerTest {
 protected:
  static constexpr CopyOptions kAverage = {.frozen = true, .master_weights = true};

  // A head that the server steps, with weights of version 1.
  Head MakeTrained(DataType type) {
    auto head = client_->CreateHead({.name = "trained",
                                     .vocab_size = kVocab,
                                     .hidden_size = kHidden,
                                     .weight_type = type,
                                     .bias = true,
                                     .optimizer = {.kind = OptimizerKind::kAdamW},
                                     .master_weights = type != DataType::kFloat32});
    EXPECT_TRUE(head.ok()) << head.status();
    const std::vector<float> bias = RandomFloats(kVocab, 2);
    EXPECT_TRUE(head->WriteWeights(DataType::kFloat32, RandomFloats(kVocab * kHidden, 1).data(), bias).ok());
    return *std::move(head);
  }
  Head Copy(const std::string& name, const CopyOptions& options, uint64_t version) {
    auto copy = client_->CopyHead("trained", name, options);
    EXPECT_TRUE(copy.ok()) << copy.status();
    EXPECT_EQ(copy->weight_version, version);
    EXPECT_EQ(copy->head.config().name, name);
    return copy->head;
  }
  static void Step(const Head& head, uint32_t seed, const std::string& client_key) {
    auto session = head.OpenSession({.client_key = client_key});
    ASSERT_TRUE(session.ok()) << session.status();
    Data data(30, seed);
    Batch batch = data.batch();
    ASSERT_TRUE(session->Compute(batch, data.outputs()).ok());
    const SessionMarks marks = session->marks();
    const auto stepped = head.ApplyStep({.learning_rate = 0.01}, {&marks, 1});
    ASSERT_TRUE(stepped.ok()) << stepped.status();
  }
  struct Weights {
    std::vector<float> matrix = std::vector<float>(kVocab * kHidden);
    std::vector<float> bias = std::vector<float>(kVocab);
    uint64_t version = 0;
  };
  // As fp32: of a head with a master what that has, otherwise the weights.
  static Weights Read(const Head& head, DataType type = DataType::kFloat32) {
    Weights weights;
    if (type != DataType::kFloat32) {
      std::vector<uint16_t> narrow(kVocab * kHidden);
      const auto version = head.ReadWeights(type, narrow.data(), weights.bias);
      EXPECT_TRUE(version.ok()) << version.status();
      weights.version = version.value_or(0);
      weights.matrix.assign(narrow.begin(), narrow.end());  // their bits
      return weights;
    }
    const auto version = head.ReadWeights(type, weights.matrix.data(), weights.bias);
    EXPECT_TRUE(version.ok()) << version.status();
    weights.version = version.value_or(0);
    return weights;
  }
  static void ExpectSame(const Weights& a, const Weights& b) {
    EXPECT_EQ(a.matrix, b.matrix);
    EXPECT_EQ(a.bias, b.bias);
  }
};

TEST_F(CopiesTest, ASnapshotHasTheBitsOfItsVersionWhateverTheSourceDoes) {
  Start();
  const Head head = MakeTrained(DataType::kBFloat16);
  Step(head, 3, "a");
  const Weights then = Read(head, DataType::kBFloat16);
  const Head snapshot = Copy("snapshot", {.frozen = true}, 2);
  EXPECT_TRUE(snapshot.config().frozen);
  EXPECT_TRUE(snapshot.config().bias);
  EXPECT_FALSE(snapshot.config().master_weights);
  EXPECT_EQ(snapshot.Info()->weight_version, 2U);
  Step(head, 4, "b");
  ExpectSame(Read(snapshot, DataType::kBFloat16), then);
  EXPECT_NE(Read(head, DataType::kBFloat16).matrix, then.matrix);
}

TEST_F(CopiesTest, ACopyThatIsNotFrozenGoesOnLikeTheSource) {
  Start();
  const Head head = MakeTrained(DataType::kBFloat16);
  Step(head, 3, "a");
  const Head copy = Copy("copy", {}, 2);
  EXPECT_EQ(copy.Info()->optimizer_steps, 1);
  EXPECT_EQ(copy.config().optimizer.kind, OptimizerKind::kAdamW);
  ExpectSame(Read(copy), Read(head));
  Step(head, 4, "b");
  Step(copy, 4, "c");
  EXPECT_EQ(Read(copy).version, 3U);
  ExpectSame(Read(copy), Read(head));
}

TEST_F(CopiesTest, AnAverageFollowsItsFormula) {
  Start();
  const Head head = MakeTrained(DataType::kBFloat16);
  const Head average = Copy("average", kAverage, 1);
  EXPECT_TRUE(average.config().master_weights);
  Weights expected = Read(head);
  const auto lerp = [](std::vector<float>* to, const std::vector<float>& from) {
    for (size_t i = 0; i < to->size(); ++i) (*to)[i] += 0.25F * (from[i] - (*to)[i]);
  };
  for (uint32_t step = 0; step < 5; ++step) {
    Step(head, step, "step" + std::to_string(step));
    const Weights now = Read(head);
    const auto version =
        average.Blend("trained", {.decay = 0.75, .source_version = now.version, .target_version = step + 1});
    ASSERT_TRUE(version.ok()) << version.status();
    EXPECT_EQ(*version, step + 2);
    lerp(&expected.matrix, now.matrix);
    lerp(&expected.bias, now.bias);
  }
  ExpectSame(Read(average), expected);
}

// Steps of the source, and its copies, each at whatever moment: a copy is always of one version.
TEST_F(CopiesTest, CopiesDuringStepsAreOfOneVersionEach) {
  Start();
  const Head head = MakeTrained(DataType::kFloat32);
  std::vector<Weights> of_version = {{}, Read(head)};
  std::atomic<bool> stop = false;
  std::vector<CopiedHead> copies;
  std::thread copying([&] {
    for (int i = 0; i < 20; ++i) {
      auto copy = client_->CopyHead("trained", "copy" + std::to_string(i), {.frozen = true});
      ASSERT_TRUE(copy.ok()) << copy.status();
      copies.push_back(*std::move(copy));
    }
    stop = true;
  });
  for (uint32_t step = 0; !stop || step < 2; ++step) {
    Step(head, step, "step" + std::to_string(step));
    of_version.push_back(Read(head));
  }
  copying.join();
  for (const CopiedHead& copy : copies) {
    ASSERT_LT(copy.weight_version, of_version.size());
    ExpectSame(Read(copy.head), of_version[copy.weight_version]);
  }
}

TEST_F(CopiesTest, ABatchMeetsTheAverageAsATeacherOfTheVersionThatItNames) {
  StartWithWeights();
  const auto average = client_->CopyHead("head", "average", {.frozen = true});
  ASSERT_TRUE(average.ok()) << average.status();
  ASSERT_TRUE(average->head.Blend("head", {.decay = 0.5}).ok());
  Session session = Open();
  Data data(20);
  Batch batch = data.batch();
  batch.distillation =
      Distillation{.teacher = "average", .hidden_size = kHidden, .hidden_states = data.hidden.data()};
  const auto result = session.Compute(batch, data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->teacher_weight_version, 2U);
  EXPECT_NEAR(result->divergence_sum, 0, 1e-4) << "half of both is the same";
}

TEST_F(CopiesTest, WhatCannotBeIsRefusedAndSaysWhatToDo) {
  Start();
  const Head head = MakeTrained(DataType::kFloat32);
  const auto bare = client_->CopyHead("head", "copy");
  EXPECT_EQ(bare.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(bare.status().message()), HasSubstr("no weights yet"));
  Copy("copy", {}, 1);
  const auto taken = client_->CopyHead("trained", "copy");
  EXPECT_EQ(taken.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(taken.status().message()), HasSubstr("give the copy another name"));
  const auto itself = head.Blend("trained", {.decay = 0.5});
  EXPECT_EQ(itself.status().code(), absl::StatusCode::kInvalidArgument);
  const auto decay = head.Blend("copy", {.decay = std::nan("")});
  EXPECT_EQ(decay.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(decay.status().message()), HasSubstr("decay is nan; it must be in [0, 1]"));
  EXPECT_EQ(Read(head).version, 1U);
}

}  // namespace
}  // namespace lossd::testing::copies_test
