// Sessions of several lanes against the real server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lossd/client.h"
#include "tests/integration/client_server/client_server_fixture.h"
#include "tests/support/test_server.h"

namespace lossd::client_lanes_test {
namespace {

using testing::ClientServerTest;
using testing::Data;
using ::testing::HasSubstr;
using testing::kHidden;
using testing::kVocab;
using testing::RandomFloats;
using testing::RandomLabels;
using testing::TestServerOptions;

class LanesServerTest : public ClientServerTest {
 protected:
  static constexpr int32_t kLanes = 4;
  Session OpenLanes(int32_t lanes = kLanes) {
    auto session = head_->OpenSession(
        {.chunk_bytes = 4 * kHidden * static_cast<int64_t>(sizeof(float)), .lanes = lanes});
    EXPECT_TRUE(session.ok()) << session.status();
    return *std::move(session);
  }
};

TEST_F(LanesServerTest, SeveralLanesGiveTheBitsOfOne) {
  StartWithWeights();
  Session one = OpenLanes(1);
  Session four = OpenLanes();
  Data alone(203);
  Data spread(203);
  ASSERT_TRUE(one.Compute(alone.batch(), alone.outputs()).ok());
  for (int round = 0; round < 3; ++round) {
    const auto result = four.Compute(spread.batch(), spread.outputs());
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->chunks, 51);
    EXPECT_EQ(result->valid_tokens, 203);
    EXPECT_TRUE(alone.losses == spread.losses);
    EXPECT_TRUE(alone.dx == spread.dx);
  }
  EXPECT_EQ(server_->engine().counters().live_streams, 1 + kLanes);
  EXPECT_EQ(four.reconnects(), 0);
}

TEST_F(LanesServerTest, MarksOfAllLanesAreWhatAFlushHasToName) {
  StartWithWeights();
  Session session = OpenLanes();
  Data data(30);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  SessionMarks marks = session.marks();
  ASSERT_EQ(marks.lanes.size(), static_cast<size_t>(kLanes));
  std::vector<float> gradient(kVocab * kHidden);
  SessionMarks first_only = marks;
  first_only.lanes.resize(1);
  const absl::Status status = head_->Flush({}, {&first_only, 1}, gradient.data()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("lane 1"));
  const auto flushed = head_->Flush({}, {&marks, 1}, gradient.data());
  ASSERT_TRUE(flushed.ok()) << flushed.status();
  EXPECT_EQ(flushed->window_tokens, 30U);
}

// By the bytes of a row, and only where there is room.
TEST_F(LanesServerTest, LanesNobodyChoseAreAsManyAsTheHeadsRowsAskForAndTheServerHas) {
  TestServerOptions options;
  options.engine.lane_credit_bytes = 1 << 20;
  options.engine.staging_bytes = 10 << 20;  // ten lanes; a session takes that of four at most
  Start(options);
  const auto lanes_of = [this](const std::string& name, int64_t hidden_size) {
    const auto head = client_->CreateHead(
        {.name = name, .vocab_size = 8, .hidden_size = hidden_size, .weight_type = DataType::kBFloat16});
    EXPECT_TRUE(head.ok()) << head.status();
    auto session = head->OpenSession({});
    EXPECT_TRUE(session.ok()) << session.status();
    return session->marks().lanes.size();
  };
  EXPECT_EQ(lanes_of("narrow", 512), 1U);
  EXPECT_EQ(lanes_of("middle", 2048), 4U);
  EXPECT_EQ(lanes_of("wide", 8192), 8U);
  EXPECT_EQ(lanes_of("wide", 8192), 1U) << "the credit of one was left";
}

TEST_F(LanesServerTest, ServerThatAllowsFewerLanesGetsASessionOfOne) {
  TestServerOptions options;
  options.engine.max_lanes = 2;
  Start(options);
  const auto head = client_->CreateHead({.name = "wide", .vocab_size = 8, .hidden_size = 4096});
  ASSERT_TRUE(head.ok()) << head.status();
  const auto session = head->OpenSession({});
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_EQ(session->marks().lanes.size(), 1U);
  const absl::Status asked = head->OpenSession({.lanes = 3}).status();
  EXPECT_EQ(asked.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(asked.message()), HasSubstr("lanes is 3; it must be in [1, 2]"));
}

// Chunks of a batch of the usual sizes, over every lane.
TEST_F(LanesServerTest, LargeBatchIsCutSmallAtBothEndsAndAnsweredWhole) {
  Start();
  constexpr int64_t kWide = 512;
  constexpr int64_t kMany = 20000;  // 39 MiB
  const auto head = client_->CreateHead(
      {.name = "wide", .vocab_size = 16, .hidden_size = kWide, .weight_type = DataType::kFloat32});
  ASSERT_TRUE(head.ok()) << head.status();
  ASSERT_TRUE(head->WriteWeights(DataType::kFloat32, RandomFloats(16 * kWide, 1).data()).ok());
  const std::vector<int64_t> labels = RandomLabels(kMany, 16, 2);
  const std::vector<float> hidden = RandomFloats(kMany * kWide, 3);
  std::vector<std::vector<float>> losses(2, std::vector<float>(kMany));
  std::vector<std::vector<float>> dx(2, std::vector<float>(kMany * kWide));
  for (const int32_t lanes : {1, 4}) {
    const size_t i = lanes == 1 ? 0 : 1;
    auto session = head->OpenSession({.lanes = lanes});
    ASSERT_TRUE(session.ok()) << session.status();
    const auto result = session->Compute({.labels = labels, .hidden_states = hidden.data()},
                                         {.losses = losses[i], .dx = dx[i].data()});
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->chunks, 13);  // 1, 2, nine of up to 4, 2, 1 MiB
    EXPECT_EQ(result->valid_tokens, kMany);
  }
  EXPECT_TRUE(losses[0] == losses[1]);
  EXPECT_TRUE(dx[0] == dx[1]);
}

}  // namespace
}  // namespace lossd::client_lanes_test
