// Calls that are made again, and what they say of work that may have been done before.
#include <gtest/gtest.h>

#include <chrono>

#include "lossd/client.h"
#include "lossd/v1/types.pb.h"
#include "tests/support/call_recorder.h"
#include "tests/support/session_data.h"
#include "tests/support/session_fixture.h"

namespace lossd::repeated_call_test {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

class RepeatedCallTest : public testing::SessionTest {
 protected:
  void SetUp() override { Connect(); }
  absl::Status Delete() { return client_->DeleteHead(testing::kHeadName); }
};

TEST_F(RepeatedCallTest, AHeadThatIsGoneAfterALostAnswerWasDeleted) {
  server_.recorder().LoseAnswers("DeleteHead", 1);
  EXPECT_TRUE(Delete().ok());
}

// A server that refuses has done nothing.
TEST_F(RepeatedCallTest, AHeadThatNeverWasIsNotFoundAfterARefusalToo) {
  ASSERT_TRUE(Delete().ok());
  v1::RetryInfo soon;
  soon.mutable_retry_delay()->set_nanos(1'000'000);
  server_.recorder().Refuse("DeleteHead", 2, testing::Refused(grpc::StatusCode::RESOURCE_EXHAUSTED, &soon));
  EXPECT_EQ(Delete().code(), absl::StatusCode::kNotFound);
}

class ReconnectTest : public testing::SessionTest {};

// gRPC's own pauses between attempts to connect grow up to two seconds. One that began while the server was
// gone must not outlast the patience of a call that is made when it is back.
TEST_F(ReconnectTest, AServerThatIsBackIsFoundHoweverLongItWasGone) {
  Connect({.reconnect_timeout = seconds(1)});
  server_.Stop();
  const auto enough = steady_clock::now() + seconds(5);
  while (steady_clock::now() < enough) {
    ASSERT_EQ(client_->Status().status().code(), absl::StatusCode::kUnavailable);
  }
  server_.Restart();
  const auto status = client_->Status();
  EXPECT_TRUE(status.ok()) << status.status();
}

}  // namespace
}  // namespace lossd::repeated_call_test
