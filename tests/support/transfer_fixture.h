// Flushed gradients and weights of a small head, and a folder for files.
#ifndef LOSSD_TESTS_SUPPORT_TRANSFER_FIXTURE_H_
#define LOSSD_TESTS_SUPPORT_TRANSFER_FIXTURE_H_

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "lossd/client.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/session_data.h"
#include "tests/support/session_fixture.h"

namespace lossd::testing {

inline std::vector<float> SomeWeights() {
  std::vector<float> weights;
  for (int64_t i = 0; i < kVocab * kHidden; ++i) weights.push_back(static_cast<float>(i) * 0.5F);
  return weights;
}

inline void Damage(std::string* bytes) { bytes->front() = static_cast<char>(bytes->front() ^ 1); }

class TransferTest : public SessionTest {
 protected:
  void SetUp() override { ConnectFor(std::chrono::seconds(20)); }

  void ConnectFor(std::chrono::milliseconds reconnect_timeout) {
    Connect({.reconnect_timeout = reconnect_timeout, .transfer_bytes = 2 * kRowBytes});
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
  // What the server has for db of it.
  std::vector<float> ExpectedBiasGradient() const {
    std::vector<float> bias;
    for (size_t row = 0; row < kVocab; ++row) bias.push_back(window_[row * kHidden] / 2);
    return bias;
  }

  std::vector<std::string> FilesLeft() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }

  // The rows of gradients from `row` on come damaged while `damaged_` is true.
  void DamageGradientAt(int64_t row) {
    server_.recorder().Edit<v1::ReadGradientResponse>("ReadGradient", [this, row](auto* rows) {
      if (damaged_ && rows->first_row() == row) Damage(rows->mutable_gradient());
    });
  }

  static constexpr int64_t kRowBytes = kHidden * static_cast<int64_t>(sizeof(float));
  std::vector<SessionMarks> marks_;
  std::vector<float> window_;
  std::vector<float> gradient_ = std::vector<float>(kVocab * kHidden, -1.0F);
  std::vector<float> bias_gradient_ = std::vector<float>(kVocab, -1.0F);
  const ScratchFolder folder_;
  const std::filesystem::path directory_ = folder_.path();
  bool damaged_ = true;
};

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_SUPPORT_TRANSFER_FIXTURE_H_
