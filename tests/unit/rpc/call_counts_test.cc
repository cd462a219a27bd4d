#include "server/rpc/connections/call_counts.h"

#include <grpcpp/generic/async_generic_service.h>
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
    grpc::CallbackGenericService nothing;
    grpc::ServerBuilder builder;
    builder.RegisterCallbackGenericService(&nothing);
    const std::unique_ptr<grpc::Server> server = BuildAndStart(builder);
    EXPECT_NE(server, nullptr);
  }
  over = true;
  looks.join();
}

}  // namespace
}  // namespace lossd::rpc
