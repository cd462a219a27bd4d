// dW by itself, after losses and dX were answered; and gradients beside the head's own.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/conformance/head_under_test.h"
#include "tests/unit/kernels/option_cases.h"

namespace lossd::engine::testing::gradients_test {
namespace {

using kernels::testing::OptionCase;
using kernels::testing::OptionPaths;
using kernels::testing::RandomProblem;
using kernels::testing::SameBits;

constexpr int64_t kTokens = 300;
constexpr int64_t kVocab = 777;
constexpr int64_t kHidden = 43;

class Gradients : public HeadTest {
 protected:
  Problem MakeProblem(const OptionCase& options = {"nothing", [](Problem&) {}}) const {
    Problem problem = RandomProblem(
        {.shape = {kTokens, kVocab, kHidden}, .type = type(), .logit_deviation = 2.0, .seed = 7});
    problem.gradient_scale = 0.25f;
    for (int64_t i = 3; i < kTokens; i += 11) problem.labels[static_cast<size_t>(i)] = kIgnoreIndex;
    options.set(problem);
    return problem;
  }
  static BatchKey OnlyDw(const Problem& problem, Gradient* gradient = nullptr) {
    BatchKey kind = KindOf(problem);
    kind.mode = ComputeMode::kWeightGradientOnly;
    kind.dx_type = {};
    kind.gradient = gradient;
    return kind;
  }
};

INSTANTIATE_TEST_SUITE_P(All, Gradients, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(Gradients, MadeByItselfDwHasTheBitsOfTheWholeStep) {
  for (const OptionCase& options : OptionPaths()) {
    SCOPED_TRACE(options.name);
    const Problem problem = MakeProblem(options);
    HeadUnderTest whole(device_.get(), problem);
    const ChunkOutput expected = whole.Run(problem);
    HeadUnderTest head(device_.get(), problem);
    ChunkInput answered = RowsOf(problem, 0, kTokens);
    answered.accumulate = ChunkRows::Accumulate::kNo;
    const ChunkOutput output = head.Run(KindOf(problem), {answered}).front();
    EXPECT_TRUE(SameBits(output.losses, expected.losses));
    EXPECT_TRUE(SameBits(output.dx, expected.dx));
    EXPECT_TRUE(SameBits(head.Gradient(), std::vector<float>(kVocab * kHidden))) << "nothing was added yet";
    head.Run(OnlyDw(problem), {RowsOf(problem, 0, kTokens)});
    EXPECT_TRUE(SameBits(head.Gradient(), whole.Gradient()));
    // The second time it adds.
    whole.Run(problem);
    head.Run(OnlyDw(problem), {RowsOf(problem, 0, kTokens)});
    EXPECT_TRUE(SameBits(head.Gradient(), whole.Gradient()));
  }
}

TEST_P(Gradients, WithoutDxLossesAndDwHaveTheBitsOfTheWholeStep) {
  for (const OptionCase& options : OptionPaths()) {
    SCOPED_TRACE(options.name);
    const Problem problem = MakeProblem(options);
    BatchKey kind = KindOf(problem);
    kind.returns = {.log_sum_exp = true, .entropy = true, .prediction = true};
    BatchKey without = kind;
    without.mode = ComputeMode::kLossAndWeightGradient;
    without.dx_type = {};
    ChunkInput repeated = RowsOf(problem, 40, 100);
    repeated.accumulate = ChunkRows::Accumulate::kNo;
    const std::vector<ChunkInput> chunks = {RowsOf(problem, 0, 100), repeated, RowsOf(problem, 100, 200)};
    HeadUnderTest whole(device_.get(), problem);
    HeadUnderTest head(device_.get(), problem);
    for (int batch = 0; batch < 2; ++batch) {  // the second one adds
      const std::vector<ChunkOutput> expected = whole.Run(kind, chunks);
      const std::vector<ChunkOutput> outputs = head.Run(without, chunks);
      for (size_t i = 0; i < chunks.size(); ++i) {
        EXPECT_TRUE(SameBits(outputs[i].losses, expected[i].losses)) << i;
        EXPECT_TRUE(SameBits(outputs[i].returns.log_sum_exp, expected[i].returns.log_sum_exp)) << i;
        EXPECT_TRUE(SameBits(outputs[i].returns.entropy, expected[i].returns.entropy)) << i;
        EXPECT_TRUE(outputs[i].dx.empty());
      }
      EXPECT_TRUE(SameBits(head.Gradient(), whole.Gradient()));
    }
    // Repeats alone have nothing to add.
    EXPECT_TRUE(
        SameBits(head.Run(without, {repeated}).front().losses, whole.Run(kind, {repeated}).front().losses));
    EXPECT_TRUE(SameBits(head.Gradient(), whole.Gradient()));
  }
}

TEST_P(Gradients, SeveralChunksOfDwAloneAreAddedTogether) {
  const Problem problem = MakeProblem();
  HeadUnderTest whole(device_.get(), problem);
  whole.Run(KindOf(problem), {RowsOf(problem, 0, 100), RowsOf(problem, 100, 200)});
  HeadUnderTest head(device_.get(), problem);
  head.Run(OnlyDw(problem), {RowsOf(problem, 0, 100), RowsOf(problem, 100, 200)});
  EXPECT_TRUE(SameBits(head.Gradient(), whole.Gradient()));
}

TEST_P(Gradients, EachIsAddedToReadAndResetByItself) {
  for (const OptionCase& options : OptionPaths()) {
    SCOPED_TRACE(options.name);
    const Problem problem = MakeProblem(options);
    HeadUnderTest head(device_.get(), problem);
    const std::vector<float> zeros(kVocab * kHidden);
    std::vector<std::unique_ptr<Gradient>> gradients;
    for (int i = 0; i < 2; ++i) gradients.push_back(head.CreateGradient());
    std::vector<std::vector<float>> expected;  // of each part alone
    for (int64_t part = 0; part < 3; ++part) {
      HeadUnderTest alone(device_.get(), problem);
      alone.Run(KindOf(problem), {RowsOf(problem, part * 100, 100)});
      expected.push_back(alone.Gradient());
    }
    for (const auto& gradient : gradients) EXPECT_TRUE(SameBits(head.Gradient(gradient.get()), zeros));
    for (int round = 0; round < 2; ++round) {
      // Started together: the device has several under way if it can.
      const auto own = head.Start(KindOf(problem), {RowsOf(problem, 0, 100)});
      const auto first = head.Start(OnlyDw(problem, gradients[0].get()), {RowsOf(problem, 100, 100)});
      const auto second = head.Start(OnlyDw(problem, gradients[1].get()), {RowsOf(problem, 200, 100)});
      EXPECT_TRUE(SameBits(head.Gradient(gradients[1].get()), expected[2])) << "a read sees what was started";
      own->Await();
      first->Await();
      second->Await();
      EXPECT_TRUE(SameBits(head.Gradient(), expected[0]));
      EXPECT_TRUE(SameBits(head.Gradient(gradients[0].get()), expected[1]));
      head.backend().Reset(gradients[0].get());
      EXPECT_TRUE(SameBits(head.Gradient(gradients[0].get()), zeros));
      EXPECT_TRUE(SameBits(head.Gradient(), expected[0]));
      EXPECT_TRUE(SameBits(head.Gradient(gradients[1].get()), expected[2]));
      head.backend().ResetGradient();
      EXPECT_TRUE(SameBits(head.Gradient(), zeros));
      EXPECT_TRUE(SameBits(head.Gradient(gradients[1].get()), expected[2]));
      head.backend().Reset(gradients[1].get());
    }
  }
}

TEST_P(Gradients, IgnoredRowsAreAsIfTheyWereNotThere) {
  for (const OptionCase& options : OptionPaths()) {
    SCOPED_TRACE(options.name);
    const Problem problem = MakeProblem(options);
    const ChunkInput with = RowsOf(problem, 0, kTokens);
    ChunkInput without = with;
    without.hidden_states.clear();
    without.labels.clear();
    without.token_weights.clear();
    without.lse_gradients.clear();
    without.entropy_gradients.clear();
    const size_t row_bytes = with.hidden_states.size() / kTokens;
    for (size_t i = 0; i < with.labels.size(); ++i) {
      if (with.labels[i] == kIgnoreIndex) continue;
      without.labels.push_back(with.labels[i]);
      const unsigned char* row = with.hidden_states.data() + i * row_bytes;
      without.hidden_states.insert(without.hidden_states.end(), row, row + row_bytes);
      if (!with.token_weights.empty()) without.token_weights.push_back(with.token_weights[i]);
      if (!with.lse_gradients.empty()) without.lse_gradients.push_back(with.lse_gradients[i]);
      if (!with.entropy_gradients.empty()) without.entropy_gradients.push_back(with.entropy_gradients[i]);
    }
    HeadUnderTest head(device_.get(), problem);
    const std::unique_ptr<Gradient> gradient = head.CreateGradient();
    head.Run(OnlyDw(problem, gradient.get()), {with});
    const std::vector<float> expected = head.Gradient(gradient.get());
    head.backend().Reset(gradient.get());
    head.Run(OnlyDw(problem, gradient.get()), {without});
    EXPECT_TRUE(SameBits(head.Gradient(gradient.get()), expected));
  }
}

TEST_P(Gradients, TheyTakeWhatWasPlanned) {
  const Problem problem = MakeProblem();
  HeadUnderTest head(device_.get(), problem);
  const MemoryPlan of_head = head.backend().MemoryReport();
  EXPECT_GE(TotalBytes(device_->PlanGradient(head.config())), LeastPart(kVocab * kHidden * 4));
  int64_t own = 0;
  for (const MemoryItem& item : of_head) own += item.purpose == "gradient" ? item.bytes : 0;
  EXPECT_EQ(TotalBytes(device_->PlanGradient(head.config())), own);
}

}  // namespace
}  // namespace lossd::engine::testing::gradients_test
