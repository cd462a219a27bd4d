#include "server/engine/head/parts/gradient_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <utility>
#include <vector>

namespace lossd::engine::gradient_set_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

struct Named : Gradient {};

// Gradients of [2, 2] whose elements are all one number.
class Backend : public HeadBackend {
 public:
  absl::Status PublishWeights(WeightBuffers /*staged*/) override { return absl::OkStatus(); }
  absl::Status ReadWeightRows(int64_t /*first*/, int64_t /*rows*/, kernels::DataType /*type*/,
                              void* /*out*/) override {
    return absl::OkStatus();
  }
  absl::Status ReadBias(int64_t /*first*/, int64_t /*rows*/, float* /*out*/) override {
    return absl::OkStatus();
  }
  int64_t RowsPerBatch(const BatchKey& /*kind*/) const override { return 1; }
  void StartBatch(const BatchKey& /*kind*/, std::span<const ChunkRows> /*chunks*/,
                  BatchCallbacks /*callbacks*/) override {}
  absl::Status ReadGradient(const Gradient* gradient, int64_t /*first*/, int64_t rows, float* out) override {
    if (gradient == lost) return absl::InternalError("lost");
    for (int64_t i = 0; i < rows * 2; ++i) out[i] = values[gradient];
    return absl::OkStatus();
  }
  absl::Status ReadBiasGradient(const Gradient* /*gradient*/, int64_t /*first*/, int64_t /*rows*/,
                                float* /*out*/) override {
    return absl::OkStatus();
  }
  void Reset(Gradient* gradient) override { values[gradient] = 0; }
  absl::Status Fold(Gradient* from, Gradient* to) override {
    values[to] += std::exchange(values[from], 0.0f);
    return absl::OkStatus();
  }
  MemoryPlan MemoryReport() const override { return {}; }

  std::map<const Gradient*, float> values;
  const Gradient* lost = reinterpret_cast<const Gradient*>(this);  // none, unless a test says otherwise
};

class GradientSetTest : public ::testing::Test {
 protected:
  GradientSetTest() {
    config_.vocab_size = 2;
    config_.hidden_size = 2;
    backend_.values = {{nullptr, 1.0f}, {&a_, 10.0f}, {&b_, 100.0f}};
  }
  std::vector<float> Rows(GradientSet& gradients, const WindowGradient& of, float scale) {
    std::vector<float> rows(4);
    EXPECT_TRUE(gradients.ReadRows(of, scale, 0, 2, rows.data()).ok());
    return rows;
  }

  HeadConfig config_;
  Backend backend_;
  Named a_, b_;
};

TEST_F(GradientSetTest, AWindowIsTheSumOfItsGradientAndThoseOfSessions) {
  GradientSet gradients(config_, &backend_, nullptr, nullptr);
  EXPECT_THAT(Rows(gradients, {gradients.Of(false), {}}, 1.0f), Each(1.0f));
  EXPECT_THAT(Rows(gradients, {gradients.Of(false), {&a_, &b_}}, 0.5f), Each(55.5f));
}

TEST_F(GradientSetTest, AGradientThatCannotBeReadIsNotLeftOut) {
  GradientSet gradients(config_, &backend_, nullptr, nullptr);
  backend_.lost = &b_;
  std::vector<float> rows(4);
  EXPECT_FALSE(gradients.ReadRows({nullptr, {&a_, &b_}}, 1.0f, 0, 2, rows.data()).ok());
}

TEST_F(GradientSetTest, FoldingLeavesTheSumInTheWindowsGradientAlone) {
  GradientSet gradients(config_, &backend_, nullptr, nullptr);
  ASSERT_TRUE(gradients.FoldSessions({nullptr, {&a_, &b_}}).ok());
  EXPECT_EQ(backend_.values[nullptr], 111.0f);
  EXPECT_EQ(backend_.values[&a_] + backend_.values[&b_], 0.0f);
}

TEST_F(GradientSetTest, WindowsTakeTurnsInTwoGradientsAndSessionsHaveNeither) {
  auto second = std::make_shared<Named>();
  GradientSet gradients(config_, &backend_, nullptr, second);
  EXPECT_EQ(gradients.Of(true), second.get());
  EXPECT_TRUE(gradients.IsWindows(nullptr));
  EXPECT_TRUE(gradients.IsWindows(second.get()));
  EXPECT_FALSE(gradients.IsWindows(&a_));
  backend_.values[second.get()] = 7.0f;
  ASSERT_TRUE(gradients.FoldOther(false).ok());
  EXPECT_EQ(backend_.values[nullptr], 8.0f);
}

TEST_F(GradientSetTest, ResetEmptiesAllOfThem) {
  GradientSet gradients(config_, &backend_, nullptr, nullptr);
  gradients.Reset({nullptr, {&a_, &b_}});
  EXPECT_THAT(Rows(gradients, {nullptr, {&a_, &b_}}, 1.0f), ElementsAre(0, 0, 0, 0));
}

}  // namespace
}  // namespace lossd::engine::gradient_set_test
