// Heads some of whose entries are ruled out agree with the fp64 reference in everything else.
#include "tests/conformance/masks/masks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "tests/conformance/head_under_test.h"
#include "tests/unit/kernels/soft_problems.h"

namespace lossd::engine::testing::masks_test {
namespace {

using kernels::Divergence;
using kernels::testing::kDivergences;
using kernels::testing::Reference;
using kernels::testing::RunReference;
using kernels::testing::SoftProblem;

struct Option {
  const char* name;
  std::function<void(Problem&)> set;
};

const std::vector<Option>& Options() {
  static const std::vector<Option> options = {
      {"nothing", [](Problem&) {}},
      {"softcap", [](Problem& p) { p.options.softcap = 3.0f; }},
      {"smoothing", [](Problem& p) { p.options.label_smoothing = 0.1f; }},
      {"smoothing and softcap",
       [](Problem& p) {
         p.options.label_smoothing = 0.1f;
         p.options.softcap = 3.0f;
       }},
      {"z-loss", [](Problem& p) { p.options.lse_square_scale = 0.1f; }},
      {"class weights", [](Problem& p) { p.class_weights = Alternating(kVocab, 0.5f, 1.5f); }},
      {"token weights", [](Problem& p) { p.token_weights = Alternating(kTokens, 0.5f, 1.5f); }},
      {"entropy gradients", [](Problem& p) { p.entropy_gradients = Alternating(kTokens, -1.0f, 0.5f); }},
      {"entropy gradients and smoothing",
       [](Problem& p) {
         p.entropy_gradients = Alternating(kTokens, -1.0f, 0.5f);
         p.options.label_smoothing = 0.1f;
       }},
  };
  return options;
}

INSTANTIATE_TEST_SUITE_P(All, Masks, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(Masks, LeaveAllElseAsItIs) {
  for (const Mask& mask : kMasks) {
    for (const Option& option : Options()) {
      for (const float scale : {1.0f, 2.0f}) {
        SCOPED_TRACE(std::string(mask.name) + ", " + option.name + ", scale " + std::to_string(scale));
        Problem problem = Masked(mask, scale);
        option.set(problem);
        ExpectAgreement(problem);
      }
    }
  }
}

TEST_P(Masks, GiveMaskedEntriesNoGradient) {
  for (const Mask& mask : kMasks) {
    SCOPED_TRACE(mask.name);
    const Problem problem = Masked(mask, 2.0f);
    HeadUnderTest head(device_.get(), problem);
    head.Run(problem);
    const std::vector<float> gradient = head.BiasGradient();
    for (int64_t v = 0; v < kVocab; ++v) {
      if (!mask.covers(v)) continue;
      EXPECT_NEAR(gradient[static_cast<size_t>(v)], 0.0f, 1e-20f) << v;
    }
  }
}

// Its p is 0. So is its row's log p where the class does not count.
TEST_P(Masks, OfALabelMakeItsLossInfiniteAndLeaveTheOthers) {
  for (const Mask& mask : kMasks) {
    for (const Option& option : Options()) {
      SCOPED_TRACE(std::string(mask.name) + ", " + option.name);
      Problem problem = Masked(mask, 2.0f);
      option.set(problem);
      for (problem.labels[3] = 0; !mask.covers(problem.labels[3]);) ++problem.labels[3];
      ExpectAgreement(problem);
      if (problem.options.softcap > 0) continue;
      HeadUnderTest head(device_.get(), problem);
      const ChunkOutput output = head.Run(problem, {.log_probability = true});
      EXPECT_EQ(output.losses[3], HUGE_VALF);
      EXPECT_EQ(output.returns.log_probability[3], -HUGE_VALF);
    }
  }
}

TEST_P(Masks, WithSmoothingMakeTheLossInfinite) {
  Problem problem = Masked(kMasks[2], 2.0f);
  problem.options.label_smoothing = 0.1f;
  HeadUnderTest head(device_.get(), problem);
  for (const float loss : head.Run(problem).losses) EXPECT_EQ(loss, HUGE_VALF);
}

TEST_P(Masks, AreInTheLogits) {
  constexpr int32_t kTop = 5;
  for (const Mask& mask : kMasks) {
    for (const float softcap : {0.0f, 3.0f}) {
      SCOPED_TRACE(std::string(mask.name) + ", softcap " + std::to_string(softcap));
      Problem problem = Masked(mask, 2.0f);
      problem.options.softcap = softcap;
      const Reference reference = RunReference(problem);
      HeadUnderTest head(device_.get(), problem);
      std::vector<float> logits(kTokens * kVocab);
      std::vector<int32_t> tokens(kTokens * kTop);
      std::vector<float> top(kTokens * kTop);
      std::vector<float> log_sum_exp(kTokens);
      LogitRows rows{.rows = kTokens,
                     .hidden_states = problem.hidden_states.data(),
                     .logit_scale = 2.0f,
                     .softcap = softcap,
                     .bias = Bias::kUse,
                     .outputs = {.logits = logits.data()}};
      ASSERT_TRUE(head.backend().Logits(rows).ok());
      rows.outputs = {.top_k = kTop,
                      .top_tokens = tokens.data(),
                      .top_logits = top.data(),
                      .log_sum_exp = log_sum_exp.data()};
      ASSERT_TRUE(head.backend().Logits(rows).ok());
      for (size_t i = 0; i < logits.size(); ++i) ExpectNear(logits[i], reference.logits[i]);
      for (size_t r = 0; r < kTokens; ++r) {
        ExpectNear(log_sum_exp[r], reference.log_sum_exp[r]);
        for (size_t i = r * kTop; i < (r + 1) * kTop; ++i) {
          ASSERT_GE(tokens[i], 0);
          ExpectNear(top[i], reference.logits[r * kVocab + static_cast<size_t>(tokens[i])]);
        }
      }
    }
  }
}

TEST_P(Masks, OfEitherHeadAreInDivergences) {
  struct Masked {
    const char* name;
    bool student;
    bool teacher;
  };
  for (const Mask& mask : kMasks) {
    for (const Masked& masked :
         {Masked{"both", true, true}, Masked{"student", true, false}, Masked{"teacher", false, true}}) {
      for (const Divergence divergence : kDivergences) {
        // Infinite, without a gradient.
        if (!masked.student && divergence == Divergence::kReverseKl) continue;
        SCOPED_TRACE(std::string(mask.name) + ", " + masked.name + ", divergence " +
                     std::to_string(static_cast<int>(divergence)));
        Problem problem = SoftProblem({kTokens, kVocab, kHidden}, type(), divergence);
        problem.bias = masked.student ? BiasOf(mask) : std::vector<float>(kVocab, 0.25f);
        if (masked.teacher) problem.teacher->bias = BiasOf(mask);
        problem.options.logit_scale = problem.teacher->logit_scale = 2.0f;
        MoveLabels(mask, problem);
        const Reference reference = RunReference(problem);
        HeadUnderTest teacher(device_.get(), TeacherConfigOf(problem));
        teacher.Publish(problem.teacher->weight, problem.teacher->bias);
        HeadUnderTest student(device_.get(), problem);
        BatchKey kind = KindOf(problem);
        kind.returns = {.divergence = true};
        kind.teacher = teacher.AsTeacher(problem, student);
        const ChunkOutput output = student.Run(kind, {RowsOf(problem, 0, kTokens)}).front();
        ExpectGradients(reference, output, student);
        for (size_t r = 0; r < kTokens; ++r) {
          ExpectNear(output.losses[r], reference.losses[r]);
          ExpectNear(output.returns.divergence[r], reference.divergence[r]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace lossd::engine::testing::masks_test
