// lossd::Session when others interfere.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "lossd/client.h"
#include "tests/integration/client/session_fixture.h"
#include "tests/unit/client/session_data.h"

namespace lossd::session_recovery_test {
namespace {

using testing::Data;
using ::testing::HasSubstr;
using testing::SessionTest;

TEST_F(SessionTest, ServerThatCannotBeReachedIsUnavailable) {
  const auto client = Client::Connect("127.0.0.1:1", {.reconnect_timeout = std::chrono::milliseconds(100)});
  EXPECT_EQ(client.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(client.status().message()), HasSubstr("127.0.0.1:1"));
}

TEST_F(SessionTest, ExpiredSessionWithWorkInTheWindowIsAnError) {
  server_.Before(3, [this] {
    server_.AwaitApplied(2);
    server_.Expire();
  });
  Session session = Open();
  Data data(10);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("has expired"));
  EXPECT_FALSE(IsWindowLost(result.status()));
}

TEST_F(SessionTest, TakenOverByAnotherStreamIsAnErrorAndNotRetried) {
  server_.Before(2, [this] { server_.TakeLane(0); });
  Session session = Open();
  Data data(10);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(result.status().message()),
              HasSubstr("taken over by another stream with client_key 'trainer'"));
  EXPECT_FALSE(IsWindowLost(result.status()));
  EXPECT_EQ(server_.observed().streams, 1);
}

}  // namespace
}  // namespace lossd::session_recovery_test
