// What is made of the rounds over devices and on one of them.
#include "client/tools/perf/comparison.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "client/tools/perf/report.h"
#include "client/tools/perf/settings.h"

namespace lossd::perf::comparison_test {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

Json ReportOf(double tokens_per_second, const std::string& device) {
  Findings findings{.target = "host:1", .server_version = "1.2.3", .device = device};
  findings.load = {
      .seconds = 1, .batches = 1, .tokens = static_cast<int64_t>(tokens_per_second), .latencies = {0.1}};
  return Report(Settings{}, findings);
}

TEST(ComparisonTest, SpeedUpIsTheRatioOfMedians) {
  const Json comparison =
      Compare({"cpu", {ReportOf(100, "a"), ReportOf(900, "a"), ReportOf(120, "a")}},
              {"cpu,cpu", {ReportOf(240, "b"), ReportOf(180, "b"), ReportOf(10, "b"), ReportOf(300, "b")}});
  EXPECT_TRUE(IsComparison(comparison));
  EXPECT_EQ(comparison["one_device"]["tokens_per_second"], 120);
  EXPECT_EQ(comparison["over_devices"]["tokens_per_second"], 210);
  EXPECT_DOUBLE_EQ(comparison["speedup"], 1.75);
  EXPECT_EQ(comparison["one_device"]["rounds"].size(), 3);
  EXPECT_FALSE(IsComparison(comparison["one_device"]["rounds"][0]));
}

TEST(ComparisonTest, TheTextHasTheMiddleRoundOfBothAndTheRatesSideBySide) {
  const std::string text =
      ComparisonText(Compare({"cpu", {ReportOf(100, "a"), ReportOf(900, "a"), ReportOf(120, "a")}},
                             {"cpu,cpu", {ReportOf(180, "two of them")}}));
  EXPECT_THAT(text, HasSubstr("throughput  120 tokens/s"));
  EXPECT_THAT(text, HasSubstr("two of them"));
  EXPECT_THAT(text, HasSubstr("120 tokens/s (100 to 900, rounds: 3)"));
  EXPECT_THAT(text, HasSubstr("speed-up      1.500"));
}

TEST(ComparisonTest, WhatNoRoundMeasuredIsNull) {
  Json failed = ReportOf(100, "a");
  failed["tokens_per_second"] = nullptr;
  const Json comparison = Compare({"cpu", {ReportOf(100, "a")}}, {"cpu,cpu", {failed}});
  EXPECT_TRUE(comparison["speedup"].is_null());
  EXPECT_TRUE(comparison["over_devices"]["tokens_per_second"].is_null());
  EXPECT_THAT(ComparisonText(comparison), HasSubstr("not measured"));
  EXPECT_TRUE(Compare({"cpu", {}}, {"cpu,cpu", {}})["speedup"].is_null());
}

}  // namespace
}  // namespace lossd::perf::comparison_test
