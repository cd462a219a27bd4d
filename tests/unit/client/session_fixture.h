// A head at a fake server, and batches whose results can be foretold.
#ifndef LOSSD_TESTS_UNIT_CLIENT_SESSION_FIXTURE_H_
#define LOSSD_TESTS_UNIT_CLIENT_SESSION_FIXTURE_H_

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "tests/unit/client/fake_server.h"

namespace lossd::testing {

inline constexpr int64_t kHidden = FakeServer::kHidden;
inline constexpr int64_t kTokensPerChunk = 2;

// A batch of whole numbers, and where its results go.
struct Data {
  explicit Data(int64_t tokens, int64_t seed = 0) {
    for (int64_t i = 0; i < tokens; ++i) {
      labels.push_back((i * 7 + seed) % FakeServer::kVocab);
      for (int64_t j = 0; j < kHidden; ++j) hidden.push_back(static_cast<float>((i * 5 + j * 3 + seed) % 17));
    }
    losses.assign(labels.size(), -1.0F);
    dx.assign(hidden.size(), -1.0F);
  }

  Batch batch() const { return {.labels = labels, .hidden_states = hidden.data()}; }
  BatchOutputs outputs() { return {.losses = losses, .dx = dx.data()}; }

  // What the fake must have made of tokens [begin, end), added to `window`.
  void AddTo(std::vector<float>* window, size_t begin, size_t end) const {
    for (size_t i = begin; i < end; ++i) {
      for (size_t j = 0; j < kHidden; ++j) {
        (*window)[static_cast<size_t>(labels[i]) * kHidden + j] += hidden[i * kHidden + j];
      }
    }
  }
  std::vector<float> Window() const {
    std::vector<float> window(FakeServer::kVocab * kHidden, 0.0F);
    AddTo(&window, 0, labels.size());
    return window;
  }

  void ExpectOutputs(size_t begin, size_t end) const {
    for (size_t i = begin; i < end; ++i) {
      EXPECT_EQ(losses[i], static_cast<float>(labels[i]) + hidden[i * kHidden]) << "token " << i;
      for (size_t j = 0; j < kHidden; ++j) {
        EXPECT_EQ(dx[i * kHidden + j], 2 * hidden[i * kHidden + j]) << "token " << i;
      }
    }
  }
  void ExpectOutputs() const { ExpectOutputs(0, labels.size()); }

  std::vector<int64_t> labels;
  std::vector<float> hidden;
  std::vector<float> losses;
  std::vector<float> dx;
};

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
