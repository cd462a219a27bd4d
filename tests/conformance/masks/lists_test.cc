// Entries that a bias rules out, in lists of tokens.
#include <gtest/gtest.h>

#include <string>

#include "tests/conformance/masks/masks.h"
#include "tests/unit/kernels/option_cases.h"

namespace lossd::engine::testing::masks_test {
namespace {

using kernels::testing::KeepTokens;
using kernels::testing::RandomTargets;
using kernels::testing::Reference;

class MasksInLists : public Masks {
 protected:
  void SetUp() override {
    HeadTest::SetUp();
    if (device_ != nullptr && !device_->TakesTokenLists()) GTEST_SKIP() << "no lists of tokens";
  }
};

INSTANTIATE_TEST_SUITE_P(All, MasksInLists, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(MasksInLists, LeaveAllElseAsItIs) {
  for (const Mask& mask : kMasks) {
    for (const bool targets : {false, true}) {
      for (const bool entropy : {false, true}) {
        SCOPED_TRACE(std::string(mask.name) + (targets ? ", targets" : ", kept") +
                     (entropy ? ", entropy" : ""));
        Problem problem = Masked(mask, 2.0f);
        if (entropy) problem.entropy_gradients = kernels::testing::Spread(kTokens, -1.0f, 0.5f);
        if (targets) {
          problem.targets = RandomTargets(problem, 0.1, 0.8);
        } else {
          KeepTokens(problem, 0.3);
        }
        const Reference reference = Expected(problem);
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
