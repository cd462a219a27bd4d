// A real server in the test's process with one small head, and the client library at its other end.
#ifndef LOSSD_TESTS_INTEGRATION_CLIENT_SERVER_CLIENT_SERVER_FIXTURE_H_
#define LOSSD_TESTS_INTEGRATION_CLIENT_SERVER_CLIENT_SERVER_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "tests/support/test_server.h"

namespace lossd::testing {

inline constexpr int64_t kVocab = 61;
inline constexpr int64_t kHidden = 20;

class ClientServerTest : public ::testing::Test {
 protected:
  void Start(const TestServerOptions& options = {}, DataType weight_type = DataType::kFloat32) {
    server_ = std::make_unique<TestServer>(options);
    auto client = Client::Connect(server_->target(), {});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    auto head = client_->CreateHead(
        {.name = "head", .vocab_size = kVocab, .hidden_size = kHidden, .weight_type = weight_type});
    ASSERT_TRUE(head.ok()) << head.status();
    head_ = std::make_unique<Head>(*std::move(head));
  }

  void StartWithWeights(const TestServerOptions& options = {}) {
    Start(options);
    const auto version = head_->WriteWeights(DataType::kFloat32, RandomFloats(kVocab * kHidden, 1).data());
    ASSERT_TRUE(version.ok()) << version.status();
  }

  Session Open(int64_t chunk_tokens = 8) {
    auto session =
        head_->OpenSession({.chunk_bytes = chunk_tokens * kHidden * static_cast<int64_t>(sizeof(float))});
    EXPECT_TRUE(session.ok()) << session.status();
    return *std::move(session);
  }

  std::vector<float> Flush() {
    std::vector<float> gradient(kVocab * kHidden, -1.0F);
    const auto info = head_->Info();
    EXPECT_TRUE(info.ok()) << info.status();
    const auto result = head_->Flush({}, info->sessions, gradient.data());
    EXPECT_TRUE(result.ok()) << result.status();
    return gradient;
  }

  std::unique_ptr<TestServer> server_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Head> head_;
};

struct Data {
  explicit Data(int64_t tokens, uint32_t seed = 5)
      : labels(RandomLabels(tokens, kVocab, seed)),
        hidden(RandomFloats(tokens * kHidden, seed + 1)),
        losses(static_cast<size_t>(tokens), -1.0F),
        dx(static_cast<size_t>(tokens * kHidden), -1.0F) {}
  Batch batch() const { return {.labels = labels, .hidden_states = hidden.data()}; }
  BatchOutputs outputs() { return {.losses = losses, .dx = dx.data()}; }

  std::vector<int64_t> labels;
  std::vector<float> hidden;
  std::vector<float> losses;
  std::vector<float> dx;
};

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_INTEGRATION_CLIENT_SERVER_CLIENT_SERVER_FIXTURE_H_
