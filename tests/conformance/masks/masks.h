// Entries that a bias rules out, as masks do it: logits of -infinity, or nearly, that come of finite numbers.
#ifndef LOSSD_TESTS_CONFORMANCE_MASKS_MASKS_H_
#define LOSSD_TESTS_CONFORMANCE_MASKS_MASKS_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <vector>

#include "tests/conformance/head_under_test.h"

namespace lossd::engine::testing::masks_test {

inline constexpr int64_t kVocab = 2100;
inline constexpr int64_t kTokens = 12;
inline constexpr int64_t kHidden = 32;
inline constexpr float kMask = std::numeric_limits<float>::lowest();
inline constexpr double kHuge = 1e30;  // more than any logit but those of the mask

struct Mask {
  const char* name;
  bool (*covers)(int64_t entry);
};
inline constexpr Mask kMasks[] = {
    {"first 255", [](int64_t v) { return v < 255; }},
    {"first 256", [](int64_t v) { return v < 256; }},
    {"last 7", [](int64_t v) { return v >= kVocab - 7; }},
    {"1024 to 2000", [](int64_t v) { return v >= 1024 && v < 2000; }},
    {"upper half", [](int64_t v) { return v >= kVocab / 2; }},
    {"all but some", [](int64_t v) { return v % 100 != 0; }},
};

inline std::vector<float> BiasOf(const Mask& mask) {
  std::vector<float> bias(kVocab);
  for (int64_t v = 0; v < kVocab; ++v) bias[static_cast<size_t>(v)] = mask.covers(v) ? kMask : 0.25f;
  return bias;
}

inline void MoveLabels(const Mask& mask, Problem& problem) {
  for (int64_t& label : problem.labels) {
    while (mask.covers(label)) label = (label + 1) % kVocab;
  }
}

inline void ExpectNear(double actual, double expected) {
  if (std::abs(expected) < kHuge) {
    EXPECT_NEAR(actual, expected, 1e-4 * (1 + std::abs(expected)));
  } else {
    EXPECT_GT(std::copysign(1.0, expected) * actual, kHuge);
  }
}

class Masks : public HeadTest {
 protected:
  Problem Masked(const Mask& mask, float scale) const {
    Problem problem = kernels::testing::RandomProblem(
        {.shape = {kTokens, kVocab, kHidden}, .type = type(), .logit_deviation = 2.0});
    problem.bias = BiasOf(mask);
    problem.options.logit_scale = scale;
    MoveLabels(mask, problem);
    return problem;
  }

  void ExpectGradients(const kernels::testing::Reference& reference, const ChunkOutput& output,
                       HeadUnderTest& head) const {
    EXPECT_LT(kernels::testing::RelativeError(output.dx, reference.dx), Tolerance());
    EXPECT_LT(kernels::testing::RelativeError(head.Gradient(), reference.dw), Tolerance());
    EXPECT_LT(kernels::testing::RelativeError(head.BiasGradient(), reference.db), Tolerance());
  }

  void ExpectAgreement(const Problem& problem) {
    const kernels::testing::Reference reference = Expected(problem);
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

  double Tolerance() const { return 4 * GradientTolerance(); }
};

}  // namespace lossd::engine::testing::masks_test

#endif  // LOSSD_TESTS_CONFORMANCE_MASKS_MASKS_H_
