#include "server/rpc/calls/call_reports.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "server/rpc/calls/call_record.h"
#include "server/rpc/calls/methods.h"
#include "tests/support/wait.h"

namespace lossd::rpc::call_reports_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr char kPath[] = "/lossd.v1.LossService/OpenSession";
constexpr int kNotFound = 5;
constexpr int kUnauthenticated = 16;

TEST(RateLimitTest, ABurstAndThenARate) {
  RateLimit limit(3, 10);
  const RateLimit::Time begin = RateLimit::Time() + seconds(1000);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(limit.Take(begin), 0);
  EXPECT_EQ(limit.Take(begin), std::nullopt);
  EXPECT_EQ(limit.Take(begin + milliseconds(50)), std::nullopt);
  EXPECT_EQ(limit.Take(begin + milliseconds(150)), 2);
  EXPECT_EQ(limit.Take(begin + milliseconds(150)), std::nullopt);
  // A long quiet time gives no more than a burst.
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(limit.Take(begin + seconds(100)).has_value()) << i;
  EXPECT_EQ(limit.Take(begin + seconds(100)), std::nullopt);
}

class CallReportsTest : public ::testing::Test {
 protected:
  telemetry::ServiceCounters counters_{MethodNames()};
  CallReports reports_{&counters_};
};

TEST_F(CallReportsTest, ACallIsUnderWayUntilItEnds) {
  telemetry::RpcMethod* const method = reports_.Find(kPath);
  ASSERT_NE(method, nullptr);
  EXPECT_EQ(method->name, "LossService/OpenSession");
  reports_.Begin(method);
  EXPECT_EQ(method->in_flight, 1);
  reports_.End(method,
               {.code = kNotFound, .message = "head 'h' is not there", .time = seconds(2), .trace_id = "4b"});
  EXPECT_EQ(method->in_flight, 0);
  EXPECT_EQ(method->ended[kNotFound], 1u);
  EXPECT_EQ(method->seconds.sum(), 2.0);
  const std::vector<telemetry::RecentError> errors = counters_.errors.Read();
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_EQ(errors[0].method, "LossService/OpenSession");
  EXPECT_EQ(errors[0].code, kNotFound);
  EXPECT_EQ(errors[0].message, "head 'h' is not there");
  EXPECT_EQ(errors[0].trace_id, "4b");
}

TEST_F(CallReportsTest, WhoSeesThatNothingIsUnderWaySeesTheErrorsToo) {
  telemetry::RpcMethod* const method = reports_.Find(kPath);
  constexpr int kCalls = 2000;
  const auto spin_until = [](std::string_view what, auto ready) {
    lossd::testing::Await(what, ready, std::chrono::microseconds(0));
  };
  std::atomic<int> begun = 0;
  std::thread service([&] {
    for (int call = 1; call <= kCalls; ++call) {
      spin_until("a call", [&] { return begun >= call; });
      reports_.End(method, {.code = kNotFound, .message = std::to_string(call)});
    }
  });
  int missed = 0;
  for (int call = 1; call <= kCalls; ++call) {
    reports_.Begin(method);
    begun = call;
    spin_until("its end", [&] { return method->in_flight == 0; });
    const std::vector<telemetry::RecentError> errors = counters_.errors.Read();
    if (errors.empty() || errors[0].message != std::to_string(call)) ++missed;
  }
  service.join();
  EXPECT_EQ(missed, 0);
}

TEST_F(CallReportsTest, WhatAClientCancelsIsNoError) {
  telemetry::RpcMethod* const method = reports_.Find(kPath);
  reports_.Begin(method);
  reports_.End(method, {.code = 1, .by = EndedCall::By::kClient});
  EXPECT_EQ(method->ended[1], 1u);
  EXPECT_TRUE(counters_.errors.Read().empty());
}

TEST_F(CallReportsTest, ARefusedCallIsCountedAndNothingIsUnderWay) {
  reports_.Refuse(kPath, {.code = kUnauthenticated, .message = "no token", .time = seconds(1)});
  const telemetry::RpcMethod* const method = reports_.Find(kPath);
  EXPECT_EQ(method->ended[kUnauthenticated], 1u);
  EXPECT_EQ(method->in_flight, 0);
  EXPECT_EQ(method->seconds.sum(), 0.0);
  EXPECT_TRUE(counters_.errors.Read().empty()) << "strangers would push out the others";
}

TEST_F(CallReportsTest, ACallThatTheServerCancelledTwiceIsStillTheServers) {
  {
    const grpc::ServerContext context;
    CallRecord record(&reports_, reports_.Find(kPath), context);
    record.NoteCancelledHere();
    record.NoteCancelled();
    record.NoteCancelledHere();
  }
  const std::vector<telemetry::RecentError> errors = counters_.errors.Read();
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_EQ(errors[0].message, "cancelled by the server");
}

TEST_F(CallReportsTest, MethodsThatClientsMakeUpLeaveNoTrace) {
  for (const char* path :
       {"", "/", "/lossd.v1.LossService/", "/lossd.v1.LossService/Nothing", "Compute", "/LossService/Compute",
        "LossService/Compute", "/lossd.v1.LossService/Compute/", "//lossd.v1.LossService/Compute"}) {
    EXPECT_EQ(reports_.Find(path), nullptr) << path;
    reports_.Refuse(path, {.code = kUnauthenticated});
  }
  EXPECT_TRUE(counters_.errors.Read().empty());
}

TEST_F(CallReportsTest, ACodeThatIsNoneCountsAsUnknown) {
  telemetry::RpcMethod* const method = reports_.Find(kPath);
  for (const int code : {-1, 17, 1 << 30}) {
    reports_.Begin(method);
    reports_.End(method, {.code = code});
  }
  EXPECT_EQ(method->ended[2], 3u);
}

TEST_F(CallReportsTest, ManyThreadsAtOnceLoseNothing) {
  constexpr int kThreads = 8;
  constexpr int kCalls = 500;
  std::vector<std::thread> threads;
  std::atomic<int> running = kThreads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      telemetry::RpcMethod* const method = reports_.Find(kPath);
      for (int call = 0; call < kCalls; ++call) {
        reports_.Begin(method);
        reports_.End(method, {.code = call % 2 == 0 ? 0 : kNotFound,
                              .message = std::to_string(i),
                              .time = milliseconds(1),
                              .peer = "ipv4:127.0.0.1:1"});
      }
      --running;
    });
  }
  while (running > 0) EXPECT_LE(counters_.errors.Read().size(), telemetry::RecentErrors::kMost);
  for (std::thread& thread : threads) thread.join();
  const telemetry::RpcMethod* const method = reports_.Find(kPath);
  EXPECT_EQ(method->in_flight, 0);
  EXPECT_EQ(method->ended[0] + method->ended[kNotFound], static_cast<uint64_t>(kThreads * kCalls));
  EXPECT_EQ(counters_.errors.Read().size(), telemetry::RecentErrors::kMost);
}

}  // namespace
}  // namespace lossd::rpc::call_reports_test
