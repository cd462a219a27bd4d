#include "server/startup/replicas/replica_finder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>

namespace lossd {
namespace {

using ::testing::HasSubstr;

Environment Of(std::map<std::string, std::string> variables) {
  return [variables = std::move(variables)](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  };
}

TEST(ReplicaFinder, FlagsSayAll) {
  const auto found = FindReplica("1", "node-0.example", Of({}), "anything");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->replica, 1);
  EXPECT_EQ(found->leader, "node-0.example:50054");
  EXPECT_EQ(FindReplica("0", "[fd00::1]:7", Of({}), "")->leader, "[fd00::1]:7");
}

TEST(ReplicaFinder, AGroupOfALeaderWorkerSetKnowsItsNumberAndTheFirstGroupsLeader) {
  const auto found = FindReplica(
      "lws", "", Of({{"LWS_GROUP_INDEX", "2"}, {"LWS_LEADER_ADDRESS", "my-lossd-2.my-lossd.train"}}), "");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->replica, 2);
  EXPECT_EQ(found->leader, "my-lossd-0.my-lossd.train:50054");
}

TEST(ReplicaFinder, APodOfAStatefulSetKnowsItsNumberByItsName) {
  const auto found = FindReplica("stateful_set", "", Of({}), "lossd-11.lossd.train.svc.cluster.local");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->replica, 11);
  EXPECT_EQ(found->leader, "lossd-0.lossd.train.svc.cluster.local:50054");
}

TEST(ReplicaFinder, TheFlagWinsOverWhatLaunchersSay) {
  EXPECT_EQ(FindReplica("stateful_set", "elsewhere:9", Of({}), "lossd-1.lossd")->leader, "elsewhere:9");
}

struct Refused {
  std::string said;
  std::string leader;
  std::map<std::string, std::string> variables;
  std::string host;
  std::string why;
};

TEST(ReplicaFinder, WhatIsMissingOrMakesNoSenseIsNamed) {
  for (const Refused& refused :
       {Refused{"1", "", {}, "", "--replica_leader=HOST[:PORT]"},
        Refused{"-1", "a", {}, "", "--replica is '-1'"}, Refused{"one", "a", {}, "", "--replica is 'one'"},
        Refused{"1", "a b", {}, "", "--replica_leader is 'a b'"},
        Refused{"lws", "", {}, "", "LWS_GROUP_INDEX"},
        Refused{"lws", "", {{"LWS_GROUP_INDEX", "1"}, {"LWS_LEADER_ADDRESS", "x-2.x"}}, "", "x-2.x"},
        Refused{"lws", "", {{"LWS_GROUP_INDEX", "1"}, {"LWS_LEADER_ADDRESS", "nodash"}}, "", "nodash"},
        Refused{"stateful_set", "", {}, "lossd.example-1", "lossd.example-1"},
        Refused{"stateful_set", "", {}, "lossd-1x", "lossd-1x"},
        Refused{"stateful_set", "", {}, "lossd-99999999999", "lossd-99999999999"}}) {
    const auto found = FindReplica(refused.said, refused.leader, Of(refused.variables), refused.host);
    EXPECT_EQ(found.status().code(), absl::StatusCode::kInvalidArgument) << refused.said << refused.host;
    EXPECT_THAT(std::string(found.status().message()), HasSubstr(refused.why));
  }
}

}  // namespace
}  // namespace lossd
