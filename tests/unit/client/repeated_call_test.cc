// Calls that are made again, and what they say of work that may have been done before.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "lossd/client.h"
#include "tests/unit/client/fake_server.h"

namespace lossd::repeated_call_test {
namespace {

using testing::FakeServer;

class RepeatedCallTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto client = Client::Connect(fake_.target(), {.reconnect_timeout = std::chrono::seconds(20)});
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

}  // namespace
}  // namespace lossd::repeated_call_test
