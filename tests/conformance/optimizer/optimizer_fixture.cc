#include "tests/conformance/optimizer/optimizer_fixture.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace lossd::engine::testing {

using kernels::OptimizerArguments;
using kernels::OptimizerRule;
using kernels::SizeOf;
using kernels::testing::Narrowed;
using kernels::testing::NormalFloats;
using kernels::testing::SameBits;

namespace {

std::vector<float> Widened(DataType type, const std::vector<unsigned char>& values) {
  std::vector<float> wide(values.size() / static_cast<size_t>(SizeOf(type)));
  kernels::Convert(type, values.data(), DataType::kFloat32, wide.data(), static_cast<int64_t>(wide.size()));
  return wide;
}

OptimizerKind KindOf(OptimizerRule rule) {
  return rule == OptimizerRule::kSgd    ? OptimizerKind::kSgd
         : rule == OptimizerRule::kAdam ? OptimizerKind::kAdam
                                        : OptimizerKind::kAdamW;
}

}  // namespace

bool SameValues(const GradientValues& a, const GradientValues& b) {
  return SameBits(a.dw, b.dw) && SameBits(a.db, b.db);
}

StepArguments OptimizerTest::ArgumentsOf(const OptimizerArguments& a) {
  return {.learning_rate = a.learning_rate,
          .gradient_scale = a.gradient_scale,
          .optimizer = {.kind = KindOf(a.rule),
                        .weight_decay = a.weight_decay,
                        .momentum = a.momentum,
                        .dampening = a.dampening,
                        .nesterov = a.nesterov,
                        .beta1 = a.beta1,
                        .beta2 = a.beta2,
                        .eps = a.eps,
                        .maximize = a.maximize},
          .step = a.step};
}

HeadConfig OptimizerTest::ConfigOf(const OptimizerArguments& arguments, MasterWeights master,
                                   HeadBias bias) const {
  HeadConfig config{"h", kVocab, kHidden, type()};
  config.optimizer = ArgumentsOf(arguments).optimizer;
  config.master_weights = master == MasterWeights::kYes;
  config.bias = bias == HeadBias::kYes;
  return config;
}

std::vector<MasterWeights> OptimizerTest::Masters() const {
  if (type() == DataType::kFloat32) return {MasterWeights::kNo};
  return {MasterWeights::kNo, MasterWeights::kYes};
}

HeadValues OptimizerTest::RandomValues(const HeadConfig& config, uint64_t seed) {
  HeadValues values;
  const std::vector<float> weight = NormalFloats(config.elements(), 0.1, seed);
  values.weight = Narrowed(config.weight_type, weight);
  if (config.master_weights) values.master = weight;
  const auto moments = config.optimizer.moments();
  const auto elements = static_cast<size_t>(config.elements());
  const auto vocab = static_cast<size_t>(config.bias ? config.vocab_size : 0);
  if (config.bias) values.bias = NormalFloats(config.vocab_size, 0.1, seed + 1);
  if (moments > 0) values.first.resize(elements);
  if (moments > 1) values.second.resize(elements);
  if (moments > 0) values.bias_first.resize(vocab);
  if (moments > 1) values.bias_second.resize(vocab);
  return values;
}

void OptimizerTest::Publish(HeadUnderTest& head, const HeadValues& values) {
  head.Publish(values.master.empty() ? values.weight : Narrowed(DataType::kFloat32, values.master),
               values.bias);
}

GradientValues OptimizerTest::RandomGradient(const HeadConfig& config, uint64_t seed) {
  GradientValues values{NormalFloats(config.elements(), 0.5, seed), {}};
  if (config.bias) values.db = NormalFloats(config.vocab_size, 0.5, seed + 1);
  return values;
}

void OptimizerTest::Write(HeadUnderTest& head, const GradientValues& values, engine::Gradient* to) {
  const int64_t hidden = head.config().hidden_size;
  for (int64_t row = 0; row < head.config().vocab_size;) {
    const int64_t rows = std::min<int64_t>(head.config().vocab_size - row, 100);
    const float* bias = values.db.empty() ? nullptr : &values.db[static_cast<size_t>(row)];
    const absl::Status written =
        head.backend().WriteGradient(to, row, rows, &values.dw[static_cast<size_t>(row * hidden)], bias);
    ASSERT_TRUE(written.ok()) << written;
    row += rows;
  }
}

GradientValues OptimizerTest::Read(HeadUnderTest& head, const engine::Gradient* of) {
  GradientValues values{head.Gradient(of), {}};
  if (!head.config().bias) return values;
  values.db.resize(static_cast<size_t>(head.config().vocab_size));
  const absl::Status read =
      head.backend().ReadBiasGradient(of, 0, head.config().vocab_size, values.db.data());
  EXPECT_TRUE(read.ok()) << read;
  return values;
}

GradientStats OptimizerTest::Step(const HeadConfig& config, const OptimizerArguments& arguments,
                                  const GradientValues& gradient, HeadValues* values) {
  const kernels::OptimizerCoefficients coefficients = kernels::CoefficientsOf(arguments);
  const kernels::GradientTally dw =
      kernels::CpuApplyOptimizer({.count = config.elements(),
                                  .gradient = gradient.dw.empty() ? nullptr : gradient.dw.data(),
                                  .weight_type = config.weight_type,
                                  .weight = values->weight.data(),
                                  .master = values->master.empty() ? nullptr : values->master.data(),
                                  .first_moment = values->first.data(),
                                  .second_moment = values->second.data()},
                                 coefficients);
  kernels::GradientTally db;
  if (config.bias) {
    db = kernels::CpuApplyOptimizer({.count = config.vocab_size,
                                     .gradient = gradient.db.empty() ? nullptr : gradient.db.data(),
                                     .weight = values->bias.data(),
                                     .first_moment = values->bias_first.data(),
                                     .second_moment = values->bias_second.data()},
                                    coefficients);
  }
  return {std::sqrt(dw.squares), std::sqrt(db.squares), std::max(dw.largest, db.largest),
          dw.non_finite + db.non_finite};
}

void OptimizerTest::ExpectStats(const GradientStats& stats, const GradientStats& expected) {
  EXPECT_NEAR(stats.norm, expected.norm, 1e-12 * expected.norm);
  EXPECT_NEAR(stats.bias_norm, expected.bias_norm, 1e-12 * expected.bias_norm);
  EXPECT_EQ(stats.largest, expected.largest);
  EXPECT_EQ(stats.non_finite, expected.non_finite);
}

void OptimizerTest::ExpectAsAFreshHead(HeadUnderTest& head, const Problem& problem) {
  const HeadConfig& config = head.config();
  HeadUnderTest fresh(device_.get(), config);
  fresh.Publish(head.Weights(config.master_type(), 0, kVocab), head.Bias(0, kVocab));
  const ChunkOutput output = head.Run(problem);
  const ChunkOutput expected = fresh.Run(problem);
  EXPECT_TRUE(SameBits(output.losses, expected.losses));
  EXPECT_TRUE(SameBits(output.dx, expected.dx));
  EXPECT_TRUE(SameValues(Read(head), Read(fresh)));
  head.backend().ResetGradient();
}

std::vector<float> OptimizerTest::StateOf(HeadUnderTest& head, const std::string& name) {
  for (const StateTensor& tensor : head.backend().StateTensors()) {
    if (tensor.name != name) continue;
    const auto row_bytes = static_cast<size_t>(tensor.columns * SizeOf(tensor.type));
    std::vector<unsigned char> bytes(static_cast<size_t>(tensor.rows) * row_bytes);
    for (int64_t row = 0; row < tensor.rows;) {
      const int64_t rows = std::min<int64_t>(tensor.rows - row, row == 0 ? 1 : 170);
      GuardedBytes piece(rows * static_cast<int64_t>(row_bytes), 64, SizeOf(tensor.type));
      const absl::Status read = head.backend().ReadState(name, row, rows, piece.data());
      EXPECT_TRUE(read.ok()) << read;
      EXPECT_TRUE(piece.Intact());
      std::memcpy(&bytes[static_cast<size_t>(row) * row_bytes], piece.data(),
                  static_cast<size_t>(piece.size()));
      row += rows;
    }
    return Widened(tensor.type, bytes);
  }
  ADD_FAILURE() << "no tensor " << name;
  return {};
}

void OptimizerTest::Expect(HeadUnderTest& head, const HeadValues& values) {
  const HeadConfig& config = head.config();
  const int64_t vocab = config.vocab_size;
  EXPECT_TRUE(head.Weights(config.weight_type, 0, vocab) == values.weight) << "weights";
  if (config.master_weights) {
    EXPECT_TRUE(head.Weights(DataType::kFloat32, 0, vocab) == Narrowed(DataType::kFloat32, values.master));
    EXPECT_TRUE(SameBits(StateOf(head, "master_weight"), values.master));
  } else {
    EXPECT_TRUE(SameBits(StateOf(head, "weight"), Widened(config.weight_type, values.weight)));
  }
  const bool sgd = config.optimizer.kind == OptimizerKind::kSgd;
  const std::string first = sgd ? "momentum_buffer" : "exp_avg";
  const auto expect = [&](const std::string& name, const std::vector<float>& expected) {
    if (expected.empty()) return;
    EXPECT_TRUE(SameBits(StateOf(head, name), expected)) << name;
  };
  expect(first, values.first);
  expect("exp_avg_sq", values.second);
  if (!config.bias) return;
  EXPECT_TRUE(SameBits(head.Bias(0, vocab), values.bias)) << "bias";
  expect("bias", values.bias);
  expect("bias." + first, values.bias_first);
  expect("bias.exp_avg_sq", values.bias_second);
}

}  // namespace lossd::engine::testing
