#include "bench/kernels/traffic.h"

#include <gtest/gtest.h>

namespace lossd::bench::traffic_test {
namespace {

using kernels::DataType;

TEST(TrafficTest, BareProductsCountEachOperandOnce) {
  // 2·3 rows of X in 2 bytes, 5·3 of W in 2, 2·5 logits in 4.
  const Work logits = ProductWork(Product::kLogits, 2, 5, 3, DataType::kBFloat16, DataType::kFloat32);
  EXPECT_EQ(logits.operations, 60);
  EXPECT_EQ(logits.bytes, 12 + 30 + 40);
  const Work dx = ProductWork(Product::kInputGradient, 2, 5, 3, DataType::kBFloat16, DataType::kFloat32);
  EXPECT_EQ(dx.bytes, 20 + 30 + 24);
  // dW is read and written in fp32 whatever the operands are.
  const Work dw = ProductWork(Product::kWeightGradient, 2, 5, 3, DataType::kBFloat16, DataType::kBFloat16);
  EXPECT_EQ(dw.bytes, 20 + 12 + 120);
}

TEST(TrafficTest, AStepInMoreTilesMovesWeightsAndGradientMoreOften) {
  StepShape shape{.rows = 4096, .tile_rows = 4096, .vocab = 1024, .hidden = 256};
  const Work once = StepWork(shape);
  shape.tile_rows = 1024;
  const Work four_times = StepWork(shape);
  EXPECT_EQ(once.operations, four_times.operations);
  const double weight = 1024.0 * 256 * 2;
  const double sample = 128.0 * 256 * 2;
  const double gradient = 1024.0 * 256 * 4;
  EXPECT_EQ(four_times.bytes - once.bytes, 3 * (2 * weight + sample + 2 * gradient));
}

TEST(TrafficTest, TheDefinedProductsAreAllThatCountsAsOperations) {
  const StepShape shape{.rows = 10, .tile_rows = 10, .vocab = 100, .hidden = 8};
  EXPECT_EQ(StepWork(shape).operations, 6.0 * 10 * 100 * 8);
  EXPECT_EQ(ForwardWork(shape).operations, 2.0 * 10 * 100 * 8);
  EXPECT_EQ(StageWork("no such stage", shape).bytes, 0);
}

TEST(TrafficTest, LosingTheGradientsSavesTheirTraffic) {
  const StepShape shape{.rows = 512, .tile_rows = 512, .vocab = 192, .hidden = 64};
  const double e = 512.0 * 192 * 2;
  double stages = 0;
  for (const char* stage : {"prepare", "offsets", "logits", "rows"}) stages += StageWork(stage, shape).bytes;
  EXPECT_EQ(ForwardWork(shape).bytes, stages - e);
}

}  // namespace
}  // namespace lossd::bench::traffic_test
