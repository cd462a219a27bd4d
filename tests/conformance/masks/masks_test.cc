// Heads some of whose entries are ruled out agree with the oracle in everything else.
#include "tests/conformance/masks/masks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "tests/conformance/head_under_test.h"
#include "tests/unit/kernels/option_cases.h"
#include "tests/unit/kernels/soft_problems.h"

namespace lossd::engine::testing::masks_test {
namespace {

using kernels::Divergence;
using kernels::testing::kDivergences;
using kernels::testing::OptionCase;
using kernels::testing::OptionPaths;
using kernels::testing::Reference;
using kernels::testing::SoftProblem;

// Those that leave the mask what it is.
std::vector<OptionCase> Options() {
  std::vector<OptionCase> options = OptionPaths();
  std::erase_if(options, [](const OptionCase& option) {
    return option.name.starts_with("bias") || option.name.starts_with("logit scale") ||
           option.name.starts_with("all");
  });
  return options;
}

class MasksBesideOptions : public Masks {
 protected:
  // Every option with every mask on the CPU device, with one of them elsewhere.
  void ForEach(const std::function<void(const Mask& mask, Problem& problem)>& check) {
    size_t number = 0;
    for (const OptionCase& option : Options()) {
      for (const Mask& mask : kMasks) {
        const bool chosen = number % std::size(kMasks) == number / std::size(kMasks) % std::size(kMasks);
        ++number;
        if (oracle() != Oracle::kReference && !chosen) continue;
        SCOPED_TRACE(std::string(mask.name) + ", " + option.name);
        Problem problem = Masked(mask, number % 2 == 0 ? 1.0f : 2.0f);
        option.set(problem);
        // Each class and token counts.
        for (std::vector<float>* weights : {&problem.class_weights, &problem.token_weights}) {
          for (float& weight : *weights) weight = 0.5f + std::fabs(weight);
        }
        check(mask, problem);
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(All, MasksBesideOptions, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(MasksBesideOptions, LeaveAllElseAsItIs) {
  ForEach([&](const Mask& /*mask*/, Problem& problem) { ExpectAgreement(problem); });
}

// Its p is 0. So is its row's log p where the class does not count.
TEST_P(MasksBesideOptions, OfALabelMakeItsLossInfiniteAndLeaveTheOthers) {
  ForEach([&](const Mask& mask, Problem& problem) {
    problem.options.logit_scale = 2.0f;
    for (problem.labels[3] = 0; !mask.covers(problem.labels[3]);) ++problem.labels[3];
    ExpectAgreement(problem);
    if (problem.options.softcap > 0) return;
    HeadUnderTest head(device_.get(), problem);
    const ChunkOutput output = head.Run(problem, {.log_probability = true});
    EXPECT_EQ(output.losses[3], HUGE_VALF);
    EXPECT_EQ(output.returns.log_probability[3], -HUGE_VALF);
  });
}

INSTANTIATE_TEST_SUITE_P(All, Masks, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

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
      const Reference reference = Expected(problem);
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
        const Reference reference = Expected(problem);
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
