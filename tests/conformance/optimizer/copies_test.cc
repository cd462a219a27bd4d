// Copies and moving averages: the same bits on every device, and everything that follows from the weights
// follows the new ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/blend.h"
#include "tests/conformance/optimizer/optimizer_fixture.h"

namespace lossd::engine::testing::copies_test {
namespace {

using kernels::OptimizerArguments;
using kernels::OptimizerRule;
using kernels::testing::Narrowed;
using kernels::testing::RandomProblem;
using kernels::testing::SameBits;

class Copies : public OptimizerTest {
 protected:
  static constexpr OptimizerArguments kAdamW = {
      .rule = OptimizerRule::kAdamW, .learning_rate = 1e-2, .weight_decay = 0.1};

  HeadConfig TrainedConfig(MasterWeights master) const { return ConfigOf(kAdamW, master, HeadBias::kYes); }
  HeadConfig FrozenConfig(MasterWeights master) const {
    HeadConfig config = TrainedConfig(master);
    config.weight_gradients = WeightGradients::kFrozen;
    config.optimizer = {};
    return config;
  }

  // What is worked on: the master, or the weights widened.
  static std::vector<float> WorkedOn(const HeadConfig& config, const HeadValues& values) {
    if (config.master_weights) return values.master;
    std::vector<float> wide(static_cast<size_t>(config.elements()));
    kernels::Convert(config.weight_type, values.weight.data(), DataType::kFloat32, wide.data(),
                     config.elements());
    return wide;
  }
  // torch.lerp, each operation rounded by itself.
  static std::vector<float> Lerp(double decay, std::vector<float> target, const std::vector<float>& source) {
    const auto kept = static_cast<float>(decay);
    const auto taken = static_cast<float>(1 - decay);
    for (size_t i = 0; i < target.size(); ++i) {
      const volatile float difference = source[i] - target[i];
      const volatile float part = (taken < 0.5f ? taken : kept) * difference;
      target[i] = taken < 0.5f ? target[i] + part : source[i] - part;
    }
    return target;
  }
  static void Put(const HeadConfig& config, std::vector<float> worked_on, HeadValues* values) {
    values->weight = Narrowed(config.weight_type, worked_on);
    if (config.master_weights) values->master = std::move(worked_on);
  }
  // Moments that are none of zeros.
  void Train(HeadUnderTest& head, HeadValues* values, int64_t step = 1) const {
    OptimizerArguments arguments = kAdamW;
    arguments.step = step;
    const GradientValues gradient = RandomGradient(head.config(), 100 + static_cast<uint64_t>(step));
    Write(head, gradient);
    ASSERT_TRUE(head.backend().ApplyStep(nullptr, ArgumentsOf(arguments)).ok());
    head.backend().ResetGradient();
    Step(head.config(), arguments, gradient, values);
  }
  Problem MakeProblem(float smoothing) const {
    Problem problem = RandomProblem({.shape = {90, kVocab, kHidden}, .type = type(), .logit_deviation = 2.0});
    problem.options.label_smoothing = smoothing;
    problem.bias.assign(kVocab, 0.25f);
    return problem;
  }
  static void Blend(HeadUnderTest& target, HeadUnderTest& source, double decay) {
    const absl::Status blended = target.backend().BlendWeights(source.backend(), decay);
    ASSERT_TRUE(blended.ok()) << blended;
  }
};

INSTANTIATE_TEST_SUITE_P(All, Copies, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(Copies, ABlendHasTheSameBitsOnEveryDevice) {
  for (const MasterWeights of_source : Masters()) {
    HeadUnderTest source(device_.get(), TrainedConfig(of_source));
    const HeadValues from = RandomValues(source.config(), 3);
    Publish(source, from);
    for (const MasterWeights of_target : Masters()) {
      HeadUnderTest target(device_.get(), FrozenConfig(of_target));
      HeadValues values = RandomValues(target.config(), 1);
      Publish(target, values);
      for (const double decay : {0.999, 0.5, 0.25, 0.75}) {
        Blend(target, source, decay);
        Put(target.config(), Lerp(decay, WorkedOn(target.config(), values), WorkedOn(source.config(), from)),
            &values);
        values.bias = Lerp(decay, values.bias, from.bias);
        Expect(target, values);
      }
      Expect(source, from);
    }
  }
}

TEST_P(Copies, EveryWidthHasTheSameBits) {
  constexpr std::pair<int64_t, int64_t> kShapes[] = {{97, 1}, {97, 3}, {97, 8}, {128, 64}, {2048, 16}};
  for (const auto& [vocab, hidden] : kShapes) {
    HeadConfig config = FrozenConfig(Masters().back());
    config.vocab_size = vocab;
    config.hidden_size = hidden;
    HeadUnderTest source(device_.get(), config);
    HeadUnderTest target(device_.get(), config);
    const HeadValues from = RandomValues(config, 3);
    HeadValues values = RandomValues(config, 1);
    Publish(source, from);
    Publish(target, values);
    Blend(target, source, 0.75);
    Put(config, Lerp(0.75, WorkedOn(config, values), WorkedOn(config, from)), &values);
    values.bias = Lerp(0.75, values.bias, from.bias);
    Expect(target, values);
  }
}

// Into a head that nobody has written.
TEST_P(Copies, ACopyHasTheBitsOfTheWeights) {
  for (const MasterWeights of_source : Masters()) {
    HeadUnderTest source(device_.get(), TrainedConfig(of_source));
    HeadValues from = RandomValues(source.config(), 3);
    Publish(source, from);
    Train(source, &from);
    for (const MasterWeights of_target : Masters()) {
      HeadUnderTest copy(device_.get(), FrozenConfig(of_target));
      Blend(copy, source, 0);
      HeadValues expected;
      expected.weight = from.weight;
      expected.bias = from.bias;
      if (copy.config().master_weights) expected.master = WorkedOn(source.config(), from);
      Expect(copy, expected);
    }
    Expect(source, from);
  }
}

TEST_P(Copies, ACopyTrainsOnAsTheSourceWould) {
  for (const MasterWeights master : Masters()) {
    HeadUnderTest source(device_.get(), TrainedConfig(master));
    HeadValues values = RandomValues(source.config(), 3);
    Publish(source, values);
    Train(source, &values, 1);
    HeadUnderTest copy(device_.get(), TrainedConfig(master));
    Blend(copy, source, 0);
    ASSERT_TRUE(copy.backend().CopyOptimizer(source.backend()).ok());
    Expect(copy, values);
    HeadValues then = values;
    Train(source, &then, 2);
    Expect(copy, values);  // each goes its own way
    Train(copy, &values, 2);
    Expect(copy, then);
  }
}

TEST_P(Copies, AfterABlendBatchesAreThoseOfAFreshHeadWithItsWeights) {
  for (const MasterWeights master : Masters()) {
    HeadUnderTest source(device_.get(), TrainedConfig(master));
    Publish(source, RandomValues(source.config(), 3));
    HeadUnderTest target(device_.get(), TrainedConfig(master));
    Publish(target, RandomValues(target.config(), 1));
    for (const double decay : {0.5, 0.0}) {
      for (const float smoothing : {0.2f, 0.0f}) {
        const Problem problem = MakeProblem(smoothing);
        target.Run(problem);  // whatever is kept of the old weights is there
        target.backend().ResetGradient();
        Blend(target, source, decay);
        ExpectAsAFreshHead(target, problem);
      }
    }
  }
}

// Batches that were started before, of the target and of the source, are of the weights before.
TEST_P(Copies, BatchesUnderWayKeepTheirWeights) {
  const HeadConfig config = TrainedConfig(Masters().back());
  HeadUnderTest source(device_.get(), config);
  HeadUnderTest target(device_.get(), config);
  Publish(source, RandomValues(config, 3));
  Publish(target, RandomValues(config, 1));
  const Problem problem = MakeProblem(0);
  const BatchKey kind = KindOf(problem);
  const std::vector<ChunkOutput> expected = target.Run(kind, {RowsOf(problem, 0, 90)});
  const std::unique_ptr<BatchUnderWay> batch = target.Start(kind, {RowsOf(problem, 0, 90)});
  Blend(target, source, 0.5);
  EXPECT_TRUE(SameBits(batch->Await().front().losses, expected.front().losses));
  EXPECT_FALSE(SameBits(target.Run(kind, {RowsOf(problem, 0, 90)}).front().losses, expected.front().losses));
}

}  // namespace
}  // namespace lossd::engine::testing::copies_test
