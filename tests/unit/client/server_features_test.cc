// What a server lacks is not sent to it, and whoever asked for it can go on without.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "lossd/client.h"
#include "proto/wire/features.h"
#include "tests/unit/client/fake_server.h"
#include "tests/unit/client/session_fixture.h"

namespace lossd::server_features_test {
namespace {

using testing::Data;
using testing::Fate;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class ServerFeaturesTest : public testing::SessionTest {
 protected:
  static std::vector<std::string> AllBut(const std::string& name) {
    wire::Features features = wire::KnownFeatures();
    features.erase(name);
    return {features.begin(), features.end()};
  }

  void ExpectLacking(const absl::Status& status, const std::string& name, const std::string& place) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(status.message(), HasSubstr("does not have the feature '" + name + "'"));
    EXPECT_THAT(status.message(), HasSubstr("lossd 0.0.7 at " + fake_.target()));
    EXPECT_THAT(status.message(), HasSubstr(place));
  }
};

TEST_F(ServerFeaturesTest, AnOptionThatTheServerLacksIsNotSentAndTheSessionGoesOn) {
  fake_.features = AllBut("token_inputs");
  Session session = Open();
  Data data(6);
  const std::vector<float> weights(6, 2.0F);
  Batch weighted = data.batch();
  weighted.token_weights = weights;
  ExpectLacking(session.Compute(weighted, data.outputs()).status(), "token_inputs",
                "token_inputs of lossd.v1.Chunk");
  EXPECT_THAT(fake_.observed().chunks, IsEmpty());
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  EXPECT_EQ(fake_.window(), data.Window());
}

// Without a place for dX none is asked for; a server that cannot do without sends it, and it is dropped.
TEST_F(ServerFeaturesTest, DxThatNobodyWantsIsLeftOutWhereTheServerCan) {
  for (const char* lacking : {"", "weight_gradient_alone"}) {
    fake_.features = AllBut(lacking);
    Connect();
    Session session = Open();
    Data data(6);
    BatchOutputs outputs = data.outputs();
    outputs.dx = nullptr;
    ASSERT_TRUE(session.Compute(data.batch(), outputs).ok()) << lacking;
    const v1::ComputeMode without =
        *lacking == '\0' ? v1::COMPUTE_MODE_LOSS_AND_WEIGHT_GRADIENT : v1::COMPUTE_MODE_LOSS_AND_GRADIENTS;
    EXPECT_EQ(fake_.observed().chunks.back().mode(), without);
    ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok()) << lacking;
    EXPECT_EQ(fake_.observed().chunks.back().mode(), v1::COMPUTE_MODE_LOSS_AND_GRADIENTS);
  }
}

TEST_F(ServerFeaturesTest, APartOfAConfigurationThatTheServerLacksIsNotSent) {
  fake_.features = AllBut("optimizer");
  Connect();
  const auto head = client_->CreateHead(
      {.name = "new", .vocab_size = 4, .hidden_size = 2, .optimizer = {.kind = OptimizerKind::kAdam}});
  ExpectLacking(head.status(), "optimizer", "config.optimizer of lossd.v1.CreateHeadRequest");
  EXPECT_THAT(fake_.observed().creations, IsEmpty());
}

TEST_F(ServerFeaturesTest, FixedSegmentsAreAskedForWhereTheServerHasThem) {
  for (const bool has : {false, true}) {
    fake_.features = AllBut(has ? "" : "fixed_segments");
    Connect();
    const auto head =
        client_->CreateHead({.name = "new", .vocab_size = 4, .hidden_size = 2, .fixed_segments = true});
    if (has) {
      ASSERT_TRUE(head.ok()) << head.status();
      ASSERT_THAT(fake_.observed().creations, SizeIs(1));
      EXPECT_TRUE(fake_.observed().creations[0].config().fixed_segments());
    } else {
      ExpectLacking(head.status(), "fixed_segments", "config.fixed_segments of lossd.v1.CreateHeadRequest");
    }
  }
}

TEST_F(ServerFeaturesTest, ACallThatTheServerLacksIsNotMade) {
  fake_.features = AllBut("gradient_stats");
  Connect();
  ExpectLacking(head_->GradientStats({}).status(), "gradient_stats", "lossd.v1.GradientStatsRequest needs");
  EXPECT_THAT(fake_.observed().stats, IsEmpty());
}

TEST_F(ServerFeaturesTest, AServerThatListsNothingHasWhatSuchServersHad) {
  fake_.features = {};
  Session session = Open();
  Data data(6);
  const std::vector<float> weights(6, 1.0F);
  Batch weighted = data.batch();
  weighted.token_weights = weights;
  ASSERT_TRUE(session.Compute(weighted, data.outputs()).ok());
  EXPECT_THAT(client_->Status()->features, IsEmpty());
}

// The stream ends in the middle of a batch, and the server that answers then is another version.
TEST_F(ServerFeaturesTest, AServerThatWasSetBackIsAskedAgainWhenTheSessionIsOpenedAgain) {
  fake_.features = AllBut("");
  Session session = Open();
  Data data(6);
  const std::vector<float> weights(6, 1.0F);
  Batch weighted = data.batch();
  weighted.token_weights = weights;
  fake_.on_chunk = [this](uint64_t sequence, int attempt) {
    if (sequence != 2 || attempt != 0) return Fate::kTake;
    fake_.features = AllBut("token_inputs");
    return Fate::kCutBeforeTaking;
  };
  ExpectLacking(session.Compute(weighted, data.outputs()).status(), "token_inputs", "token_inputs");
  for (const v1::Chunk& chunk : fake_.observed().chunks) EXPECT_LE(chunk.sequence(), 3U);
  EXPECT_THAT(client_->Status()->features, SizeIs(wire::KnownFeatures().size() - 1));
}

}  // namespace
}  // namespace lossd::server_features_test
