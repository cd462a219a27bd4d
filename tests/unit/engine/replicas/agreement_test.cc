// What replicas agree on when they meet: a head goes on that all of them have alike, and every other goes
// back.
#include "server/engine/replicas/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

namespace lossd::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr uint64_t kHistory = 7;
constexpr uint64_t kNew = 8;

MetReplica::MetHead SomeHead() {
  return {.fingerprint = 5,
          .part = {.place = {.generation = 3, .weight_version = 4, .optimizer_steps = 2, .restores = 1}}};
}

std::vector<MetReplica> Three() {
  const MetReplica one{.history = kHistory, .heads = {{"h", SomeHead()}, {"other", SomeHead()}}};
  return {one, one, one};
}

TEST(AgreementTest, AllThatAreAlikeGoOn) {
  std::vector<MetReplica> replicas = Three();
  for (MetReplica& one : replicas) one.heads["h"].part.place.flush_id = "held";
  const Agreement agreement = Agree(replicas, kNew);
  EXPECT_EQ(agreement.history, kHistory);
  EXPECT_THAT(agreement.alike, ElementsAre("h", "other"));
  EXPECT_THAT(agreement.go_back, IsEmpty());
}

TEST(AgreementTest, AHeadIsEmptyIfItGoesBackAndNobodyHasWeightsOfIt) {
  std::vector<MetReplica> replicas = Three();
  replicas[0].heads.erase("h");
  EXPECT_THAT(Agree(replicas, kNew).empty, IsEmpty());
  replicas[1].heads.at("h").part.place.weight_version = 0;
  EXPECT_THAT(Agree(replicas, kNew).empty, IsEmpty());
  for (MetReplica& one : replicas) {
    one.heads["h"].part.place.weight_version = 0;
    one.heads["other"].part.place.weight_version = 0;
  }
  replicas[0].heads.at("h").part.broken = true;
  EXPECT_THAT(Agree(replicas, kNew).empty, ElementsAre("h")) << "the other one goes on";
}

TEST(AgreementTest, ThoseThatNeverMetBeginAHistory) {
  std::vector<MetReplica> replicas(3);
  EXPECT_EQ(Agree(replicas, kNew).history, kNew);
}

struct Unlike {
  const char* name;
  std::function<void(MetReplica& replica)> make;  // of one replica
};

class UnlikeTest : public ::testing::TestWithParam<Unlike> {};

TEST_P(UnlikeTest, ThatHeadGoesBackWhicheverReplicaItIs) {
  for (size_t replica = 0; replica < 3; ++replica) {
    std::vector<MetReplica> replicas = Three();
    GetParam().make(replicas[replica]);
    const Agreement agreement = Agree(replicas, kNew);
    EXPECT_EQ(agreement.history, kHistory);
    EXPECT_THAT(agreement.alike, ElementsAre("other")) << "at replica " << replica;
    EXPECT_THAT(agreement.go_back, ElementsAre("h")) << "at replica " << replica;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Replicas, UnlikeTest,
    ::testing::Values(Unlike{"Missing", [](MetReplica& one) { one.heads.erase("h"); }},
                      Unlike{"Configuration", [](MetReplica& one) { ++one.heads["h"].fingerprint; }},
                      Unlike{"Generation", [](MetReplica& one) { ++one.heads["h"].part.place.generation; }},
                      Unlike{"Version", [](MetReplica& one) { ++one.heads["h"].part.place.weight_version; }},
                      Unlike{"Steps", [](MetReplica& one) { ++one.heads["h"].part.place.optimizer_steps; }},
                      Unlike{"Restores", [](MetReplica& one) { ++one.heads["h"].part.place.restores; }},
                      Unlike{"Flush", [](MetReplica& one) { one.heads["h"].part.place.flush_id = "f"; }},
                      Unlike{"Broken", [](MetReplica& one) { one.heads["h"].part.broken = true; }}),
    [](const auto& test) { return test.param.name; });

TEST(AgreementTest, OneThatIsBrokenEverywhereGoesBack) {
  std::vector<MetReplica> replicas = Three();
  for (MetReplica& one : replicas) one.heads["h"].part.broken = true;
  EXPECT_THAT(Agree(replicas, kNew).go_back, ElementsAre("h"));
}

TEST(AgreementTest, AReplicaOfAnotherHistoryHasAllHeadsGoBack) {
  for (const uint64_t other : {uint64_t{0}, uint64_t{6}}) {
    for (size_t replica = 0; replica < 3; ++replica) {
      std::vector<MetReplica> replicas = Three();
      replicas[replica].history = other;
      const Agreement agreement = Agree(replicas, kNew);
      EXPECT_EQ(agreement.history, kNew);
      EXPECT_THAT(agreement.alike, IsEmpty());
      EXPECT_THAT(agreement.go_back, ElementsAre("h", "other"));
    }
  }
}

}  // namespace
}  // namespace lossd::engine
