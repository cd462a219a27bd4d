// Heads with an optimizer, and what each of its steps has to do to them by kernels/optimizer.h.
#ifndef LOSSD_TESTS_CONFORMANCE_OPTIMIZER_OPTIMIZER_FIXTURE_H_
#define LOSSD_TESTS_CONFORMANCE_OPTIMIZER_OPTIMIZER_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/conformance/head_under_test.h"
#include "tests/unit/kernels/optimizer_reference.h"

namespace lossd::engine::testing {

enum class MasterWeights { kNo, kYes };
enum class HeadBias { kNo, kYes };

// A gradient, or what is left of one.
struct GradientValues {
  std::vector<float> dw;
  std::vector<float> db;  // empty without a bias
};

// What a head consists of beside gradients, on the host.
struct HeadValues {
  std::vector<unsigned char> weight;  // of the head's type
  std::vector<float> master;          // empty without one
  std::vector<float> bias;
  std::vector<float> first, second, bias_first, bias_second;
};

class OptimizerTest : public HeadTest {
 protected:
  static constexpr int64_t kVocab = 301;
  static constexpr int64_t kHidden = 123;  // not a multiple of anything

  HeadConfig ConfigOf(const kernels::OptimizerArguments& arguments, MasterWeights master,
                      HeadBias bias) const;
  // Both for 16-bit heads, for others the one that there is.
  std::vector<MasterWeights> Masters() const;
  // What the head's optimizer is told.
  static StepArguments ArgumentsOf(const kernels::OptimizerArguments& arguments);

  // Weights of deviation 1 (rounded to the head's type unless it has a master) and a bias.
  static HeadValues RandomValues(const HeadConfig& config, uint64_t seed);
  static void Publish(HeadUnderTest& head, const HeadValues& values);
  static GradientValues RandomGradient(const HeadConfig& config, uint64_t seed);
  static void Write(HeadUnderTest& head, const GradientValues& values, engine::Gradient* to = nullptr);
  static GradientValues Read(HeadUnderTest& head, const engine::Gradient* of = nullptr);

  // The same step on the host.
  static GradientStats Step(const HeadConfig& config, const kernels::OptimizerArguments& arguments,
                            const GradientValues& gradient, HeadValues* values);
  // That a step tells what it should, sums but for their last bits.
  static void ExpectStats(const GradientStats& stats, const GradientStats& expected);
  // That the head is bit for bit what `values` says, by every way to look at it.
  static void Expect(HeadUnderTest& head, const HeadValues& values);
  // That a batch of these, and its gradient, have the bits that a fresh head with the same weights gives
  // them. The window is empty before and afterwards.
  void ExpectAsAFreshHead(HeadUnderTest& head, const Problem& problem);
  // One tensor of its state, read in pieces of several sizes.
  static std::vector<float> StateOf(HeadUnderTest& head, const std::string& name);
};

bool SameValues(const GradientValues& a, const GradientValues& b);

}  // namespace lossd::engine::testing

#endif  // LOSSD_TESTS_CONFORMANCE_OPTIMIZER_OPTIMIZER_FIXTURE_H_
