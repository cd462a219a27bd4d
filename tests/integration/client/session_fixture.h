// A head at a real server, and sessions of it.
#ifndef LOSSD_TESTS_INTEGRATION_CLIENT_SESSION_FIXTURE_H_
#define LOSSD_TESTS_INTEGRATION_CLIENT_SESSION_FIXTURE_H_

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "lossd/client.h"
#include "tests/integration/client/real_server.h"
#include "tests/unit/client/session_data.h"

namespace lossd::testing {

class SessionTest : public ::testing::Test {
 protected:
  void Connect(const ClientOptions& options = {.reconnect_timeout = std::chrono::seconds(20)}) {
    auto client = Client::Connect(server_.target(), options);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    auto head = client_->GetHead(kHeadName);
    ASSERT_TRUE(head.ok()) << head.status();
    head_ = std::make_unique<Head>(*std::move(head));
  }

  Session Open(const std::string& client_key = "trainer", int32_t lanes = 1) {
    if (!client_) Connect();
    auto session =
        head_->OpenSession({.client_key = client_key,
                            .chunk_bytes = kTokensPerChunk * kHidden * static_cast<int64_t>(sizeof(float)),
                            .lanes = lanes});
    EXPECT_TRUE(session.ok()) << session.status();
    return *std::move(session);
  }

  RealServer server_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Head> head_;
};

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_INTEGRATION_CLIENT_SESSION_FIXTURE_H_
