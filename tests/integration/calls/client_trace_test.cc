// The trace that the client's calls belong to, as the server remembers it.
#include <gtest/gtest.h>

#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lossd/client.h"
#include "tests/support/test_server.h"
#include "tests/support/wait.h"

namespace lossd::client_trace_test {
namespace {

using testing::TestServer;

std::string TraceId(int number) { return "4bf92f3577b34da6a3ce929d0e0e473" + std::to_string(number); }

std::string Parent(int number) { return "00-" + TraceId(number) + "-00f067aa0ba902b7-01"; }

class ClientTraceTest : public ::testing::Test {
 protected:
  ClientTraceTest() {
    ClientOptions options;
    options.trace = [this] {
      const std::lock_guard lock(mutex_);
      return trace_;
    };
    auto client = Client::Connect(server_.target(), options);
    EXPECT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
  }

  void Set(std::string parent, std::string state = {}) {
    const std::lock_guard lock(mutex_);
    trace_ = {std::move(parent), std::move(state)};
  }

  // The last error, once there are so many.
  telemetry::RecentError AwaitError(size_t count) {
    testing::Await("errors", [&] { return server_.counters().errors.Read().size() >= count; });
    return server_.counters().errors.Read()[0];
  }

  TestServer server_;
  std::mutex mutex_;
  TraceContext trace_;
  std::unique_ptr<Client> client_;
};

TEST_F(ClientTraceTest, EachCallBelongsToTheTraceOfItsMoment) {
  for (int i = 0; i < 3; ++i) {
    Set(Parent(i), "vendor=value");
    EXPECT_FALSE(client_->GetHead("absent").ok());
    EXPECT_EQ(AwaitError(static_cast<size_t>(i + 1)).trace_id, TraceId(i));
  }
  Set("");
  EXPECT_FALSE(client_->GetHead("absent").ok());
  EXPECT_EQ(AwaitError(4).trace_id, "");
}

// gRPC would end the process over some of these.
TEST_F(ClientTraceTest, WhatMayNotBeSentIsNotSent) {
  size_t errors = 0;
  for (const std::string& wrong :
       {std::string("nonsense"), Parent(1) + "\n", std::string("\0", 1), Parent(1) + "\xff",
        "01" + Parent(1).substr(2) + "-\n", std::string(100'000, 'a')}) {
    Set(wrong);
    EXPECT_FALSE(client_->GetHead("absent").ok());
    EXPECT_EQ(AwaitError(++errors).trace_id, "");
    Set(Parent(2), wrong);
    EXPECT_FALSE(client_->GetHead("absent").ok());
    EXPECT_EQ(AwaitError(++errors).trace_id, TraceId(2));
  }
}

// A source may ask what belongs to the thread, as a language's current span does.
TEST_F(ClientTraceTest, ALoadOfWeightsBelongsToTheTraceOfTheThreadThatAsksForIt) {
  ClientOptions options;
  options.trace = [caller = std::this_thread::get_id()] {
    return std::this_thread::get_id() == caller ? TraceContext{Parent(7), {}} : TraceContext{};
  };
  const auto client = Client::Connect(server_.target(), options);
  ASSERT_TRUE(client.ok()) << client.status();
  const auto head = (*client)->CreateHead(
      {.name = "h", .vocab_size = 16, .hidden_size = 4, .weight_type = DataType::kFloat32});
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_FALSE(head->LoadWeights({.path = "absent.safetensors"}).ok());
  const telemetry::RecentError error = AwaitError(1);
  EXPECT_EQ(error.method, "HeadService/LoadWeights");
  EXPECT_EQ(error.trace_id, TraceId(7));
}

TEST_F(ClientTraceTest, StreamsBelongToTheTraceInWhichTheirSessionWasOpened) {
  auto head = client_->CreateHead(
      {.name = "h", .vocab_size = 16, .hidden_size = 4, .weight_type = DataType::kFloat32});
  ASSERT_TRUE(head.ok()) << head.status();
  const std::vector<float> weights(64, 0.1F);
  ASSERT_TRUE(head->WriteWeights(DataType::kFloat32, weights.data()).ok());
  Set(Parent(5));
  auto session = head->OpenSession({.lanes = 2});
  ASSERT_TRUE(session.ok()) << session.status();
  Set(Parent(6));
  const std::vector<int64_t> labels(8, 1);
  const std::vector<float> hidden(32, 0.5F);
  std::vector<float> losses(8);
  const auto computed =
      session->Compute({.labels = labels, .hidden_type = DataType::kFloat32, .hidden_states = hidden.data()},
                       {.losses = losses});
  ASSERT_TRUE(computed.ok()) << computed.status();
  server_.server().Drain(absl::Seconds(20));
  const telemetry::RecentError error = AwaitError(1);
  EXPECT_EQ(error.method, "LossService/Compute");
  EXPECT_EQ(error.trace_id, TraceId(5));
}

}  // namespace
}  // namespace lossd::client_trace_test
