// Which devices a case can be measured over, and what is made of what their ranks found.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "bench/kernels/ranks/devices_options.h"
#include "bench/kernels/ranks/rank_report.h"

namespace lossd::bench {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;
using Names = std::vector<std::string>;

TEST(DevicesOptionsTest, DevicesOfOneKindMakeRanks) {
  EXPECT_EQ(ProblemOf({"cpu", "cpu"}), "");
  EXPECT_EQ(ProblemOf({"cuda:1", "cuda:0", "cuda:7"}), "");
  EXPECT_EQ(ProblemOf(Names(8, "cpu")), "");
}

TEST(DevicesOptionsTest, WhatMakesNoRanksIsToldWhatToName) {
  EXPECT_THAT(ProblemOf({"cuda:1"}), HasSubstr("--device=cuda:1"));
  EXPECT_THAT(ProblemOf({"cpu", "gpu"}), HasSubstr("'gpu' is no device: name cpu, or cuda:0"));
  EXPECT_THAT(ProblemOf(Names(9, "cpu")), HasSubstr("at most 8"));
  EXPECT_THAT(ProblemOf({"cpu", "cuda:0"}), HasSubstr("different kinds"));
  EXPECT_THAT(ProblemOf({"cuda:0", "cuda:0"}), HasSubstr("cuda:0 is there twice"));
}

RankTimes TimesOf(double one, double over, double wait) {
  RankTimes times;
  times.all_one_device_milliseconds = {one, 100 * one, one};  // a round that was disturbed
  times.all_busy_milliseconds = {2 * one};
  times.all_milliseconds = {over};
  times.Add({{"logits", 1}, {"wait for parts", wait}, {"logits", 2}});
  times.uses_copy_engines = true;
  return times;
}

Json CollectedOf(const RankTimes& first, const RankTimes& second) {
  return Collect({}, {.devices = {"cuda:0", "cuda:1"}}, {ToJson(first).dump(), ToJson(second).dump()});
}

TEST(RankReportTest, TheSlowestDeviceCountsAloneAndAmongOthers) {
  const Json json = CollectedOf(TimesOf(10, 5, 0.1), TimesOf(12, 4, 0.3));
  EXPECT_EQ(json["one_device_milliseconds"], 12);
  EXPECT_EQ(json["milliseconds"], 5);
  EXPECT_DOUBLE_EQ(json["speedup"], 2.4);
  EXPECT_DOUBLE_EQ(json["speedup_over_busy_device"], 4.8);
  EXPECT_EQ(json["devices"], Json({"cuda:0", "cuda:1"}));
}

TEST(RankReportTest, StagesOfAllTilesAreAddedUpAndWaitsAreToldOfEveryRank) {
  const Json json = CollectedOf(TimesOf(10, 5, 0.1), TimesOf(12, 4, 0.3));
  EXPECT_EQ(json["waits"], Json({{"parts", {0.1, 0.3}}}));
  EXPECT_EQ(json["ranks"][1]["stages"][0], Json({{"name", "logits"}, {"milliseconds", 3.0}}));
}

TEST(RankReportTest, OneRankWithoutCopyEnginesIsEnoughForThereToBeNone) {
  RankTimes other = TimesOf(12, 4, 0.3);
  EXPECT_EQ(CollectedOf(TimesOf(10, 5, 0.1), other)["copy_engines"], true);
  other.uses_copy_engines = false;
  EXPECT_EQ(CollectedOf(TimesOf(10, 5, 0.1), other)["copy_engines"], false);
}

TEST(RankReportTest, TheLargestDifferenceOfAllRanksIsTold) {
  RankTimes other = TimesOf(12, 4, 0.3);
  other.difference = {.dw = 1e-3};
  RankTimes first = TimesOf(10, 5, 0.1);
  first.difference = {.loss = 1e-6, .dx = 2e-3, .dw = 1e-4};
  const Json difference = CollectedOf(first, other)["relative_difference"];
  EXPECT_EQ(difference["loss"], 1e-6);
  EXPECT_EQ(difference["dx"], 2e-3);
  EXPECT_EQ(difference["dw"], 1e-3);
}

}  // namespace
}  // namespace lossd::bench
