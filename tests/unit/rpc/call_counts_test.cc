#include "server/rpc/connections/call_counts.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>

namespace lossd::rpc {
namespace {

// gRPC lists a server whose constructor is under way: who read it then would call what is not there yet.
TEST(CallCounts, CanBeReadWhileServersStartAndEnd) {
  constexpr int kServers = 4000;
  std::atomic<bool> over = false;
  std::thread looks([&over] {
    ChannelzCounts counts;
    while (!over) (void)counts.Begun();
  });
  for (int made = 0; made < kServers; ++made) {
    grpc::ServerBuilder builder;
    const std::unique_ptr<grpc::ServerCompletionQueue> queue = builder.AddCompletionQueue();
    const std::unique_ptr<grpc::Server> server = BuildAndStart(builder);
    EXPECT_NE(server, nullptr);
    if (server != nullptr) server->Shutdown();
    queue->Shutdown();
  }
  over = true;
  looks.join();
}

}  // namespace
}  // namespace lossd::rpc
