// FlushOptions::sink: rows as they arrive, also where calls are cut, or what comes is damaged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "lossd/client.h"
#include "tests/support/session_data.h"
#include "tests/support/transfer_fixture.h"

namespace lossd::gradient_sink_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::kHidden;
using testing::kVocab;

constexpr int64_t kElements = kVocab * kHidden;

// What a sink was given, behind each other.
struct Received {
  std::vector<float> gradient;
  std::vector<float> bias;
  std::vector<int64_t> first_rows;

  absl::Status Take(int64_t first_row, int64_t rows, const void* rows_of_gradient,
                    std::span<const float> bias_gradient) {
    const auto* values = static_cast<const float*>(rows_of_gradient);
    gradient.insert(gradient.end(), values, values + rows * kHidden);
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

class GradientSinkTest : public testing::TransferTest, public ::testing::WithParamInterface<bool> {
 protected:
  GradientSinkTest() { server_.config.bias = GetParam(); }
  void SetUp() override {
    TransferTest::SetUp();
    FillWindow();
  }

  std::vector<float> ExpectedBias() const {
    return GetParam() ? ExpectedBiasGradient() : std::vector<float>();
  }
};

TEST_P(GradientSinkTest, GetsEachRowOnceInOrder) {
  Received received;
  const auto result = head_->Flush(received.options(), marks_, nullptr);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(received.gradient, window_);
  EXPECT_EQ(received.bias, ExpectedBias());
  EXPECT_THAT(received.first_rows, ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_EQ(result->rows, kVocab);
  EXPECT_EQ(server_.generation(), 2U);
}

TEST_P(GradientSinkTest, GetsEachRowOnceThroughCuts) {
  server_.recorder().row_cuts = {4, 4};
  Received received;
  const auto result = head_->Flush(received.options(), marks_, nullptr);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(received.gradient, window_);
  EXPECT_EQ(received.bias, ExpectedBias());
  EXPECT_THAT(server_.observed().gradient_first_rows, ElementsAre(0, 4, 4));
}

TEST_P(GradientSinkTest, LeavesTheWindowFrozenIfAsked) {
  Received received;
  FlushOptions options = received.options();
  options.commit = false;
  const auto result = head_->Flush(options, marks_, nullptr);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(received.gradient, window_);
  EXPECT_EQ(server_.window_state(), v1::WINDOW_STATE_FROZEN);
  ASSERT_TRUE(head_->CommitFlush(result->flush_id).ok());
  EXPECT_EQ(server_.generation(), 2U);
}

TEST_P(GradientSinkTest, NarrowRowsAreOfTheirType) {
  std::vector<uint16_t> narrow;
  const FlushOptions options{
      .dtype = DataType::kBFloat16,
      .sink = [&](int64_t /*first_row*/, int64_t rows, const void* gradient, std::span<const float> bias) {
        EXPECT_EQ(bias.size(), GetParam() ? static_cast<size_t>(rows) : 0U);
        const auto* values = static_cast<const uint16_t*>(gradient);
        narrow.insert(narrow.end(), values, values + rows * kHidden);
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
    const auto before = server_.observed();
    const auto result = head_->Flush(options, marks_, nullptr);
    EXPECT_EQ(result.status().code(), absl::StatusCode::kCancelled) << result.status();
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("at row 4"));
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("no room here"));
    EXPECT_THAT(received.first_rows, ElementsAre(0, 2));
    EXPECT_EQ(server_.observed().gradient_first_rows.size(), before.gradient_first_rows.size() + 1);
    EXPECT_EQ(server_.observed().aborts, before.aborts + 1);
    EXPECT_EQ(server_.window_state(), v1::WINDOW_STATE_OPEN);
    EXPECT_EQ(server_.window(), window_);
  }
  Received received;
  ASSERT_TRUE(head_->Flush(received.options(), marks_, nullptr).ok());
  EXPECT_EQ(received.gradient, window_);
  EXPECT_THAT(received.first_rows.front(), 0);
}

TEST_P(GradientSinkTest, DamagedRowsDoNotReachTheSinkAndReopenTheWindow) {
  DamageGradientAt(2);
  Received received;
  const auto result = head_->Flush(received.options(), marks_, nullptr);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDataLoss) << result.status();
  EXPECT_EQ(received.gradient.size(), static_cast<size_t>(2 * kHidden));
  EXPECT_EQ(server_.observed().aborts, 1);
  EXPECT_EQ(server_.observed().commits, 0);
  EXPECT_EQ(server_.window(), window_);
}

TEST_P(GradientSinkTest, TwoPlacesForTheGradientAreRefused) {
  Received received;
  std::vector<float> gradient(kElements);
  std::vector<float> bias(kVocab);
  const auto both = head_->Flush(received.options(), marks_, gradient.data());
  EXPECT_EQ(both.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(both.status().message()), HasSubstr("gradient"));
  const auto with_bias = head_->Flush(received.options(), marks_, nullptr, bias);
  EXPECT_EQ(with_bias.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(with_bias.status().message()), HasSubstr("bias_gradient"));
  const auto file = head_->FlushToFile(received.options(), marks_, "/nowhere/gradient.safetensors");
  EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(received.first_rows, IsEmpty());
  EXPECT_EQ(server_.window_state(), v1::WINDOW_STATE_OPEN);
}

TEST_P(GradientSinkTest, DiscardEndsTheWindowAndReadsNothing) {
  server_.recorder().LoseAnswers("CommitFlush", 1);
  const auto result = head_->Discard(marks_);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->generation, 1U);
  EXPECT_EQ(server_.generation(), 2U);
  EXPECT_EQ(server_.window_state(), v1::WINDOW_STATE_OPEN);
  EXPECT_THAT(server_.observed().gradient_first_rows, IsEmpty());
  const auto without = head_->Discard({});
  EXPECT_EQ(without.status().code(), absl::StatusCode::kOk) << without.status();
}

INSTANTIATE_TEST_SUITE_P(WithAndWithoutBias, GradientSinkTest, ::testing::Bool());

}  // namespace
}  // namespace lossd::gradient_sink_test
