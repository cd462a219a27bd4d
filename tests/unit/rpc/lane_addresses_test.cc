#include "server/rpc/convert/lane_addresses.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace lossd::rpc::lane_addresses_test {
namespace {

using Addresses = std::vector<std::string>;

const std::vector<RankLanes> kRanks = {
    {.port = 50052, .suffix = ".1"}, {}, {.host = "node1", .port = 50051, .suffix = ".3"}};

TEST(LaneAddressesTest, WhoCameByTcpIsToldPorts) {
  EXPECT_EQ(LaneAddresses(kRanks, "ipv4:10.0.0.1:4000"), (Addresses{"", ":50052", "", "node1:50051"}));
}

TEST(LaneAddressesTest, WhoCameByASocketFileIsToldFilesOfThisHost) {
  EXPECT_EQ(LaneAddresses(kRanks, "unix:"), (Addresses{"", ".1", "", "node1:50051"}));
}

TEST(LaneAddressesTest, WhereNoRankTakesLanesNothingIsTold) {
  EXPECT_EQ(LaneAddresses({}, "ipv4:10.0.0.1:4000"), Addresses{});
  EXPECT_EQ(LaneAddresses({{}, {}}, "ipv4:10.0.0.1:4000"), Addresses{});
  EXPECT_EQ(LaneAddresses({{.port = 50052}}, "unix:"), Addresses{});
}

}  // namespace
}  // namespace lossd::rpc::lane_addresses_test
