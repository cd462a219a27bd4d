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
  void ExpectLacking(const absl::Status& status, const std::string& name, const std::string& place) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(status.message(), HasSubstr("does not have the feature '" + name + "'"));
    EXPECT_THAT(status.message(), HasSubstr("lossd 0.0.7 at " + fake_.target()));
    EXPECT_THAT(status.message(), HasSubstr(place));
  }
};

TEST_F(ServerFeaturesTest, AnOptionThatTheServerLacksIsNotSentAndTheSessionGoesOn) {
  fake_.features.erase("token_inputs");
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

TEST_F(ServerFeaturesTest, APartOfAConfigurationThatTheServerLacksIsNotSent) {
  fake_.features.erase("optimizer");
  Connect();
  const auto head = client_->CreateHead(
      {.name = "new", .vocab_size = 4, .hidden_size = 2, .optimizer = {.kind = OptimizerKind::kAdam}});
  ExpectLacking(head.status(), "optimizer", "config.optimizer of lossd.v1.CreateHeadRequest");
  EXPECT_THAT(fake_.observed().creations, IsEmpty());
}

TEST_F(ServerFeaturesTest, ACallThatTheServerLacksIsNotMade) {
  fake_.features.erase("gradient_stats");
  Connect();
  ExpectLacking(head_->GradientStats({}).status(), "gradient_stats", "lossd.v1.GradientStatsRequest needs");
  EXPECT_THAT(fake_.observed().stats, IsEmpty());
}

// The stream ends in the middle of a batch, and the server that answers then is another version.
TEST_F(ServerFeaturesTest, AServerThatWasSetBackIsAskedAgainWhenTheSessionIsOpenedAgain) {
  Session session = Open();
  Data data(6);
  const std::vector<float> weights(6, 1.0F);
  Batch weighted = data.batch();
  weighted.token_weights = weights;
  fake_.on_chunk = [this](uint64_t sequence, int attempt) {
    if (sequence != 2 || attempt != 0) return Fate::kTake;
    fake_.features.erase("token_inputs");
    return Fate::kCutBeforeTaking;
  };
  ExpectLacking(session.Compute(weighted, data.outputs()).status(), "token_inputs", "token_inputs");
  for (const v1::Chunk& chunk : fake_.observed().chunks) EXPECT_LE(chunk.sequence(), 3U);
  EXPECT_THAT(client_->Status()->features, SizeIs(wire::KnownFeatures().size() - 1));
}

}  // namespace
}  // namespace lossd::server_features_test
