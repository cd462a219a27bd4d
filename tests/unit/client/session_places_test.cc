// lossd::Session where the server names several places for its lanes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "tests/unit/client/fake_server.h"
#include "tests/unit/client/session_fixture.h"

namespace lossd::session_places_test {
namespace {

using testing::Data;
using ::testing::ElementsAre;
using testing::Fate;
using ::testing::HasSubstr;
using testing::kTokensPerChunk;
using testing::SessionTest;

constexpr int32_t kLanes = 3;
constexpr int64_t kTokens = 12 * kTokensPerChunk;

// "localhost" is another place of the same server.
class SessionPlacesTest : public SessionTest {
 protected:
  SessionPlacesTest() : other_("localhost" + fake_.target().substr(fake_.target().rfind(':'))) {}

  static std::vector<std::string> TargetsOf(const Session& session) {
    std::vector<std::string> targets;
    for (const LanePlace& place : session.lane_places()) targets.push_back(place.target);
    return targets;
  }
  void Compute(Session& session) {
    Data data(kTokens);
    const auto result = session.Compute(data.batch(), data.outputs());
    ASSERT_TRUE(result.ok()) << result.status();
    data.ExpectOutputs();
  }

  void ConnectWithToken() {
    std::ofstream(token_file_) << "0123456789abcdef";
    auto client = Client::Connect(fake_.target(), {.token_file = token_file_});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    auto head = client_->GetHead(testing::FakeServer::kName);
    ASSERT_TRUE(head.ok()) << head.status();
    head_ = std::make_unique<Head>(*std::move(head));
  }

  const std::string other_;
  const std::string token_file_ = ::testing::TempDir() + "session_places_token";
};

TEST_F(SessionPlacesTest, LanesAreSpreadOverThem) {
  fake_.lane_addresses = {"", other_};
  Session session = Open("trainer", kLanes);
  Compute(session);
  EXPECT_THAT(TargetsOf(session), ElementsAre(fake_.target(), other_, fake_.target()));
  for (const LanePlace& place : session.lane_places()) EXPECT_TRUE(place.why_not_elsewhere.ok());
  EXPECT_EQ(fake_.observed().streams, kLanes);
  EXPECT_EQ(session.reconnects(), 0);
}

TEST_F(SessionPlacesTest, LanesStayAtTheTargetIfThatIsAskedFor) {
  fake_.lane_addresses = {"", other_};
  Connect();
  auto session = head_->OpenSession({.client_key = "trainer", .lanes = kLanes, .spread_lanes = false});
  ASSERT_TRUE(session.ok()) << session.status();
  Compute(*session);
  EXPECT_THAT(TargetsOf(*session), ElementsAre(fake_.target(), fake_.target(), fake_.target()));
}

TEST_F(SessionPlacesTest, AServerThatNamesNoneHasThemAll) {
  Session session = Open("trainer", kLanes);
  Compute(session);
  EXPECT_THAT(TargetsOf(session), ElementsAre(fake_.target(), fake_.target(), fake_.target()));
}

TEST_F(SessionPlacesTest, APlaceThatCannotBeReachedCostsNothingButItself) {
  fake_.lane_addresses = {"", ":1", other_};
  Session session = Open("trainer", kLanes);
  Compute(session);
  EXPECT_THAT(TargetsOf(session), ElementsAre(fake_.target(), fake_.target(), other_));
  const LanePlace displaced = session.lane_places()[1];
  EXPECT_EQ(displaced.why_not_elsewhere.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(displaced.why_not_elsewhere.message()), HasSubstr("127.0.0.1:1"));
}

TEST_F(SessionPlacesTest, APlaceThatIsNoLossdOfThisSessionCostsNothingButItself) {
  testing::FakeServer stranger;
  fake_.lane_addresses = {"", stranger.target()};
  Session session = Open("trainer", kLanes);
  Compute(session);
  EXPECT_THAT(TargetsOf(session), ElementsAre(fake_.target(), fake_.target(), fake_.target()));
}

TEST_F(SessionPlacesTest, AStreamThatBreaksIsAttachedWhereItWas) {
  fake_.lane_addresses = {"", other_};
  Session session = Open("trainer", kLanes);
  fake_.on_lane_chunk = [](int lane, uint64_t sequence, int attempt) {
    return lane == 1 && sequence == 2 && attempt == 0 ? Fate::kCutBeforeAnswer : Fate::kTake;
  };
  Compute(session);
  EXPECT_EQ(session.reconnects(), 1);
  EXPECT_THAT(TargetsOf(session), ElementsAre(fake_.target(), other_, fake_.target()));
}

TEST_F(SessionPlacesTest, AServerThatWasStartedAnewNamesItsPlacesAnew) {
  fake_.lane_addresses = {"", other_};
  Session session = Open("trainer", kLanes);
  Compute(session);
  fake_.on_lane_chunk = [this](int lane, uint64_t sequence, int attempt) {
    if (lane != 1 || sequence != 6 || attempt != 0) return Fate::kTake;
    fake_.lane_addresses = {"", fake_.target()};
    return Fate::kCutBeforeAnswer;
  };
  Compute(session);
  EXPECT_THAT(TargetsOf(session), ElementsAre(fake_.target(), fake_.target(), fake_.target()));
}

// At the near end of a tunnel others listen at the ports that it does not forward.
TEST_F(SessionPlacesTest, WithoutTlsATokenGoesToTheTargetAlone) {
  testing::FakeServer stranger;
  fake_.lane_addresses = {"", stranger.target(), other_};
  ConnectWithToken();
  Session session = Open("trainer", kLanes);
  Compute(session);
  EXPECT_THAT(TargetsOf(session), ElementsAre(fake_.target(), fake_.target(), fake_.target()));
  EXPECT_EQ(stranger.observed().streams, 0);
  const LanePlace displaced = session.lane_places()[1];
  EXPECT_EQ(displaced.why_not_elsewhere.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(displaced.why_not_elsewhere.message()), HasSubstr("without TLS the token"));
}

}  // namespace
}  // namespace lossd::session_places_test
