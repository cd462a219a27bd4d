// Flushes of replicas of which one is missing.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "tests/unit/engine/replicas/replica_servers.h"
#include "tests/unit/rpc/replicas/set_under_test.h"

namespace lossd::rpc::replica_set_test {
namespace {

using engine::FlushInfo;

TEST(FlushSet, AFlushIsNotBegunWithoutAllReplicas) {
  SetUnderTest set(2);
  set.Meet(0);
  set.servers().at(0).Compute(7, 3);
  EXPECT_EQ(set.servers().Flush(1).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(set.servers().Stats(1, {}).status().code(), absl::StatusCode::kUnavailable);
  set.servers().at(0).Compute(8, 2);
  set.Meet(1);
  set.AwaitWhole();
  const absl::StatusOr<FlushInfo> flush = set.servers().Flush(1);
  ASSERT_TRUE(flush.ok()) << flush.status();
  EXPECT_EQ(flush->window_tokens, 5U);
}

TEST(FlushSet, AFlushDoesNotEndWhileOneIsMissing) {
  SetUnderTest set(2);
  set.MeetAll();
  for (int32_t replica = 0; replica < 2; ++replica) set.servers().at(replica).Compute(7, 3);
  const std::string flush_id = set.servers().Flush(1)->flush_id;
  set.Leave(1);
  while (set.set(0).Whole().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(set.servers().Commit(flush_id).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(set.servers().Abort(flush_id).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(set.servers().Gradient(flush_id).status().code(), absl::StatusCode::kUnavailable)
      << "a slice of it is at the other one";
}

}  // namespace
}  // namespace lossd::rpc::replica_set_test
