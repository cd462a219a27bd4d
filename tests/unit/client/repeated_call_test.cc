// Calls that are made again, and what they say of work that may have been done before.
#include <gmock/gmock.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>

#include "lossd/client.h"
#include "lossd/v1/status.grpc.pb.h"
#include "tests/unit/client/fake_server.h"

namespace lossd::repeated_call_test {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;
using testing::FakeServer;

class RepeatedCallTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto client = Client::Connect(fake_.target(), {.reconnect_timeout = seconds(20)});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
  }
  absl::Status Delete() { return client_->DeleteHead(FakeServer::kName); }

  FakeServer fake_;
  std::unique_ptr<Client> client_;
};

TEST_F(RepeatedCallTest, AHeadThatIsGoneAfterALostAnswerWasDeleted) {
  fake_.lost_deletions = 1;
  EXPECT_TRUE(Delete().ok());
}

// A server that refuses has done nothing.
TEST_F(RepeatedCallTest, AHeadThatNeverWasIsNotFoundAfterARefusalToo) {
  ASSERT_TRUE(Delete().ok());
  fake_.busy_deletions = 2;
  EXPECT_EQ(Delete().code(), absl::StatusCode::kNotFound);
}

// gRPC's own pauses between attempts to connect grow up to two seconds. One that began while the server was
// gone must not outlast the patience of a call that is made when it is back.
TEST(ReconnectTest, AServerThatIsBackIsFoundHoweverLongItWasGone) {
  FakeServer server;
  auto client = Client::Connect(server.target(), {.reconnect_timeout = seconds(1)});
  ASSERT_TRUE(client.ok()) << client.status();
  server.Stop();
  const auto enough = steady_clock::now() + seconds(5);
  while (steady_clock::now() < enough) {
    ASSERT_EQ((*client)->Status().status().code(), absl::StatusCode::kUnavailable);
  }
  v1::StatusService::Service nothing;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(server.target(), grpc::InsecureServerCredentials()).RegisterService(&nothing);
  const std::unique_ptr<grpc::Server> back = builder.BuildAndStart();
  ASSERT_NE(back, nullptr);
  // It can do nothing: that it says so is an answer.
  EXPECT_EQ((*client)->Status().status().code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace lossd::repeated_call_test
