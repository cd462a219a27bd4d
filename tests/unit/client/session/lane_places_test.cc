#include "client/src/session/lane_places.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>

namespace lossd::internal::lane_places_test {
namespace {

TEST(ResolveLaneAddressTest, APortIsOfTheHostThatWasCalled) {
  EXPECT_EQ(ResolveLaneAddress("host:50051", ":50052"), "host:50052");
  EXPECT_EQ(ResolveLaneAddress("[::1]:50051", ":7"), "[::1]:7");
  EXPECT_EQ(ResolveLaneAddress("dns:///host:50051", ":50052"), "dns:///host:50052");
  EXPECT_EQ(ResolveLaneAddress("ipv4:1.2.3.4:5", ":6"), "ipv4:1.2.3.4:6");
}

TEST(ResolveLaneAddressTest, ASuffixIsOfTheSocketFileThatWasCalled) {
  EXPECT_EQ(ResolveLaneAddress("unix:/run/lossd.sock", ".1"), "unix:/run/lossd.sock.1");
  EXPECT_EQ(ResolveLaneAddress("unix:///run/lossd.sock", ".12"), "unix:///run/lossd.sock.12");
}

TEST(ResolveLaneAddressTest, AnotherHostIsATargetOfItsOwn) {
  EXPECT_EQ(ResolveLaneAddress("host:50051", "other:9"), "other:9");
  EXPECT_EQ(ResolveLaneAddress("unix:/run/lossd.sock", "other:9"), "other:9");
}

TEST(ResolveLaneAddressTest, WhatDoesNotFitTheTargetStaysThere) {
  EXPECT_EQ(ResolveLaneAddress("host:50051", ""), "");
  EXPECT_EQ(ResolveLaneAddress("unix:/run/lossd.sock", ":50052"), "");
  EXPECT_EQ(ResolveLaneAddress("host:50051", ".1"), "");
  EXPECT_EQ(ResolveLaneAddress("ipv4:1.2.3.4:5,1.2.3.5:5", ":6"), "") << "two hosts";
  EXPECT_EQ(ResolveLaneAddress("host:http", ":6"), "");
  EXPECT_EQ(ResolveLaneAddress("host:50051", ":6x"), "");
  EXPECT_EQ(ResolveLaneAddress("host:50051", ":"), "");
}

class LanePlacesTest : public ::testing::Test {
 protected:
  static constexpr char kTarget[] = "host:1";
  LanePlaces places_;
  const LanePlaces::Clock::time_point now_ = LanePlaces::Clock::now();
};

TEST_F(LanePlacesTest, LanesGoRoundThePlaces) {
  EXPECT_EQ(places_.Of(3, now_), "");
  places_.Take(kTarget, {"", ":2", ":3"});
  EXPECT_EQ(places_.Of(0, now_), "");
  EXPECT_EQ(places_.Of(1, now_), "host:2");
  EXPECT_EQ(places_.Of(2, now_), "host:3");
  EXPECT_EQ(places_.Of(3, now_), "");
  EXPECT_EQ(places_.Of(4, now_), "host:2");
}

TEST_F(LanePlacesTest, OneThatIsAvoidedIsTriedAgainLater) {
  places_.Take(kTarget, {"", ":2", ":3"});
  places_.Avoid("host:2", now_);
  EXPECT_EQ(places_.Of(1, now_), "");
  EXPECT_EQ(places_.Of(2, now_), "host:3");
  EXPECT_EQ(places_.Of(1, now_ + LanePlaces::kAvoided), "host:2");
}

// Behind a proxy that takes connections and answers nothing each try costs the lane a call's whole patience.
TEST_F(LanePlacesTest, OneThatFailsAgainIsAvoidedTwiceAsLong) {
  places_.Take(kTarget, {"", ":2"});
  auto avoided = LanePlaces::kAvoided;
  auto now = now_;
  places_.Avoid("host:2", now);
  while (avoided < LanePlaces::kLongestAvoided) {
    now += avoided;
    places_.Avoid("host:2", now);
    avoided = std::min(2 * avoided, LanePlaces::kLongestAvoided);
    EXPECT_EQ(places_.Of(1, now + avoided - std::chrono::milliseconds(1)), "");
    EXPECT_EQ(places_.Of(1, now + avoided), "host:2");
  }
  now += avoided;
  places_.Avoid("host:2", now);
  EXPECT_EQ(places_.Of(1, now + LanePlaces::kLongestAvoided), "host:2") << "there is a bound";
}

TEST_F(LanePlacesTest, LanesThatFailTogetherCountOnce) {
  places_.Take(kTarget, {"", ":2"});
  places_.Avoid("host:2", now_);
  places_.Avoid("host:2", now_ + LanePlaces::kAvoided / 2);
  EXPECT_EQ(places_.Of(1, now_ + LanePlaces::kAvoided), "host:2");
}

TEST_F(LanePlacesTest, OneThatHasWorkedIsForgivenWhatWasBefore) {
  places_.Take(kTarget, {"", ":2"});
  places_.Avoid("host:2", now_);
  places_.Avoid("host:2", now_ + LanePlaces::kAvoided);
  places_.Reached("host:2");
  EXPECT_EQ(places_.Of(1, now_ + LanePlaces::kAvoided), "host:2");
  places_.Avoid("host:2", now_ + 3 * LanePlaces::kAvoided);
  EXPECT_EQ(places_.Of(1, now_ + 4 * LanePlaces::kAvoided), "host:2");
}

TEST_F(LanePlacesTest, OtherAddressesAreOfAServerThatWasStartedAnew) {
  places_.Take(kTarget, {"", ":2", ":3"});
  places_.Avoid("host:2", now_);
  places_.Take(kTarget, {"", ":2", ":3"});
  EXPECT_EQ(places_.Of(1, now_), "") << "the same";
  places_.Take(kTarget, {"", ":2", ":4"});
  EXPECT_EQ(places_.Of(1, now_), "host:2");
  places_.Take(kTarget, {});
  EXPECT_EQ(places_.Of(1, now_), "") << "it has one process by now";
}

TEST_F(LanePlacesTest, AllMayBeKeptAtTheTarget) {
  places_.Take(kTarget, {"", ":2"});
  places_.KeepHome();
  places_.Take(kTarget, {"", ":2"});
  EXPECT_EQ(places_.Of(1, now_), "");
}

TEST_F(LanePlacesTest, ASessionAtAnotherReplicaHasNoLaneAtTheTarget) {
  places_.Take(kTarget, {"other:5", "other:6"}, std::nullopt);
  EXPECT_EQ(places_.home(), "other:5");
  EXPECT_EQ(places_.Of(0, now_), "other:5");
  EXPECT_EQ(places_.Of(1, now_), "other:6");
  places_.Avoid("other:6", now_);
  EXPECT_EQ(places_.Of(1, now_), "other:5");
  places_.KeepHome();
  EXPECT_EQ(places_.Of(1, now_ + LanePlaces::kAvoided), "other:5");
}

TEST_F(LanePlacesTest, WhereTheServerIsItselfIsInPlaceOfItsTarget) {
  places_.Take("ipv4:10.0.0.7:1", {"", ":2"}, "ipv4:10.0.0.7:1");
  EXPECT_EQ(places_.home(), "ipv4:10.0.0.7:1");
  EXPECT_EQ(places_.Of(0, now_), "ipv4:10.0.0.7:1");
  EXPECT_EQ(places_.Of(1, now_), "ipv4:10.0.0.7:2");
  places_.Take("ipv4:10.0.0.7:1", {}, "ipv4:10.0.0.7:1");
  EXPECT_EQ(places_.Of(1, now_), "ipv4:10.0.0.7:1");
}

TEST_F(LanePlacesTest, AddressesAreThoseOfTheServerThatToldThem) {
  places_.Take("replica-b:1", {"", ":2"});
  EXPECT_EQ(places_.Of(1, now_), "replica-b:2");
  places_.Take("other:5", {"", ":2"});
  EXPECT_EQ(places_.Of(1, now_), "other:2");
}

}  // namespace
}  // namespace lossd::internal::lane_places_test
