#include "server/startup/group/rank_lanes.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace lossd::rank_lanes_test {
namespace {

// In a group with 8 ranks at each node, of which the one with `rank` is the first or the `of_host`th of its
// host.
LanePlace PlaceOf(const std::string& listen, int32_t rank, const std::set<int>& taken = {},
                  const std::string& host = "10.0.0.9", int32_t of_host = 0) {
  GroupOptions group;
  group.host_rank = of_host * 8;
  group.devices.assign(8, "cpu");
  group.nodes = 2;
  group.node = rank / 8;
  group.process = RankProcess{.rank = rank, .socket = {}};
  return FindLanePlace(group, listen, host, taken);
}

TEST(FindLanePlaceTest, RanksHaveThePortsBehindThatOfTheLeader) {
  EXPECT_EQ(PlaceOf("127.0.0.1:50051", 1), (LanePlace{.listen = "127.0.0.1:50052"}));
  EXPECT_EQ(PlaceOf("[::]:50051", 7), (LanePlace{.listen = "[::]:50058"}));
}

TEST(FindLanePlaceTest, PortsOfOthersAreLeftOut) {
  EXPECT_EQ(PlaceOf("h:50051", 1, {50052}).listen, "h:50053");
  EXPECT_EQ(PlaceOf("h:50051", 2, {50052, 50054}).listen, "h:50055");
  EXPECT_EQ(PlaceOf("h:50051", 2, {9464, 50051}).listen, "h:50053");
}

TEST(FindLanePlaceTest, AFreePortIsFreeForEachRankAndOfOneHost) {
  EXPECT_EQ(PlaceOf("h:0", 1).listen, "h:0");
  EXPECT_EQ(PlaceOf("h:0,i:0", 3, {0}).listen, "h:0");
}

TEST(FindLanePlaceTest, EveryAddressHasItsCounterpartAndAllTheSamePort) {
  EXPECT_EQ(PlaceOf("h:5,unix:/run/l.sock,i:5", 2),
            (LanePlace{.listen = "h:7,i:7,unix:/run/l.sock.2", .suffix = ".2"}));
  EXPECT_EQ(PlaceOf("h:5,i:9", 1).listen, "h:6,i:6");
  EXPECT_EQ(PlaceOf("unix:/run/l.sock", 2), (LanePlace{.listen = "unix:/run/l.sock.2", .suffix = ".2"}));
}

TEST(FindLanePlaceTest, ThereIsNoPortAboveTheLast) {
  EXPECT_EQ(PlaceOf("h:65534", 1).listen, "h:65535");
  EXPECT_EQ(PlaceOf("h:65534", 2).listen, "");
  EXPECT_EQ(PlaceOf("h:65535,unix:/run/l.sock", 1).listen, "unix:/run/l.sock.1");
}

TEST(FindLanePlaceTest, OnAnotherHostTheFirstRankHasThePortItselfAndClientsAreToldTheHost) {
  EXPECT_EQ(PlaceOf("0.0.0.0:50051,unix:/run/l.sock", 8),
            (LanePlace{.listen = "0.0.0.0:50051", .host = "10.0.0.9"}));
  EXPECT_EQ(PlaceOf("0.0.0.0:50051", 10, {50052}),
            (LanePlace{.listen = "0.0.0.0:50054", .host = "10.0.0.9"}));
}

TEST(FindLanePlaceTest, NodesOfOneHostShareThePortsFromOneOn) {
  EXPECT_EQ(PlaceOf("127.0.0.1:50051,unix:/run/l.sock", 8, {}, "", 1),
            (LanePlace{.listen = "127.0.0.1:50059,unix:/run/l.sock.8", .suffix = ".8"}));
  EXPECT_EQ(PlaceOf("127.0.0.1:50051", 9, {50053}, "", 1).listen, "127.0.0.1:50061");
  EXPECT_EQ(PlaceOf("0.0.0.0:50051", 24, {}, "10.0.0.9", 1),  // of the second host
            (LanePlace{.listen = "0.0.0.0:50059", .host = "10.0.0.9"}));
}

TEST(FindLanePlaceTest, WhatOnlyItsOwnHostReachesIsNoPlaceOfAnotherHost) {
  EXPECT_EQ(PlaceOf("127.0.0.1:50051", 8), LanePlace());
  EXPECT_EQ(PlaceOf("unix:/run/l.sock", 8), LanePlace());
  EXPECT_EQ(PlaceOf("127.0.0.1:50051", 8, {}, "127.0.0.1"),
            (LanePlace{.listen = "127.0.0.1:50051", .host = "127.0.0.1"}));
}

}  // namespace
}  // namespace lossd::rank_lanes_test
