#include "tests/conformance/soft_targets_closeness.h"

#include <gtest/gtest.h>

#include <iostream>

#include "tests/conformance/comparison.h"

namespace lossd::engine::testing {
namespace {

using kernels::DataType;
using kernels::Distillation;
using kernels::Divergence;
using kernels::testing::Problem;
using kernels::testing::RandomProblem;
using kernels::testing::RandomTeacher;

struct SoftCase {
  const char* name;
  Distillation distillation;
  void (*set)(Problem& problem);
};

const SoftCase kCases[] = {
    {"KL(p, q)", {.divergence = Divergence::kForwardKl}, nullptr},
    {"KL(q, p)", {.divergence = Divergence::kReverseKl}, nullptr},
    {"JSD", {.divergence = Divergence::kJensenShannon}, nullptr},
    {"JSD at 0.1", {.divergence = Divergence::kJensenShannon, .beta = 0.1f}, nullptr},
    {"KL(p, q) at temperature 2",
     {.divergence = Divergence::kForwardKl, .temperature = 2.0f, .weight = 4.0f},
     nullptr},
    {"KL(p, q) and the labels", {.divergence = Divergence::kForwardKl, .label_weight = 0.5f}, nullptr},
    {"KL(q, p), temperature 2 and everything else",
     {.divergence = Divergence::kReverseKl, .temperature = 2.0f, .label_weight = 0.5f},
     [](Problem& p) {
       p.options = {
           .logit_scale = 0.7f, .softcap = 15.0f, .label_smoothing = 0.1f, .lse_square_scale = 1e-3f};
       p.teacher->softcap = 30.0f;
       p.teacher->logit_scale = 0.8f;
     }},
};

}  // namespace

void ExpectSoftTargetsAreClose(DataType type, const SoftStep& step) {
  for (const SoftCase& c : kCases) {
    SCOPED_TRACE(c.name);
    Comparison comparison;
    for (int seed = 1; seed <= ClosenessSeeds(); ++seed) {
      for (const double deviation : {0.3, 3.0}) {
        Problem problem = RandomProblem({.shape = {48, 384, 96},
                                         .type = type,
                                         .logit_deviation = deviation,
                                         .seed = static_cast<uint64_t>(seed)});
        problem.teacher = RandomTeacher(problem.shape, {.hidden = 72,
                                                        .type = type,
                                                        .logit_deviation = deviation,
                                                        .seed = static_cast<uint64_t>(100 + seed),
                                                        .distillation = c.distillation});
        if (c.set != nullptr) c.set(problem);
        const SoftStepOutcome outcome = step(problem);
        ASSERT_EQ(outcome.losses.size(), 48U);
        comparison.Add(problem, outcome.losses, outcome.dx, outcome.dw);
      }
    }
    std::cout << "soft targets, " << c.name << ", " << Name(type) << ": " << comparison.ToText() << "\n";
    comparison.ExpectCloseEnough(type);
  }
}

}  // namespace lossd::engine::testing
