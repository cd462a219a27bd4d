// The helpers of lossd/loss.h.
#include "lossd/loss.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace lossd::loss_test {
namespace {

TEST(LossHelpersTest, CountsLeaveIgnoredLabelsOut) {
  const std::vector<int64_t> labels = {2, -100, 0, 2};
  const std::vector<float> weights = {0.5F, 7, 2};
  EXPECT_EQ(CountValid(labels), 3);
  EXPECT_EQ(CountValid(labels, 2), 2);
  EXPECT_EQ(ClassWeightSum(labels, weights), 4.5);
}

TEST(LossHelpersTest, ShiftedLabelsStayWithinTheirSequence) {
  const std::vector<int64_t> labels = {1, 2, 3, 4, 5, 6};
  EXPECT_EQ(*ShiftedLabels(labels, 0, 3), labels);
  EXPECT_EQ(*ShiftedLabels(labels, 1, 3), (std::vector<int64_t>{2, 3, -100, 5, 6, -100}));
  EXPECT_EQ(*ShiftedLabels(labels, 2, 6, -1), (std::vector<int64_t>{3, 4, 5, 6, -1, -1}));
  EXPECT_EQ(*ShiftedLabels(labels, 9, 3), (std::vector<int64_t>(6, -100)));
  EXPECT_EQ(ShiftedLabels(labels, -1, 3).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ShiftedLabels(labels, 1, 4).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ShiftedLabels(labels, 1, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(ShiftedLabels({}, 1, 5)->empty());
}

TEST(LossHelpersTest, ScalingRoundsOnceToTheType) {
  std::vector<float> wide(3000, 3);
  ScaleInPlace(DataType::kFloat32, wide.data(), 3000, 1.0 / 3);
  EXPECT_EQ(wide.front(), 1);
  EXPECT_EQ(wide.back(), 1);
  std::vector<uint16_t> narrow = {0x3f80, 0xc000, 0x3f80};  // bfloat16 1, -2, 1
  ScaleInPlace(DataType::kBFloat16, narrow.data(), 2, 0.5);
  EXPECT_EQ(narrow, (std::vector<uint16_t>{0x3f00, 0xbf80, 0x3f80}));
}

}  // namespace
}  // namespace lossd::loss_test
