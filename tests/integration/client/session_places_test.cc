// lossd::Session where the server names several places for its lanes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "lossd/client.h"
#include "tests/support/call_recorder.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/session_data.h"
#include "tests/support/session_fixture.h"
#include "tests/support/test_server.h"

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
  SessionPlacesTest() : other_("localhost" + server_.target().substr(server_.target().rfind(':'))) {}

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

  // Sessions are told so.
  void NamePlaces(const std::vector<std::string>& addresses) {
    server_.recorder().Edit<v1::OpenSessionResponse>("OpenSession", [addresses](auto* response) {
      response->mutable_lane_addresses()->Assign(addresses.begin(), addresses.end());
    });
  }

  const std::string other_;
  const lossd::testing::ScratchFolder folder_;
  const std::string token_file_ = folder_.File("token");
};

TEST_F(SessionPlacesTest, LanesAreSpreadOverThem) {
  NamePlaces({"", other_});
  Session session = Open("trainer", kLanes);
  Compute(session);
  EXPECT_THAT(TargetsOf(session), ElementsAre(server_.target(), other_, server_.target()));
  for (const LanePlace& place : session.lane_places()) EXPECT_TRUE(place.why_not_elsewhere.ok());
  const auto observed = server_.observed();
  EXPECT_EQ(observed.streams, kLanes) << ::testing::PrintToString(observed.stream_ends);
  EXPECT_EQ(session.reconnects(), 0);
}

TEST_F(SessionPlacesTest, LanesStayAtTheTargetIfThatIsAskedFor) {
  NamePlaces({"", other_});
  Connect();
  auto session = head_->OpenSession({.client_key = "trainer", .lanes = kLanes, .spread_lanes = false});
  ASSERT_TRUE(session.ok()) << session.status();
  Compute(*session);
  EXPECT_THAT(TargetsOf(*session), ElementsAre(server_.target(), server_.target(), server_.target()));
}

TEST_F(SessionPlacesTest, AServerThatNamesNoneHasThemAll) {
  Session session = Open("trainer", kLanes);
  Compute(session);
  EXPECT_THAT(TargetsOf(session), ElementsAre(server_.target(), server_.target(), server_.target()));
}

TEST_F(SessionPlacesTest, APlaceThatCannotBeReachedCostsNothingButItself) {
  NamePlaces({"", ":1", other_});
  Session session = Open("trainer", kLanes);
  Compute(session);
  EXPECT_THAT(TargetsOf(session), ElementsAre(server_.target(), server_.target(), other_));
  const LanePlace displaced = session.lane_places()[1];
  EXPECT_EQ(displaced.why_not_elsewhere.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(displaced.why_not_elsewhere.message()), HasSubstr("127.0.0.1:1"));
}

TEST_F(SessionPlacesTest, APlaceThatIsNoLossdOfThisSessionCostsNothingButItself) {
  const testing::TestServer stranger;
  NamePlaces({"", stranger.target()});
  Session session = Open("trainer", kLanes);
  Compute(session);
  EXPECT_THAT(TargetsOf(session), ElementsAre(server_.target(), server_.target(), server_.target()));
}

TEST_F(SessionPlacesTest, AStreamThatBreaksIsAttachedWhereItWas) {
  NamePlaces({"", other_});
  Session session = Open("trainer", kLanes);
  Script(2, Fate::kCutBeforeAnswer, 1);
  Compute(session);
  EXPECT_EQ(session.reconnects(), 1);
  EXPECT_THAT(TargetsOf(session), ElementsAre(server_.target(), other_, server_.target()));
}

TEST_F(SessionPlacesTest, AServerThatWasStartedAnewNamesItsPlacesAnew) {
  NamePlaces({"", other_});
  Session session = Open("trainer", kLanes);
  Compute(session);
  server_.recorder().on_chunk = [this](int lane, uint64_t sequence, int attempt) {
    if (lane != 1 || sequence != 6 || attempt != 0) return Fate::kTake;
    NamePlaces({"", server_.target()});
    return Fate::kCutBeforeAnswer;
  };
  Compute(session);
  EXPECT_THAT(TargetsOf(session), ElementsAre(server_.target(), server_.target(), server_.target()));
}

// At the near end of a tunnel others listen at the ports that it does not forward.
TEST_F(SessionPlacesTest, WithoutTlsATokenGoesToTheTargetAlone) {
  const testing::TestServer stranger;
  NamePlaces({"", stranger.target(), other_});
  std::ofstream(token_file_) << "0123456789abcdef";
  Connect({.token_file = token_file_});
  Session session = Open("trainer", kLanes);
  Compute(session);
  EXPECT_THAT(TargetsOf(session), ElementsAre(server_.target(), server_.target(), server_.target()));
  EXPECT_EQ(server_.observed().streams, kLanes);
  const LanePlace displaced = session.lane_places()[1];
  EXPECT_EQ(displaced.why_not_elsewhere.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(displaced.why_not_elsewhere.message()), HasSubstr("without TLS the token"));
}

}  // namespace
}  // namespace lossd::session_places_test
