// Flushing gradients and moving weights against a server that misbehaves at exact points.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "proto/safetensors/safetensors.h"
#include "tests/unit/client/fake_server.h"

namespace lossd::transfer_test {
namespace {

using ::testing::ElementsAre;
using testing::FakeServer;
using testing::Fate;
using ::testing::HasSubstr;
using testing::RowFate;

constexpr int64_t kElements = FakeServer::kVocab * FakeServer::kHidden;

class TransferTest : public ::testing::Test {
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
    auto client = Client::Connect(fake_.target(),
                                  {.reconnect_timeout = reconnect_timeout, .transfer_bytes = 2 * kRowBytes});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    auto head = client_->GetHead(FakeServer::kName);
    ASSERT_TRUE(head.ok()) << head.status();
    head_ = std::make_unique<Head>(*std::move(head));
  }

  // Puts something into every row of the window.
  void FillWindow() {
    auto session = head_->OpenSession({});
    ASSERT_TRUE(session.ok()) << session.status();
    std::vector<int64_t> labels;
    std::vector<float> hidden;
    for (int64_t i = 0; i < FakeServer::kVocab; ++i) {
      labels.push_back(i);
      for (int64_t j = 0; j < FakeServer::kHidden; ++j) hidden.push_back(static_cast<float>(i * 10 + j + 1));
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

  static constexpr int64_t kRowBytes = FakeServer::kHidden * static_cast<int64_t>(sizeof(float));
  FakeServer fake_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Head> head_;
  std::vector<SessionMarks> marks_;
  std::vector<float> window_;
  std::vector<float> gradient_ = std::vector<float>(kElements, -1.0F);
  std::filesystem::path directory_;
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
  EXPECT_EQ(result->rows, FakeServer::kVocab);
  EXPECT_EQ(result->columns, FakeServer::kHidden);
  EXPECT_EQ(result->norm, 1.5);
  EXPECT_EQ(fake_.generation(), 2U);
  EXPECT_EQ(progress.front(), std::make_pair(int64_t{0}, kElements * 4));
  EXPECT_EQ(progress.back(), std::make_pair(kElements * 4, kElements * 4));
}

TEST_F(TransferTest, CutReadResumesAtTheRowReached) {
  FillWindow();
  fake_.on_gradient_rows = [](int message) {
    return message == 2 || message == 3 ? RowFate::kCut : RowFate::kSend;
  };
  const auto result = head_->Flush({}, marks_, gradient_.data());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(gradient_, window_);
  EXPECT_THAT(fake_.observed().gradient_first_rows, ElementsAre(0, 4, 4));
}

TEST_F(TransferTest, WrongChecksumReopensTheWindow) {
  FillWindow();
  fake_.on_gradient_rows = [](int message) { return message == 1 ? RowFate::kCorrupt : RowFate::kSend; };
  const auto result = head_->Flush({}, marks_, gradient_.data());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("checksum"));
  EXPECT_EQ(fake_.observed().aborts, 1);
  EXPECT_EQ(fake_.observed().commits, 0);
  EXPECT_EQ(fake_.window(), window_);
  // Nothing was lost: the next attempt gets it all.
  ASSERT_TRUE(head_->Flush({}, marks_, gradient_.data()).ok());
  EXPECT_EQ(gradient_, window_);
}

TEST_F(TransferTest, RowsThatDoNotFollowReopenTheWindow) {
  FillWindow();
  fake_.on_gradient_rows = [](int message) { return message == 1 ? RowFate::kWrongRow : RowFate::kSend; };
  EXPECT_EQ(head_->Flush({}, marks_, gradient_.data()).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(fake_.observed().aborts, 1);
  EXPECT_EQ(fake_.window(), window_);
}

TEST_F(TransferTest, ReadThatFailsForGoodReopensTheWindow) {
  FillWindow();
  Connect(std::chrono::milliseconds(200));
  fake_.on_gradient_rows = [](int message) { return message >= 1 ? RowFate::kCut : RowFate::kSend; };
  const auto result = head_->Flush({}, marks_, gradient_.data());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("gave up at row 2 of 11"));
  EXPECT_EQ(fake_.observed().aborts, 1);
  EXPECT_EQ(fake_.window(), window_);
}

TEST_F(TransferTest, FailedAbortIsSaid) {
  FillWindow();
  fake_.refused_aborts = 1;
  fake_.on_gradient_rows = [](int) { return RowFate::kCorrupt; };
  const auto result = head_->Flush({}, marks_, gradient_.data());
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("the window stays frozen"));
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("flush-1"));
}

TEST_F(TransferTest, LostCommitAnswerIsAskedForAgain) {
  FillWindow();
  fake_.lost_commits = 2;
  const auto result = head_->Flush({}, marks_, gradient_.data());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(gradient_, window_);
  EXPECT_EQ(fake_.observed().commits, 3);
  EXPECT_EQ(fake_.generation(), 2U);  // ended once
}

TEST_F(TransferTest, WithoutCommitTheWindowStaysFrozenUntilTheCallerDecides) {
  FillWindow();
  const FlushOptions keep{.commit = false};
  const auto first = head_->Flush(keep, marks_, gradient_.data());
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(fake_.window_state(), v1::WINDOW_STATE_FROZEN);
  ASSERT_TRUE(head_->AbortFlush(first->flush_id).ok());
  EXPECT_EQ(fake_.window_state(), v1::WINDOW_STATE_OPEN);
  EXPECT_EQ(fake_.generation(), 1U);
  const auto second = head_->Flush(keep, marks_, gradient_.data());
  ASSERT_TRUE(second.ok()) << second.status();
  ASSERT_TRUE(head_->CommitFlush(second->flush_id).ok());
  EXPECT_EQ(fake_.generation(), 2U);
}

TEST_F(TransferTest, NarrowGradientIsNotCheckedAgainstTheWideChecksum) {
  FillWindow();
  std::vector<uint16_t> narrow(kElements);
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
  EXPECT_EQ(fake_.window_state(), v1::WINDOW_STATE_OPEN);
}

TEST_F(TransferTest, FlushAtARestartedServerIsAWindowLost) {
  auto session = head_->OpenSession({});
  ASSERT_TRUE(session.ok());
  const std::vector<int64_t> labels{1, 2};
  const std::vector<float> hidden(2 * FakeServer::kHidden, 1.0F);
  ASSERT_TRUE(session->Compute({.labels = labels, .hidden_states = hidden.data()}, {}).ok());
  marks_ = {session->marks()};
  // Another session's chunk meets the restart; this one has not noticed anything yet.
  fake_.on_chunk = [](uint64_t, int) { return Fate::kRestartLoseHead; };
  auto other = head_->OpenSession({});
  ASSERT_TRUE(other.ok());
  EXPECT_FALSE(other->Compute({.labels = labels, .hidden_states = hidden.data()}, {}).ok());
  EXPECT_TRUE(IsWindowLost(head_->Flush({}, marks_, gradient_.data()).status()));
}

// Flush to a file

TEST_F(TransferTest, FlushToFileWritesACompleteFileAndCommitsAfterIt) {
  FillWindow();
  const std::string path = directory_ / "gradient.safetensors";
  fake_.on_gradient_rows = [](int message) { return message == 1 ? RowFate::kCut : RowFate::kSend; };
  const auto result = head_->FlushToFile({}, marks_, path);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(fake_.generation(), 2U);
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto tensor = file->Find("lm_head.weight.grad");
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_THAT(tensor->shape, ElementsAre(FakeServer::kVocab, FakeServer::kHidden));
  ASSERT_EQ(tensor->data.size(), window_.size() * sizeof(float));
  EXPECT_EQ(std::memcmp(tensor->data.data(), window_.data(), tensor->data.size()), 0);
  EXPECT_EQ(file->metadata().at("generation"), "1");
  EXPECT_EQ(file->metadata().at("norm"), "1.5");
  EXPECT_EQ(file->metadata().at("xxh3_64_float32").size(), 16U);
  EXPECT_EQ(FilesLeft(), std::vector<std::string>{"gradient.safetensors"});
}

TEST_F(TransferTest, UnwritablePlaceReopensTheWindow) {
  FillWindow();
  const auto result = head_->FlushToFile({}, marks_, directory_ / "missing" / "gradient.safetensors");
  EXPECT_EQ(result.status().code(), absl::StatusCode::kNotFound) << result.status();
  EXPECT_EQ(fake_.observed().aborts, 1);
  EXPECT_EQ(fake_.window(), window_);
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
  EXPECT_EQ(fake_.observed().aborts, 2);  // the trial's and this one's
  EXPECT_EQ(fake_.observed().commits, 0);
  ASSERT_TRUE(head_->FlushToFile({}, marks_, path).ok());
}

// Weights

std::vector<float> SomeWeights() {
  std::vector<float> weights;
  for (int64_t i = 0; i < kElements; ++i) weights.push_back(static_cast<float>(i) * 0.5F);
  return weights;
}

TEST_F(TransferTest, WrittenWeightsArriveAndGetAVersion) {
  const std::vector<float> weights = SomeWeights();
  const auto version = head_->WriteWeights(DataType::kFloat32, weights.data());
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(*version, 2U);
  EXPECT_EQ(fake_.weights(), weights);
}

TEST_F(TransferTest, CutWeightWriteIsSentAgain) {
  fake_.cut_weight_write = [](int message) { return message == 3 || message == 5; };
  const std::vector<float> weights = SomeWeights();
  const auto version = head_->WriteWeights(DataType::kFloat32, weights.data());
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(fake_.weights(), weights);
  EXPECT_EQ(fake_.observed().weight_write_streams, 3);
}

TEST_F(TransferTest, CutWeightReadResumesAndWidensHere) {
  fake_.set_weights(SomeWeights());
  fake_.on_weight_rows = [](int message) { return message == 2 ? RowFate::kCut : RowFate::kSend; };
  std::vector<float> weights(kElements);
  const auto version = head_->ReadWeights(DataType::kFloat32, weights.data());
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(*version, 1U);
  EXPECT_EQ(weights, SomeWeights());
}

TEST_F(TransferTest, WeightsThatChangeDuringAReadAreReadFromTheStart) {
  fake_.set_weights(SomeWeights());
  fake_.change_weights_on_cut = true;
  fake_.on_weight_rows = [](int message) { return message == 2 ? RowFate::kCut : RowFate::kSend; };
  std::vector<float> weights(kElements);
  const auto version = head_->ReadWeights(DataType::kFloat32, weights.data());
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(*version, 2U);
  EXPECT_EQ(weights, fake_.weights());
}

TEST_F(TransferTest, NullPointersAreRefused) {
  EXPECT_EQ(head_->WriteWeights(DataType::kFloat32, nullptr).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(head_->ReadWeights(DataType::kFloat32, nullptr).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(head_->Flush({}, {}, nullptr).status().code(), absl::StatusCode::kInvalidArgument);
}

// Heads with a bias

class BiasTransferTest : public TransferTest {
 protected:
  void SetUp() override {
    fake_.has_bias = true;
    TransferTest::SetUp();
  }
  // What the fake has for db once FillWindow was called.
  std::vector<float> ExpectedBiasGradient() const {
    std::vector<float> bias;
    for (int64_t row = 0; row < FakeServer::kVocab; ++row) {
      bias.push_back(window_[static_cast<size_t>(row * FakeServer::kHidden)] / 2);
    }
    return bias;
  }
  static std::vector<float> Ramp() {
    std::vector<float> values(FakeServer::kVocab);
    for (size_t i = 0; i < values.size(); ++i) values[i] = 0.5F + static_cast<float>(i);
    return values;
  }

  std::vector<float> bias_gradient_ = std::vector<float>(FakeServer::kVocab, -1.0F);
};

TEST_F(BiasTransferTest, WeightsAndBiasTravelTogetherThroughCuts) {
  std::vector<float> weights(kElements);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(i);
  fake_.cut_weight_write = [](int message) { return message == 1; };
  const auto written = head_->WriteWeights(DataType::kFloat32, weights.data(), Ramp());
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(fake_.weights(), weights);
  EXPECT_EQ(fake_.bias(), Ramp());
  fake_.on_weight_rows = [](int message) { return message == 1 ? RowFate::kCut : RowFate::kSend; };
  std::vector<float> read(kElements);
  std::vector<float> bias(FakeServer::kVocab);
  ASSERT_TRUE(head_->ReadWeights(DataType::kFloat32, read.data(), bias).ok());
  EXPECT_EQ(read, weights);
  EXPECT_EQ(bias, Ramp());
}

TEST_F(BiasTransferTest, FlushReadsTheGradientOfTheBiasToo) {
  FillWindow();
  fake_.on_gradient_rows = [](int message) { return message == 2 ? RowFate::kCut : RowFate::kSend; };
  const auto result = head_->Flush({}, marks_, gradient_.data(), bias_gradient_);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(gradient_, window_);
  EXPECT_EQ(bias_gradient_, ExpectedBiasGradient());
  EXPECT_EQ(result->bias_norm, 2.5);
}

TEST_F(BiasTransferTest, AWrongChecksumOfTheBiasReopensTheWindow) {
  FillWindow();
  fake_.corrupt_bias_gradient = true;
  const auto result = head_->Flush({.dtype = DataType::kBFloat16}, marks_, gradient_.data(), bias_gradient_);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDataLoss) << "the bias is fp32 whatever the rows are";
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("the bias's gradient"));
  EXPECT_EQ(fake_.generation(), 1U);
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
  EXPECT_THAT(bias->shape, ElementsAre(FakeServer::kVocab));
  std::memcpy(bias_gradient_.data(), bias->data.data(), bias->data.size());
  EXPECT_EQ(bias_gradient_, ExpectedBiasGradient());
  const auto weight = file->Find("lm_head.weight.grad");
  ASSERT_TRUE(weight.ok()) << weight.status();
  std::memcpy(gradient_.data(), weight->data.data(), weight->data.size());
  EXPECT_EQ(gradient_, window_);
}

TEST_F(BiasTransferTest, ABiasThatIsForgottenOrOfTheWrongSizeIsRefusedBeforeAnythingIsSent) {
  std::vector<float> weights(kElements);
  std::vector<float> few(FakeServer::kVocab - 1);
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
  EXPECT_EQ(fake_.observed().weight_write_streams, 0);
  EXPECT_TRUE(fake_.observed().flushes.empty());
}

TEST_F(TransferTest, ABiasForAHeadThatHasNoneIsRefused) {
  std::vector<float> weights(kElements);
  std::vector<float> bias(FakeServer::kVocab);
  for (const absl::Status& status : {
           head_->WriteWeights(DataType::kFloat32, weights.data(), bias).status(),
           head_->ReadWeights(DataType::kFloat32, weights.data(), bias).status(),
           head_->Flush({}, marks_, gradient_.data(), bias).status(),
       }) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("without a bias"));
  }
}

}  // namespace
}  // namespace lossd::transfer_test
