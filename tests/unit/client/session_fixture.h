// A head at a fake server, and sessions of it.
#ifndef LOSSD_TESTS_UNIT_CLIENT_SESSION_FIXTURE_H_
#define LOSSD_TESTS_UNIT_CLIENT_SESSION_FIXTURE_H_

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "lossd/client.h"
#include "tests/support/session_data.h"
#include "tests/unit/client/fake_server.h"

namespace lossd::testing {

class SessionTest : public ::testing::Test {
 protected:
  void Connect(std::chrono::milliseconds reconnect_timeout = std::chrono::seconds(20)) {
    auto client = Client::Connect(fake_.target(), {.reconnect_timeout = reconnect_timeout});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    auto head = client_->GetHead(FakeServer::kName);
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

  // Chunk `sequence` meets `fate` the first time it arrives.
  void Script(uint64_t sequence, Fate fate) {
    fake_.on_chunk = [sequence, fate](uint64_t arrived, int attempt) {
      return arrived == sequence && attempt == 0 ? fate : Fate::kTake;
    };
  }

  FakeServer fake_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Head> head_;
};

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_UNIT_CLIENT_SESSION_FIXTURE_H_
