// What replicas come to when they meet again, from what each has said.
#include "server/rpc/replicas/settling.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "tests/unit/engine/replicas/replica_servers.h"

namespace lossd::rpc {
namespace {

using engine::testing::ReplicaServers;

std::vector<group::v1::ReplicaHello> HellosOf(ReplicaServers& servers) {
  std::vector<group::v1::ReplicaHello> hellos;
  for (int32_t replica = 0; replica < 2; ++replica) {
    hellos.push_back(HelloOf(servers.at(replica).engine(), {}));
  }
  return hellos;
}

void Settle(ReplicaServers& servers, int32_t replica, const std::vector<group::v1::ReplicaHello>& hellos) {
  engine::Engine& engine = servers.at(replica).engine();
  auto settling = Settling::Decide(engine, {replica, 2}, hellos, {false, false});
  ASSERT_TRUE(settling.ok()) << settling.status();
  settling->Finish(engine);
}

// A chunk is answered a moment before its tokens count.
void AwaitTokens(ReplicaServers& servers, int32_t replica, uint64_t tokens) {
  while (servers.at(replica).head()->Info().window_tokens != tokens) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// The connection broke when replica 1, which had come back empty, had dropped the restored window, so that
// its clients began to send theirs again, and before the coordinator had.
TEST(SettlingTest, ARestoredWindowThatOneHasDroppedIsDroppedByAll) {
  ReplicaServers servers(2, ReplicaServers::AdamWHead());
  servers.at(0).Compute(1, 5);
  servers.at(1).Compute(2, 3);
  std::vector<group::v1::ReplicaHello> hellos = HellosOf(servers);
  hellos[0].mutable_heads(0)->set_leans(true);
  for (int32_t replica = 0; replica < 2; ++replica) Settle(servers, replica, hellos);
  AwaitTokens(servers, 0, 0);
  EXPECT_TRUE(servers.at(0).Marks().empty());
  servers.at(1).Compute(3, 2);
  AwaitTokens(servers, 1, 5);
}

// The flush had begun when a replica was lost, or was asked for again before all had met.
TEST(SettlingTest, WhoWaitsForTheEndOfAWindowThatIsDroppedIsTold) {
  ReplicaServers servers(2, ReplicaServers::FlushedHead(), [](const auto&, const auto&) {});
  servers.at(0).Compute(1, 5);
  std::vector<ReplicaServers::AskedToFlush> asked;
  for (int i = 0; i < 2; ++i) asked.push_back(servers.BeginFlush(1, servers.Marks()));
  std::vector<group::v1::ReplicaHello> hellos = HellosOf(servers);
  hellos[0].mutable_heads(0)->set_leans(true);
  Settle(servers, 0, hellos);
  for (ReplicaServers::AskedToFlush& flush : asked) {
    ASSERT_EQ(flush.wait_for(std::chrono::seconds(0)), std::future_status::ready);
    EXPECT_TRUE(absl::IsUnavailable(flush.get().status()));
  }
  AwaitTokens(servers, 0, 0);
}

TEST(SettlingTest, AWindowThatLeansOnAllWhoAreThereStays) {
  ReplicaServers servers(2, ReplicaServers::AdamWHead());
  servers.at(0).Compute(1, 5);
  std::vector<group::v1::ReplicaHello> hellos = HellosOf(servers);
  for (group::v1::ReplicaHello& hello : hellos) hello.mutable_heads(0)->set_leans(true);
  Settle(servers, 0, hellos);
  servers.at(0).Compute(2, 3);
  AwaitTokens(servers, 0, 8);
  EXPECT_FALSE(servers.at(0).Marks().empty());
}

}  // namespace
}  // namespace lossd::rpc
