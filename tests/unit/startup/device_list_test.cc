#include "server/startup/group/device_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lossd::device_list_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> Parsed(const std::string& text) {
  const auto devices = ParseDevices(text);
  EXPECT_TRUE(devices.ok()) << devices.status();
  return devices.ok() ? *devices : std::vector<std::string>();
}

TEST(DeviceList, NamesTheDeviceOfEachRankInTheirOrder) {
  EXPECT_THAT(Parsed("cpu"), ElementsAre("cpu"));
  EXPECT_THAT(Parsed("cpu,cpu,cpu"), ElementsAre("cpu", "cpu", "cpu"));
  EXPECT_THAT(Parsed("cuda:3,cuda:0"), ElementsAre("cuda:3", "cuda:0"));
  EXPECT_EQ(Parsed("cpu,cpu,cpu,cpu,cpu,cpu,cpu,cpu").size(), 8);
}

TEST(DeviceList, SaysWhyNoGroupCanBeMadeOfIt) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"cpu,cuda:0", "one kind"},
      {"cuda:0,cuda:0", "cuda:0 is there twice"},
      {"cpu,cpu,cpu,cpu,cpu,cpu,cpu,cpu,cpu", "at most 8"},
      {"cpu,", "'' is none"},
      {"cpu,all", "'all' is none"},
      {"auto,auto", "'auto' is none"},
      {"cuda:x", "'cuda:x' is none"},
  };
  for (const auto& [text, words] : cases) {
    const absl::Status status = ParseDevices(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr("--devices is '" + text + "'"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  }
}

TEST(DeviceList, NodesHaveTogetherNoMoreThanAGroupMay) {
  EXPECT_TRUE(CheckRanks(2, 4).ok());
  EXPECT_TRUE(CheckRanks(8, 1).ok());
  for (const auto& [nodes, devices] :
       std::vector<std::pair<int32_t, size_t>>{{2, 5}, {9, 1}, {2147483647, 8}}) {
    const absl::Status status = CheckRanks(nodes, devices);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("at most 8"));
  }
}

}  // namespace
}  // namespace lossd::device_list_test
