// FlushOptions::sink: rows as they arrive, against a server that misbehaves at exact points.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "lossd/client.h"
#include "tests/unit/client/fake_server.h"

namespace lossd::gradient_sink_test {
namespace {

using ::testing::ElementsAre;
using testing::FakeServer;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::RowFate;

constexpr int64_t kElements = FakeServer::kVocab * FakeServer::kHidden;
constexpr int64_t kRowBytes = FakeServer::kHidden * static_cast<int64_t>(sizeof(float));

// What a sink was given, behind each other.
struct Received {
  std::vector<float> gradient;
  std::vector<float> bias;
  std::vector<int64_t> first_rows;

  absl::Status Take(int64_t first_row, int64_t rows, const void* rows_of_gradient,
                    std::span<const float> bias_gradient) {
    const auto* values = static_cast<const float*>(rows_of_gradient);
    gradient.insert(gradient.end(), values, values + rows * FakeServer::kHidden);
    bias.insert(bias.end(), bias_gradient.begin(), bias_gradient.end());
    first_rows.push_back(first_row);
    return absl::OkStatus();
  }
  FlushOptions options() {
    return {.sink = [this](int64_t first_row, int64_t rows, const void* rows_of_gradient,
                           std::span<const float> bias_gradient) {
      return Take(first_row, rows, rows_of_gradient, bias_gradient);
    }};
  }
};

class GradientSinkTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    fake_.has_bias = GetParam();
    auto client = Client::Connect(
        fake_.target(), {.reconnect_timeout = std::chrono::seconds(20), .transfer_bytes = 2 * kRowBytes});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    auto head = client_->GetHead(FakeServer::kName);
    ASSERT_TRUE(head.ok()) << head.status();
    head_ = std::make_unique<Head>(*std::move(head));
    FillWindow();
  }

  // Puts something into every row of the window.
  void FillWindow() {
    auto session = head_->OpenSession({});
    ASSERT_TRUE(session.ok()) << session.status();
    std::vector<int64_t> labels;
    for (int64_t i = 0; i < FakeServer::kVocab; ++i) {
      labels.push_back(i);
      for (int64_t j = 0; j < FakeServer::kHidden; ++j) window_.push_back(static_cast<float>(i * 10 + j + 1));
    }
    ASSERT_TRUE(session->Compute({.labels = labels, .hidden_states = window_.data()}, {}).ok());
    marks_ = {session->marks()};
  }

  std::vector<float> ExpectedBias() const {
    std::vector<float> bias;
    if (!GetParam()) return bias;
    for (int64_t row = 0; row < FakeServer::kVocab; ++row) {
      bias.push_back(window_[static_cast<size_t>(row * FakeServer::kHidden)] / 2);
    }
    return bias;
  }

  FakeServer fake_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Head> head_;
  std::vector<SessionMarks> marks_;
  std::vector<float> window_;
};

TEST_P(GradientSinkTest, GetsEachRowOnceInOrder) {
  Received received;
  const auto result = head_->Flush(received.options(), marks_, nullptr);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(received.gradient, window_);
  EXPECT_EQ(received.bias, ExpectedBias());
  EXPECT_THAT(received.first_rows, ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_EQ(result->rows, FakeServer::kVocab);
  EXPECT_EQ(fake_.generation(), 2U);
}

TEST_P(GradientSinkTest, GetsEachRowOnceThroughCuts) {
  fake_.on_gradient_rows = [](int message) {
    return message == 2 || message == 3 ? RowFate::kCut : RowFate::kSend;
  };
  Received received;
  const auto result = head_->Flush(received.options(), marks_, nullptr);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(received.gradient, window_);
  EXPECT_EQ(received.bias, ExpectedBias());
  EXPECT_THAT(fake_.observed().gradient_first_rows, ElementsAre(0, 4, 4));
}

TEST_P(GradientSinkTest, LeavesTheWindowFrozenIfAsked) {
  Received received;
  FlushOptions options = received.options();
  options.commit = false;
  const auto result = head_->Flush(options, marks_, nullptr);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(received.gradient, window_);
  EXPECT_EQ(fake_.window_state(), v1::WINDOW_STATE_FROZEN);
  ASSERT_TRUE(head_->CommitFlush(result->flush_id).ok());
  EXPECT_EQ(fake_.generation(), 2U);
}

TEST_P(GradientSinkTest, NarrowRowsAreOfTheirType) {
  std::vector<uint16_t> narrow;
  const FlushOptions options{
      .dtype = DataType::kBFloat16,
      .sink = [&](int64_t /*first_row*/, int64_t rows, const void* gradient, std::span<const float> bias) {
        EXPECT_EQ(bias.size(), GetParam() ? static_cast<size_t>(rows) : 0U);
        const auto* values = static_cast<const uint16_t*>(gradient);
        narrow.insert(narrow.end(), values, values + rows * FakeServer::kHidden);
        return absl::OkStatus();
      }};
  ASSERT_TRUE(head_->Flush(options, marks_, nullptr).ok());
  ASSERT_EQ(narrow.size(), window_.size());
  for (size_t i = 0; i < narrow.size(); ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, &window_[i], sizeof bits);
    EXPECT_EQ(narrow[i], bits >> 16);  // small whole numbers are exact
  }
}

// UNAVAILABLE and CANCELLED of the network are reasons to try again; of a sink nothing is.
TEST_P(GradientSinkTest, ErrorOfTheSinkEndsTheFlushAndReopensTheWindow) {
  for (const absl::StatusCode code :
       {absl::StatusCode::kUnavailable, absl::StatusCode::kCancelled, absl::StatusCode::kInternal}) {
    Received received;
    FlushOptions options;
    options.sink = [&](int64_t first_row, int64_t rows, const void* gradient, std::span<const float> bias) {
      if (first_row >= 4) return absl::Status(code, "no room here");
      return received.Take(first_row, rows, gradient, bias);
    };
    const auto before = fake_.observed();
    const auto result = head_->Flush(options, marks_, nullptr);
    EXPECT_EQ(result.status().code(), absl::StatusCode::kCancelled) << result.status();
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("at row 4"));
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("no room here"));
    EXPECT_THAT(received.first_rows, ElementsAre(0, 2));
    EXPECT_EQ(fake_.observed().gradient_first_rows.size(), before.gradient_first_rows.size() + 1);
    EXPECT_EQ(fake_.observed().aborts, before.aborts + 1);
    EXPECT_EQ(fake_.window_state(), v1::WINDOW_STATE_OPEN);
    EXPECT_EQ(fake_.window(), window_);
  }
  Received received;
  ASSERT_TRUE(head_->Flush(received.options(), marks_, nullptr).ok());
  EXPECT_EQ(received.gradient, window_);
  EXPECT_THAT(received.first_rows.front(), 0);
}

TEST_P(GradientSinkTest, WrongChecksumIsSaidAfterTheLastRowAndReopensTheWindow) {
  fake_.on_gradient_rows = [](int message) { return message == 1 ? RowFate::kCorrupt : RowFate::kSend; };
  Received received;
  const auto result = head_->Flush(received.options(), marks_, nullptr);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDataLoss) << result.status();
  EXPECT_EQ(received.gradient.size(), static_cast<size_t>(kElements));
  EXPECT_NE(received.gradient, window_);
  EXPECT_EQ(fake_.observed().aborts, 1);
  EXPECT_EQ(fake_.observed().commits, 0);
  EXPECT_EQ(fake_.window(), window_);
}

TEST_P(GradientSinkTest, TwoPlacesForTheGradientAreRefused) {
  Received received;
  std::vector<float> gradient(kElements);
  std::vector<float> bias(FakeServer::kVocab);
  const auto both = head_->Flush(received.options(), marks_, gradient.data());
  EXPECT_EQ(both.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(both.status().message()), HasSubstr("gradient"));
  const auto with_bias = head_->Flush(received.options(), marks_, nullptr, bias);
  EXPECT_EQ(with_bias.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(with_bias.status().message()), HasSubstr("bias_gradient"));
  const auto file = head_->FlushToFile(received.options(), marks_, "/nowhere/gradient.safetensors");
  EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(received.first_rows, IsEmpty());
  EXPECT_EQ(fake_.window_state(), v1::WINDOW_STATE_OPEN);
}

TEST_P(GradientSinkTest, DiscardEndsTheWindowAndReadsNothing) {
  fake_.lost_commits = 1;
  const auto result = head_->Discard(marks_);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->generation, 1U);
  EXPECT_EQ(fake_.generation(), 2U);
  EXPECT_EQ(fake_.window_state(), v1::WINDOW_STATE_OPEN);
  EXPECT_THAT(fake_.observed().gradient_first_rows, IsEmpty());
  const auto without = head_->Discard({});
  EXPECT_EQ(without.status().code(), absl::StatusCode::kOk) << without.status();
}

INSTANTIATE_TEST_SUITE_P(WithAndWithoutBias, GradientSinkTest, ::testing::Bool());

}  // namespace
}  // namespace lossd::gradient_sink_test
