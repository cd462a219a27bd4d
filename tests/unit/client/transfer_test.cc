// Flushing gradients and moving weights against a server that misbehaves at exact points.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "lossd/client.h"
#include "proto/safetensors/safetensors.h"
#include "tests/unit/client/fake_server.h"
#include "tests/unit/client/transfer_fixture.h"

namespace lossd::transfer_test {
namespace {

using ::testing::ElementsAre;
using testing::FakeServer;
using ::testing::HasSubstr;
using testing::kHidden;
using testing::kVocab;
using testing::RowFate;
using testing::SomeWeights;

class TransferTest : public testing::TransferFixture<FakeServer> {};

class BiasTransferTest : public testing::BiasTransferFixture<FakeServer> {
 protected:
  BiasTransferTest() { server_.has_bias = true; }
};

TEST_F(TransferTest, CutReadResumesAtTheRowReached) {
  FillWindow();
  server_.on_gradient_rows = [](int message) {
    return message == 2 || message == 3 ? RowFate::kCut : RowFate::kSend;
  };
  const auto result = head_->Flush({}, marks_, gradient_.data());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(gradient_, window_);
  EXPECT_THAT(server_.observed().gradient_first_rows, ElementsAre(0, 4, 4));
}

TEST_F(TransferTest, WrongChecksumReopensTheWindow) {
  FillWindow();
  server_.on_gradient_rows = [](int message) { return message == 1 ? RowFate::kCorrupt : RowFate::kSend; };
  const auto result = head_->Flush({}, marks_, gradient_.data());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("checksum"));
  EXPECT_EQ(server_.observed().aborts, 1);
  EXPECT_EQ(server_.observed().commits, 0);
  EXPECT_EQ(server_.window(), window_);
  // Nothing was lost: the next attempt gets it all.
  ASSERT_TRUE(head_->Flush({}, marks_, gradient_.data()).ok());
  EXPECT_EQ(gradient_, window_);
}

TEST_F(TransferTest, RowsThatDoNotFollowReopenTheWindow) {
  FillWindow();
  server_.on_gradient_rows = [](int message) { return message == 1 ? RowFate::kWrongRow : RowFate::kSend; };
  EXPECT_EQ(head_->Flush({}, marks_, gradient_.data()).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(server_.observed().aborts, 1);
  EXPECT_EQ(server_.window(), window_);
}

TEST_F(TransferTest, ReadThatFailsForGoodReopensTheWindow) {
  FillWindow();
  Connect(std::chrono::milliseconds(200));
  server_.on_gradient_rows = [](int message) { return message >= 1 ? RowFate::kCut : RowFate::kSend; };
  const auto result = head_->Flush({}, marks_, gradient_.data());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("gave up at row 2 of 11"));
  EXPECT_EQ(server_.observed().aborts, 1);
  EXPECT_EQ(server_.window(), window_);
}

TEST_F(TransferTest, FailedAbortIsSaid) {
  FillWindow();
  server_.refused_aborts = 1;
  server_.on_gradient_rows = [](int) { return RowFate::kCorrupt; };
  const auto result = head_->Flush({}, marks_, gradient_.data());
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("the window stays frozen"));
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("flush-1"));
}

TEST_F(TransferTest, LostCommitAnswerIsAskedForAgain) {
  FillWindow();
  server_.lost_commits = 2;
  const auto result = head_->Flush({}, marks_, gradient_.data());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(gradient_, window_);
  EXPECT_EQ(server_.observed().commits, 3);
  EXPECT_EQ(server_.generation(), 2U);  // ended once
}

// Flush to a file

TEST_F(TransferTest, FlushToFileWritesACompleteFileAndCommitsAfterIt) {
  FillWindow();
  const std::string path = directory_ / "gradient.safetensors";
  server_.on_gradient_rows = [](int message) { return message == 1 ? RowFate::kCut : RowFate::kSend; };
  const auto result = head_->FlushToFile({}, marks_, path);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(server_.generation(), 2U);
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto tensor = file->Find("lm_head.weight.grad");
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_THAT(tensor->shape, ElementsAre(kVocab, kHidden));
  ASSERT_EQ(tensor->data.size(), window_.size() * sizeof(float));
  EXPECT_EQ(std::memcmp(tensor->data.data(), window_.data(), tensor->data.size()), 0);
  EXPECT_EQ(file->metadata().at("generation"), "1");
  EXPECT_EQ(file->metadata().at("norm"), "1.5");
  EXPECT_EQ(file->metadata().at("xxh3_64_float32").size(), 16U);
  EXPECT_EQ(FilesLeft(), std::vector<std::string>{"gradient.safetensors"});
}

TEST_F(TransferTest, CutWeightWriteIsSentAgain) {
  server_.cut_weight_write = [](int message) { return message == 3 || message == 5; };
  const std::vector<float> weights = SomeWeights();
  const auto version = head_->WriteWeights(DataType::kFloat32, weights.data());
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(server_.weights(), weights);
  EXPECT_EQ(server_.observed().weight_write_streams, 3);
}

TEST_F(TransferTest, CutWeightReadResumesAndWidensHere) {
  server_.set_weights(SomeWeights());
  server_.on_weight_rows = [](int message) { return message == 2 ? RowFate::kCut : RowFate::kSend; };
  std::vector<float> weights(kVocab * kHidden);
  const auto version = head_->ReadWeights(DataType::kFloat32, weights.data());
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(*version, 1U);
  EXPECT_EQ(weights, SomeWeights());
}

TEST_F(TransferTest, WeightsThatChangeDuringAReadAreReadFromTheStart) {
  server_.set_weights(SomeWeights());
  server_.change_weights_on_cut = true;
  server_.on_weight_rows = [](int message) { return message == 2 ? RowFate::kCut : RowFate::kSend; };
  std::vector<float> weights(kVocab * kHidden);
  const auto version = head_->ReadWeights(DataType::kFloat32, weights.data());
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(*version, 2U);
  EXPECT_EQ(weights, server_.weights());
}

TEST_F(BiasTransferTest, WeightsAndBiasTravelTogetherThroughCuts) {
  std::vector<float> weights(kVocab * kHidden);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(i);
  server_.cut_weight_write = [](int message) { return message == 1; };
  const auto written = head_->WriteWeights(DataType::kFloat32, weights.data(), Ramp());
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(server_.weights(), weights);
  EXPECT_EQ(server_.bias(), Ramp());
  server_.on_weight_rows = [](int message) { return message == 1 ? RowFate::kCut : RowFate::kSend; };
  std::vector<float> read(kVocab * kHidden);
  std::vector<float> bias(kVocab);
  ASSERT_TRUE(head_->ReadWeights(DataType::kFloat32, read.data(), bias).ok());
  EXPECT_EQ(read, weights);
  EXPECT_EQ(bias, Ramp());
}

TEST_F(BiasTransferTest, FlushReadsTheGradientOfTheBiasToo) {
  FillWindow();
  server_.on_gradient_rows = [](int message) { return message == 2 ? RowFate::kCut : RowFate::kSend; };
  const auto result = head_->Flush({}, marks_, gradient_.data(), bias_gradient_);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(gradient_, window_);
  EXPECT_EQ(bias_gradient_, ExpectedBiasGradient());
  EXPECT_EQ(result->bias_norm, 2.5);
}

TEST_F(BiasTransferTest, AWrongChecksumOfTheBiasReopensTheWindow) {
  FillWindow();
  server_.corrupt_bias_gradient = true;
  const auto result = head_->Flush({.dtype = DataType::kBFloat16}, marks_, gradient_.data(), bias_gradient_);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDataLoss) << "the bias is fp32 whatever the rows are";
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("the bias's gradient"));
  EXPECT_EQ(server_.generation(), 1U);
}
}  // namespace
}  // namespace lossd::transfer_test
