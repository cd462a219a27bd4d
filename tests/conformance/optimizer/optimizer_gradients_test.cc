// Gradients as wholes, and a head's state as rows: what windows and checkpoints are made of.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "tests/conformance/optimizer/optimizer_fixture.h"

namespace lossd::engine::testing::optimizer_gradients_test {
namespace {

using kernels::OptimizerArguments;
using kernels::OptimizerRule;
using kernels::SizeOf;
using kernels::testing::RandomProblem;
using kernels::testing::RelativeError;
using kernels::testing::SameBits;
using ::testing::HasSubstr;

constexpr OptimizerArguments kAdamW = {
    .rule = OptimizerRule::kAdamW, .learning_rate = 1e-2, .weight_decay = 0.1};

GradientValues Sum(const GradientValues& a, const GradientValues& b) {
  GradientValues sum = a;
  for (size_t i = 0; i < sum.dw.size(); ++i) sum.dw[i] += b.dw[i];
  for (size_t i = 0; i < sum.db.size(); ++i) sum.db[i] += b.db[i];
  return sum;
}

class WholeGradients : public OptimizerTest {
 protected:
  void SetUp() override {
    OptimizerTest::SetUp();
    if (device_ == nullptr || HasFatalFailure() || IsSkipped()) return;
    config_ = ConfigOf(kAdamW, Masters().back(), HeadBias::kYes);
    head_ = std::make_unique<HeadUnderTest>(device_.get(), config_);
    Publish(*head_, RandomValues(config_, 1));
  }
  void Fold(engine::Gradient* from, engine::Gradient* to) {
    const absl::Status folded = head_->backend().Fold(from, to);
    EXPECT_TRUE(folded.ok()) << folded;
  }
  Problem MakeProblem(float smoothing, uint64_t seed) const {
    Problem problem =
        RandomProblem({.shape = {60, kVocab, kHidden}, .type = type(), .logit_deviation = 2.0, .seed = seed});
    problem.options.label_smoothing = smoothing;
    problem.bias.assign(kVocab, 0.25f);
    return problem;
  }

  HeadConfig config_;
  std::unique_ptr<HeadUnderTest> head_;
};

INSTANTIATE_TEST_SUITE_P(All, WholeGradients, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(WholeGradients, AreAddedElementByElementInOrder) {
  const GradientValues own = RandomGradient(config_, 10);
  const GradientValues second = RandomGradient(config_, 20);
  const GradientValues third = RandomGradient(config_, 30);
  const std::unique_ptr<engine::Gradient> a = head_->CreateGradient();
  const std::unique_ptr<engine::Gradient> b = head_->CreateGradient();
  Write(*head_, own);
  Write(*head_, second, a.get());
  Write(*head_, third, b.get());
  Fold(a.get(), nullptr);
  Fold(b.get(), nullptr);
  EXPECT_TRUE(SameValues(Read(*head_), Sum(Sum(own, second), third)));
  for (const auto& folded : {a.get(), b.get()}) {
    EXPECT_EQ(head_->Stats(folded).norm, 0) << "it was reset";
  }
}

TEST_P(WholeGradients, AreMovedIntoOneThatIsEmptyAndEmptyOnesAddNothing) {
  const GradientValues values = RandomGradient(config_, 10);
  const std::unique_ptr<engine::Gradient> other = head_->CreateGradient();
  const std::unique_ptr<engine::Gradient> empty = head_->CreateGradient();
  Fold(empty.get(), nullptr);
  EXPECT_EQ(head_->Stats().norm, 0);
  Write(*head_, RandomGradient(config_, 20));  // what was there does not matter
  head_->backend().ResetGradient();
  Write(*head_, values, other.get());
  Fold(other.get(), nullptr);
  EXPECT_TRUE(SameValues(Read(*head_), values));
  Fold(empty.get(), nullptr);
  EXPECT_TRUE(SameValues(Read(*head_), values));
  Fold(nullptr, other.get());
  EXPECT_TRUE(SameValues(Read(*head_, other.get()), values));
  EXPECT_EQ(head_->Stats().norm, 0);
}

TEST_P(WholeGradients, WithLabelSmoothingAreAdded) {
  const std::unique_ptr<engine::Gradient> other = head_->CreateGradient();
  const std::vector<Problem> problems = {MakeProblem(0.2f, 1), MakeProblem(0.0f, 2), MakeProblem(0.1f, 3)};
  const auto add = [&](const Problem& problem, engine::Gradient* to) {
    BatchKey kind = KindOf(problem);
    kind.gradient = to;
    head_->Run(kind, {RowsOf(problem, 0, problem.shape.tokens)});
  };
  for (const std::vector<size_t>& to_other : {std::vector<size_t>{0}, {1}, {0, 2}, {0, 1, 2}}) {
    SCOPED_TRACE(::testing::PrintToString(to_other));
    for (size_t i = 0; i < problems.size(); ++i) {
      const bool folded = std::find(to_other.begin(), to_other.end(), i) != to_other.end();
      add(problems[i], folded ? other.get() : nullptr);
    }
    const GradientValues expected = Sum(Read(*head_), Read(*head_, other.get()));
    Fold(other.get(), nullptr);
    const GradientValues sum = Read(*head_);
    EXPECT_LT(RelativeError(sum.dw, {expected.dw.begin(), expected.dw.end()}), 1e-6);
    EXPECT_LT(RelativeError(sum.db, {expected.db.begin(), expected.db.end()}), 1e-6);
    head_->backend().ResetGradient();
    EXPECT_EQ(head_->Stats().norm, 0);
  }
}

TEST_P(WholeGradients, ThatWereWrittenAreAddedToByBatches) {
  const Problem problem = MakeProblem(0.0f, 1);
  head_->Run(problem);
  const GradientValues batch = Read(*head_);
  const GradientValues written = RandomGradient(config_, 10);
  Write(*head_, written);
  EXPECT_TRUE(SameValues(Read(*head_), written)) << "what was there is replaced";
  head_->Run(problem);
  const GradientValues expected = Sum(written, batch);
  const GradientValues sum = Read(*head_);
  EXPECT_LT(RelativeError(sum.dw, {expected.dw.begin(), expected.dw.end()}), 1e-6);
  EXPECT_LT(RelativeError(sum.db, {expected.db.begin(), expected.db.end()}), 1e-6);
}

// Smoothing's part that was kept beside dW goes with what is replaced.
TEST_P(WholeGradients, AreReplacedWithAllThatBelongsToThem) {
  head_->Run(MakeProblem(0.2f, 1));
  GradientValues written = RandomGradient(config_, 10);
  Write(*head_, written);
  EXPECT_TRUE(SameValues(Read(*head_), written));
  written.db.clear();
  Write(*head_, written);
  written.db.assign(kVocab, 0.0f);
  EXPECT_TRUE(SameValues(Read(*head_), written)) << "without a bias's gradient it is zeros";
}

void CopyState(HeadUnderTest& from, HeadUnderTest& to) {
  for (const StateTensor& tensor : from.backend().StateTensors()) {
    const int64_t row_bytes = tensor.columns * SizeOf(tensor.type);
    std::vector<unsigned char> rows(static_cast<size_t>(tensor.rows * row_bytes));
    ASSERT_TRUE(from.backend().ReadState(tensor.name, 0, tensor.rows, rows.data()).ok());
    for (int64_t row = 0; row < tensor.rows;) {
      const int64_t count = std::min<int64_t>(tensor.rows - row, 111);
      ASSERT_TRUE(to.backend().WriteState(tensor.name, row, count, &rows[row * row_bytes]).ok());
      row += count;
    }
  }
  const absl::Status restored = to.backend().RestoreState();
  EXPECT_TRUE(restored.ok()) << restored;
}

TEST_P(WholeGradients, AHeadWithItsStateGoesOnAsIfItWereTheSame) {
  for (const auto& [name, arguments] : kernels::testing::OptimizersUnderTest()) {
    for (const MasterWeights master : Masters()) {
      SCOPED_TRACE(name);
      const HeadConfig config = ConfigOf(arguments, master, HeadBias::kYes);
      HeadUnderTest head(device_.get(), config);
      Publish(head, RandomValues(config, 1));
      OptimizerArguments step = arguments;
      for (step.step = 1; step.step <= 2; ++step.step) {
        Write(head, RandomGradient(config, 5));
        ASSERT_TRUE(head.backend().ApplyStep(nullptr, ArgumentsOf(step)).ok());
      }
      HeadUnderTest restored(device_.get(), config);
      CopyState(head, restored);
      const GradientValues gradient = RandomGradient(config, 6);
      for (HeadUnderTest* one : {&head, &restored}) {
        Write(*one, gradient);
        ASSERT_TRUE(one->backend().ApplyStep(nullptr, ArgumentsOf(step)).ok());
        one->backend().ResetGradient();
      }
      for (const StateTensor& tensor : head.backend().StateTensors()) {
        EXPECT_TRUE(SameBits(StateOf(restored, tensor.name), StateOf(head, tensor.name))) << tensor.name;
      }
      const Problem problem = MakeProblem(0.2f, 4);
      const ChunkOutput expected = head.Run(problem);
      const ChunkOutput output = restored.Run(problem);
      EXPECT_TRUE(SameBits(output.losses, expected.losses));
      EXPECT_TRUE(SameBits(output.dx, expected.dx));
    }
  }
}

TEST_P(WholeGradients, TheStateIsWhatTheConfigurationSays) {
  std::vector<std::string> names;
  for (const StateTensor& tensor : head_->backend().StateTensors()) {
    names.push_back(tensor.name);
    EXPECT_EQ(tensor.rows, kVocab);
    EXPECT_EQ(tensor.columns, tensor.name.rfind("bias", 0) == 0 ? 1 : kHidden);
  }
  const std::string weight = type() == DataType::kFloat32 ? "weight" : "master_weight";
  EXPECT_THAT(names, ::testing::ElementsAre(weight, "bias", "exp_avg", "bias.exp_avg", "exp_avg_sq",
                                            "bias.exp_avg_sq"));
  float value = 0;
  for (const char* name : {"exp_avg_", "", "momentum_buffer"}) {
    const absl::Status read = head_->backend().ReadState(name, 0, 1, &value);
    EXPECT_EQ(read.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(read.message()), HasSubstr("has none of that name"));
    EXPECT_EQ(head_->backend().WriteState(name, 0, 1, &value).code(), absl::StatusCode::kInvalidArgument);
  }
}

// As a head that was made and not yet written is saved.
TEST_P(WholeGradients, TheStateOfAHeadWithoutWeightsIsZeros) {
  HeadUnderTest head(device_.get(), config_);
  for (const StateTensor& tensor : head.backend().StateTensors()) {
    const std::vector<float> zeros(static_cast<size_t>(tensor.rows * tensor.columns));
    EXPECT_TRUE(SameBits(StateOf(head, tensor.name), zeros)) << tensor.name;
  }
}

}  // namespace
}  // namespace lossd::engine::testing::optimizer_gradients_test
