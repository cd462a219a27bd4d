// The connection that is broken is gRPC's, whose descriptor it may close at any time.
#include "client/src/connection/breaker.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "client/src/connection/waiting.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "tests/support/wait.h"

namespace lossd::breaker_test {
namespace {

class BreakerTest : public ::testing::Test {
 protected:
  BreakerTest() {
    grpc::ServerBuilder builder;
    builder.RegisterCallbackGenericService(&service_);
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    server_ = builder.BuildAndStart();
    channel_ = Connected();
  }

  std::shared_ptr<grpc::Channel> Connected() {
    grpc::ChannelArguments arguments;
    breaker_.AddTo(&arguments);
    auto channel = grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(port_),
                                             grpc::InsecureChannelCredentials(), arguments);
    const auto until = std::chrono::steady_clock::now() + testing::kPatience;
    EXPECT_TRUE(internal::AwaitConnected(*channel, until));
    return channel;
  }

  // The process's descriptors of connections to the server.
  std::set<int> Sockets() const {
    std::set<int> sockets;
    for (int descriptor = 0; descriptor < 1024; ++descriptor) {
      sockaddr_in6 peer{};  // the port is where sockaddr_in has it
      socklen_t size = sizeof(peer);
      if (getpeername(descriptor, reinterpret_cast<sockaddr*>(&peer), &size) != 0) continue;
      const bool is_ip = peer.sin6_family == AF_INET || peer.sin6_family == AF_INET6;
      if (is_ip && ntohs(peer.sin6_port) == port_) sockets.insert(descriptor);
    }
    return sockets;
  }

  void LeaveServer() {
    channel_ = nullptr;
    testing::Await("gRPC to close its connection", [this] { return Sockets().empty(); });
  }

  grpc::CallbackGenericService service_;  // a server without one does not answer
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
  internal::Breaker breaker_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(BreakerTest, BreaksTheConnection) {
  breaker_.Break();
  testing::Await("the channel to see it", [this] { return channel_->GetState(false) != GRPC_CHANNEL_READY; });
}

TEST_F(BreakerTest, NothingIsLeftOfAConnectionThatGrpcHasClosed) {
  EXPECT_EQ(Sockets().size(), 1);
  LeaveServer();
}

TEST_F(BreakerTest, LeavesOtherSocketsAloneThatHaveTheNumberNow) {
  const int number = *Sockets().begin();
  LeaveServer();
  std::vector<std::array<int, 2>> pairs;
  for (bool taken = false; !taken && pairs.size() < 64;) {
    std::array<int, 2>& pair = pairs.emplace_back();
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair.data()), 0);
    taken = pair[0] == number || pair[1] == number;
  }
  ASSERT_TRUE(pairs.back()[0] == number || pairs.back()[1] == number);
  breaker_.Break();
  for (const auto& [one, other] : pairs) {
    char byte = 'b';
    EXPECT_EQ(send(one, &byte, 1, MSG_NOSIGNAL), 1);
    EXPECT_EQ(recv(other, &byte, 1, 0), 1);
    close(one);
    close(other);
  }
}

}  // namespace
}  // namespace lossd::breaker_test
