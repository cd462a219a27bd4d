// Entries that a bias rules out, as masks do it: logits of -infinity, or nearly, that come of finite numbers.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/conformance/head_under_test.h"
#include "tests/unit/kernels/soft_problems.h"

namespace lossd::engine::testing::masks_test {
namespace {

using kernels::Divergence;
using kernels::testing::kDivergences;
using kernels::testing::KeepTokens;
using kernels::testing::Narrowed;
using kernels::testing::RandomProblem;
using kernels::testing::RandomTargets;
using kernels::testing::Reference;
using kernels::testing::RelativeError;
using kernels::testing::RunReference;
using kernels::testing::SoftProblem;

constexpr int64_t kVocab = 2100;
constexpr int64_t kTokens = 12;
constexpr int64_t kHidden = 32;
constexpr float kMask = std::numeric_limits<float>::lowest();
constexpr double kHuge = 1e30;  // more than any logit but those of the mask

struct Mask {
  const char* name;
  bool (*covers)(int64_t entry);
};
constexpr Mask kMasks[] = {
    {"first 255", [](int64_t v) { return v < 255; }},
    {"first 256", [](int64_t v) { return v < 256; }},
    {"last 7", [](int64_t v) { return v >= kVocab - 7; }},
    {"1024 to 2000", [](int64_t v) { return v >= 1024 && v < 2000; }},
    {"upper half", [](int64_t v) { return v >= kVocab / 2; }},
    {"all but some", [](int64_t v) { return v % 100 != 0; }},
};

struct Option {
  const char* name;
  std::function<void(Problem&)> set;
};

std::vector<float> Alternating(int64_t count, float low, float high) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) values[i] = i % 2 == 0 ? high : low;
  return values;
}

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

std::vector<float> BiasOf(const Mask& mask) {
  std::vector<float> bias(kVocab);
  for (int64_t v = 0; v < kVocab; ++v) bias[static_cast<size_t>(v)] = mask.covers(v) ? kMask : 0.25f;
  return bias;
}

void MoveLabels(const Mask& mask, Problem& problem) {
  for (int64_t& label : problem.labels) {
    while (mask.covers(label)) label = (label + 1) % kVocab;
  }
}

void ExpectNear(double actual, double expected) {
  if (std::abs(expected) < kHuge) {
    EXPECT_NEAR(actual, expected, 1e-4 * (1 + std::abs(expected)));
  } else {
    EXPECT_GT(std::copysign(1.0, expected) * actual, kHuge);
  }
}

class Masks : public HeadTest {
 protected:
  Problem Masked(const Mask& mask, float scale) const {
    Problem problem =
        RandomProblem({.shape = {kTokens, kVocab, kHidden}, .type = type(), .logit_deviation = 2.0});
    problem.bias = BiasOf(mask);
    problem.options.logit_scale = scale;
    MoveLabels(mask, problem);
    return problem;
  }

  void ExpectGradients(const Reference& reference, const ChunkOutput& output, HeadUnderTest& head) const {
    EXPECT_LT(RelativeError(output.dx, reference.dx), Tolerance());
    EXPECT_LT(RelativeError(head.Gradient(), reference.dw), Tolerance());
    EXPECT_LT(RelativeError(head.BiasGradient(), reference.db), Tolerance());
  }

  void ExpectAgreement(const Problem& problem) {
    const Reference reference = RunReference(problem);
    HeadUnderTest head(device_.get(), problem);
    const ChunkOutput output = head.Run(problem, kAllReturns);
    ExpectGradients(reference, output, head);
    const RowReturnValues& told = output.returns;
    for (size_t r = 0; r < kTokens; ++r) {
      SCOPED_TRACE(r);
      ExpectNear(output.losses[r], reference.losses[r]);
      ExpectNear(told.log_sum_exp[r], reference.log_sum_exp[r]);
      ExpectNear(told.log_probability[r], reference.log_probability[r]);
      ExpectNear(told.entropy[r], reference.entropy[r]);
      ExpectNear(told.z_loss[r], reference.z_loss[r]);
      EXPECT_EQ(told.prediction[r], told.top_tokens[3 * r]);
      for (size_t i = 3 * r; i < 3 * r + 3; ++i) {
        ASSERT_GE(told.top_tokens[i], 0);
        const size_t token = r * kVocab + static_cast<size_t>(told.top_tokens[i]);
        ExpectNear(told.top_log_probabilities[i], reference.logits[token] - reference.log_sum_exp[r]);
      }
    }
  }

  double Tolerance() const { return 4 * GradientError(); }
};

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
        if (!masked.student && divergence == Divergence::kReverseKl)
          continue;  // infinite, without a gradient
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

TEST_P(Masks, AreInListsOfTokens) {
  if (!device_->TakesTokenLists()) GTEST_SKIP() << "no lists of tokens";
  for (const Mask& mask : kMasks) {
    for (const bool targets : {false, true}) {
      for (const bool entropy : {false, true}) {
        SCOPED_TRACE(std::string(mask.name) + (targets ? ", targets" : ", kept") +
                     (entropy ? ", entropy" : ""));
        Problem problem = Masked(mask, 2.0f);
        if (entropy) problem.entropy_gradients = Alternating(kTokens, -1.0f, 0.5f);
        if (targets) {
          problem.targets = RandomTargets(problem, 0.1, 0.8);
        } else {
          KeepTokens(problem, 0.3);
        }
        const Reference reference = RunReference(problem);
        HeadUnderTest head(device_.get(), problem);
        const ChunkOutput output = head.Run(problem, {.log_sum_exp = true, .entropy = true});
        ExpectGradients(reference, output, head);
        for (size_t r = 0; r < kTokens; ++r) {
          ExpectNear(output.losses[r], reference.losses[r]);
          ExpectNear(output.returns.log_sum_exp[r], reference.log_sum_exp[r]);
          ExpectNear(output.returns.entropy[r], reference.entropy[r]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace lossd::engine::testing::masks_test
