// Flushing gradients and moving weights, also where calls are cut, or what comes is damaged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "proto/safetensors/safetensors.h"
#include "tests/support/call_recorder.h"
#include "tests/support/real_server.h"
#include "tests/support/session_data.h"
#include "tests/support/transfer_fixture.h"

namespace lossd::transfer_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::kHeadName;
using testing::kHidden;
using testing::kVocab;
using testing::RealServer;
using testing::SomeWeights;
using testing::TransferTest;

class BiasTransferTest : public TransferTest {
 protected:
  BiasTransferTest() { server_.config.bias = true; }

  static std::vector<float> SomeBias() {
    std::vector<float> values(kVocab);
    for (size_t i = 0; i < values.size(); ++i) values[i] = 0.5F + static_cast<float>(i);
    return values;
  }
};

// Flush

TEST_F(TransferTest, FlushReadsTheWindowAndEndsIt) {
  FillWindow();
  std::vector<std::pair<int64_t, int64_t>> progress;
  const FlushOptions options{
      .progress = [&](int64_t done, int64_t total) { progress.emplace_back(done, total); }};
  const auto result = head_->Flush(options, marks_, gradient_.data());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(gradient_, window_);
  EXPECT_EQ(result->generation, 1U);
  EXPECT_EQ(result->rows, kVocab);
  EXPECT_EQ(result->columns, kHidden);
  EXPECT_EQ(result->norm, 1.5);
  EXPECT_EQ(server_.generation(), 2U);
  EXPECT_EQ(progress.front(), std::make_pair(int64_t{0}, kVocab * kHidden * 4));
  EXPECT_EQ(progress.back(), std::make_pair(kVocab * kHidden * 4, kVocab * kHidden * 4));
}

TEST_F(TransferTest, WithoutCommitTheWindowStaysFrozenUntilTheCallerDecides) {
  FillWindow();
  const FlushOptions keep{.commit = false};
  const auto first = head_->Flush(keep, marks_, gradient_.data());
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(server_.window_state(), v1::WINDOW_STATE_FROZEN);
  ASSERT_TRUE(head_->AbortFlush(first->flush_id).ok());
  EXPECT_EQ(server_.window_state(), v1::WINDOW_STATE_OPEN);
  EXPECT_EQ(server_.generation(), 1U);
  const auto second = head_->Flush(keep, marks_, gradient_.data());
  ASSERT_TRUE(second.ok()) << second.status();
  ASSERT_TRUE(head_->CommitFlush(second->flush_id).ok());
  EXPECT_EQ(server_.generation(), 2U);
}

TEST_F(TransferTest, NarrowGradientIsRoundedByTheServer) {
  FillWindow();
  std::vector<uint16_t> narrow(kVocab * kHidden);
  const FlushOptions options{.dtype = DataType::kBFloat16};
  const auto result = head_->Flush(options, marks_, narrow.data());
  ASSERT_TRUE(result.ok()) << result.status();
  for (size_t i = 0; i < narrow.size(); ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, &window_[i], sizeof bits);
    EXPECT_EQ(narrow[i], bits >> 16);  // small whole numbers are exact
  }
}

TEST_F(TransferTest, WrongMarksFreezeNothing) {
  FillWindow();
  marks_[0].lanes[0].accepted += 1;
  EXPECT_EQ(head_->Flush({}, marks_, gradient_.data()).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(server_.window_state(), v1::WINDOW_STATE_OPEN);
}

TEST_F(TransferTest, FlushAtARestartedServerIsAWindowLost) {
  auto session = head_->OpenSession({});
  ASSERT_TRUE(session.ok());
  const std::vector<int64_t> labels{1, 2};
  const std::vector<float> hidden(2 * kHidden, 1.0F);
  ASSERT_TRUE(session->Compute({.labels = labels, .hidden_states = hidden.data()}, {}).ok());
  marks_ = {session->marks()};
  // Another session meets the restart; this one has not noticed anything yet.
  auto other = head_->OpenSession({});
  ASSERT_TRUE(other.ok());
  server_.Restart(RealServer::With::kNoHead);
  EXPECT_FALSE(other->Compute({.labels = labels, .hidden_states = hidden.data()}, {}).ok());
  EXPECT_TRUE(IsWindowLost(head_->Flush({}, marks_, gradient_.data()).status()));
}

TEST_F(TransferTest, UnwritablePlaceReopensTheWindow) {
  FillWindow();
  const auto result = head_->FlushToFile({}, marks_, directory_ / "missing" / "gradient.safetensors");
  EXPECT_EQ(result.status().code(), absl::StatusCode::kNotFound) << result.status();
  EXPECT_EQ(server_.observed().aborts, 1);
  EXPECT_EQ(server_.window(), window_);
}

// A file-size limit stands in for a disk that is full: it needs no privileges and fails the same writes.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) {
    old_handler_ = signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old_);
    rlimit limit = old_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullDisk() {
    setrlimit(RLIMIT_FSIZE, &old_);
    signal(SIGXFSZ, old_handler_);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  rlimit old_{};
  void (*old_handler_)(int) = nullptr;
};

TEST_F(TransferTest, FullDiskIsNamedLeavesNoFileAndReopensTheWindow) {
  FillWindow();
  const std::string path = directory_ / "gradient.safetensors";
  const auto trial = head_->FlushToFile({.commit = false}, marks_, path);
  ASSERT_TRUE(trial.ok()) << trial.status();
  ASSERT_TRUE(head_->AbortFlush(trial->flush_id).ok());
  const auto file_bytes = std::filesystem::file_size(path);
  std::filesystem::remove(path);

  absl::Status status;
  {
    const FullDisk full(file_bytes - 1);
    status = head_->FlushToFile({}, marks_, path).status();
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(path));
  EXPECT_THAT(std::string(status.message()), HasSubstr("free space"));
  EXPECT_TRUE(FilesLeft().empty());
  EXPECT_EQ(server_.observed().aborts, 2);  // the trial's and this one's
  EXPECT_EQ(server_.observed().commits, 0);
  ASSERT_TRUE(head_->FlushToFile({}, marks_, path).ok());
}

TEST_F(TransferTest, WrittenWeightsArriveAndGetAVersion) {
  const std::vector<float> weights = SomeWeights();
  const auto version = head_->WriteWeights(DataType::kFloat32, weights.data());
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(*version, 2U);
  EXPECT_EQ(server_.weights(), weights);
}

TEST_F(TransferTest, NullPointersAreRefused) {
  EXPECT_EQ(head_->WriteWeights(DataType::kFloat32, nullptr).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(head_->ReadWeights(DataType::kFloat32, nullptr).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(head_->Flush({}, {}, nullptr).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(BiasTransferTest, TheFileOfAFlushHoldsBothGradients) {
  FillWindow();
  const std::string path = (directory_ / "grad.safetensors").string();
  const auto result = head_->FlushToFile({}, marks_, path);
  ASSERT_TRUE(result.ok()) << result.status();
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto bias = file->Find("lm_head.bias.grad");
  ASSERT_TRUE(bias.ok()) << bias.status();
  EXPECT_THAT(bias->shape, ElementsAre(kVocab));
  std::memcpy(bias_gradient_.data(), bias->data.data(), bias->data.size());
  EXPECT_EQ(bias_gradient_, ExpectedBiasGradient());
  const auto weight = file->Find("lm_head.weight.grad");
  ASSERT_TRUE(weight.ok()) << weight.status();
  std::memcpy(gradient_.data(), weight->data.data(), weight->data.size());
  EXPECT_EQ(gradient_, window_);
}

TEST_F(BiasTransferTest, ABiasThatIsForgottenOrOfTheWrongSizeIsRefusedBeforeAnythingIsSent) {
  std::vector<float> weights(kVocab * kHidden);
  std::vector<float> few(kVocab - 1);
  for (const absl::Status& status : {
           head_->WriteWeights(DataType::kFloat32, weights.data()).status(),
           head_->WriteWeights(DataType::kFloat32, weights.data(), few).status(),
           head_->ReadWeights(DataType::kFloat32, weights.data()).status(),
           head_->Flush({}, marks_, gradient_.data()).status(),
           head_->Flush({}, marks_, gradient_.data(), few).status(),
       }) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("has a bias of"));
  }
  EXPECT_EQ(server_.observed().weight_write_streams, 0);
  EXPECT_TRUE(server_.observed().flushes.empty());
}

TEST_F(TransferTest, ABiasForAHeadThatHasNoneIsRefused) {
  std::vector<float> weights(kVocab * kHidden);
  std::vector<float> bias(kVocab);
  for (const absl::Status& status : {
           head_->WriteWeights(DataType::kFloat32, weights.data(), bias).status(),
           head_->ReadWeights(DataType::kFloat32, weights.data(), bias).status(),
           head_->Flush({}, marks_, gradient_.data(), bias).status(),
       }) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("without a bias"));
  }
}

// Cuts and damage

TEST_F(TransferTest, CutReadResumesAtTheRowReached) {
  FillWindow();
  server_.recorder().row_cuts = {4, 4};
  const auto result = head_->Flush({}, marks_, gradient_.data());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(gradient_, window_);
  EXPECT_THAT(server_.observed().gradient_first_rows, ElementsAre(0, 4, 4));
}

TEST_F(TransferTest, DamagedRowsReopenTheWindowWhateverTheirType) {
  FillWindow();
  DamageGradientAt(0);
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat32}) {
    const auto result = head_->Flush({.dtype = type}, marks_, gradient_.data());
    EXPECT_EQ(result.status().code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("of the gradient are damaged"));
  }
  EXPECT_EQ(server_.observed().aborts, 2);
  EXPECT_EQ(server_.observed().commits, 0);
  EXPECT_EQ(server_.window(), window_);
  // Nothing was lost: the next attempt gets it all.
  damaged_ = false;
  ASSERT_TRUE(head_->Flush({}, marks_, gradient_.data()).ok());
  EXPECT_EQ(gradient_, window_);
}

TEST_F(TransferTest, RowsThatDoNotFollowReopenTheWindow) {
  FillWindow();
  server_.recorder().Edit<v1::ReadGradientResponse>("ReadGradient", [](auto* rows) {
    if (rows->first_row() == 2) rows->set_first_row(3);
  });
  EXPECT_EQ(head_->Flush({}, marks_, gradient_.data()).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(server_.observed().aborts, 1);
  EXPECT_EQ(server_.window(), window_);
}

TEST_F(TransferTest, ReadThatFailsForGoodReopensTheWindow) {
  FillWindow();
  ConnectFor(std::chrono::milliseconds(200));
  server_.recorder().row_cuts.assign(1000, 2);
  const auto result = head_->Flush({}, marks_, gradient_.data());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("gave up at row 2 of 11"));
  server_.recorder().row_cuts.clear();
  EXPECT_EQ(server_.observed().aborts, 1);
  EXPECT_EQ(server_.window(), window_);
}

TEST_F(TransferTest, FailedAbortIsSaid) {
  FillWindow();
  server_.recorder().Refuse("AbortFlush", 1, testing::Refused(grpc::StatusCode::INTERNAL));
  DamageGradientAt(0);
  const auto result = head_->Flush({}, marks_, gradient_.data());
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("the window stays frozen"));
  EXPECT_THAT(std::string(result.status().message()), HasSubstr(server_.flush_id()));
}

TEST_F(TransferTest, LostCommitAnswerIsAskedForAgain) {
  FillWindow();
  server_.recorder().LoseAnswers("CommitFlush", 2);
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
  server_.recorder().row_cuts = {2};
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
  EXPECT_EQ(FilesLeft(), std::vector<std::string>{"gradient.safetensors"});
}

TEST_F(TransferTest, CutWeightWriteIsSentAgain) {
  server_.recorder().cut_weight_write = [](int message) { return message == 3 || message == 5; };
  const std::vector<float> weights = SomeWeights();
  const auto version = head_->WriteWeights(DataType::kFloat32, weights.data());
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(server_.weights(), weights);
  EXPECT_EQ(server_.observed().weight_write_streams, 3);
}

TEST_F(TransferTest, CutWeightReadResumesAndWidensHere) {
  server_.set_weights(SomeWeights());
  server_.recorder().row_cuts = {4};
  std::vector<float> weights(kVocab * kHidden);
  const auto version = head_->ReadWeights(DataType::kFloat32, weights.data());
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(*version, 2U);
  EXPECT_EQ(weights, SomeWeights());
}

TEST_F(TransferTest, WeightsThatChangeDuringAReadAreReadFromTheStart) {
  server_.set_weights(SomeWeights());
  server_.recorder().row_cuts = {4};
  server_.recorder().on_row_cut = [this] { server_.Publish(kHeadName); };
  std::vector<float> weights(kVocab * kHidden);
  const auto version = head_->ReadWeights(DataType::kFloat32, weights.data());
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(*version, 3U);
  EXPECT_EQ(weights, server_.weights());
}

TEST_F(BiasTransferTest, WeightsAndBiasTravelTogetherThroughCuts) {
  std::vector<float> weights(kVocab * kHidden);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(i);
  server_.recorder().cut_weight_write = [](int message) { return message == 1; };
  const auto written = head_->WriteWeights(DataType::kFloat32, weights.data(), SomeBias());
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(server_.weights(), weights);
  EXPECT_EQ(server_.bias(), SomeBias());
  server_.recorder().row_cuts = {2};
  std::vector<float> read(kVocab * kHidden);
  std::vector<float> bias(kVocab);
  ASSERT_TRUE(head_->ReadWeights(DataType::kFloat32, read.data(), bias).ok());
  EXPECT_EQ(read, weights);
  EXPECT_EQ(bias, SomeBias());
}

TEST_F(BiasTransferTest, FlushReadsTheGradientOfTheBiasToo) {
  FillWindow();
  server_.recorder().row_cuts = {4};
  const auto result = head_->Flush({}, marks_, gradient_.data(), bias_gradient_);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(gradient_, window_);
  EXPECT_EQ(bias_gradient_, ExpectedBiasGradient());
  EXPECT_EQ(result->bias_norm, 2.5);
}

TEST_F(BiasTransferTest, ADamagedBiasReopensTheWindow) {
  FillWindow();
  server_.recorder().Edit<v1::ReadGradientResponse>(
      "ReadGradient", [](auto* rows) { testing::Damage(rows->mutable_bias_gradient()); });
  const auto result = head_->Flush({.dtype = DataType::kBFloat16}, marks_, gradient_.data(), bias_gradient_);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(server_.generation(), 1U);
}

}  // namespace
}  // namespace lossd::transfer_test
