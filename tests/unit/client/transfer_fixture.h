// Flushed gradients and weights of a small head, and a folder for files; at whatever server.
#ifndef LOSSD_TESTS_UNIT_CLIENT_TRANSFER_FIXTURE_H_
#define LOSSD_TESTS_UNIT_CLIENT_TRANSFER_FIXTURE_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "tests/unit/client/session_data.h"

namespace lossd::testing {

inline std::vector<float> SomeWeights() {
  std::vector<float> weights;
  for (int64_t i = 0; i < kVocab * kHidden; ++i) weights.push_back(static_cast<float>(i) * 0.5F);
  return weights;
}

template <typename Server>
class TransferFixture : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = std::filesystem::path(::testing::TempDir()) /
                 ("lossd_transfer_" + std::to_string(getpid()) + "_" +
                  ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(directory_);
    Connect(std::chrono::seconds(20));
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  void Connect(std::chrono::milliseconds reconnect_timeout) {
    auto client = Client::Connect(server_.target(),
                                  {.reconnect_timeout = reconnect_timeout, .transfer_bytes = 2 * kRowBytes});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    auto head = client_->GetHead(kHeadName);
    ASSERT_TRUE(head.ok()) << head.status();
    head_ = std::make_unique<Head>(*std::move(head));
  }

  // Puts something into every row of the window.
  void FillWindow() {
    auto session = head_->OpenSession({});
    ASSERT_TRUE(session.ok()) << session.status();
    std::vector<int64_t> labels;
    std::vector<float> hidden;
    for (int64_t i = 0; i < kVocab; ++i) {
      labels.push_back(i);
      for (int64_t j = 0; j < kHidden; ++j) hidden.push_back(static_cast<float>(i * 10 + j + 1));
    }
    ASSERT_TRUE(session->Compute({.labels = labels, .hidden_states = hidden.data()}, {}).ok());
    marks_ = {session->marks()};
    window_ = hidden;
  }

  std::vector<std::string> FilesLeft() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }

  static constexpr int64_t kRowBytes = kHidden * static_cast<int64_t>(sizeof(float));
  Server server_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Head> head_;
  std::vector<SessionMarks> marks_;
  std::vector<float> window_;
  std::vector<float> gradient_ = std::vector<float>(kVocab * kHidden, -1.0F);
  std::filesystem::path directory_;
};

// The same with a bias.
template <typename Server>
class BiasTransferFixture : public TransferFixture<Server> {
 protected:
  // What the server has for db once FillWindow was called.
  std::vector<float> ExpectedBiasGradient() const {
    std::vector<float> bias;
    for (int64_t row = 0; row < kVocab; ++row) {
      bias.push_back(this->window_[static_cast<size_t>(row * kHidden)] / 2);
    }
    return bias;
  }
  static std::vector<float> Ramp() {
    std::vector<float> values(kVocab);
    for (size_t i = 0; i < values.size(); ++i) values[i] = 0.5F + static_cast<float>(i);
    return values;
  }

  std::vector<float> bias_gradient_ = std::vector<float>(kVocab, -1.0F);
};

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_UNIT_CLIENT_TRANSFER_FIXTURE_H_
