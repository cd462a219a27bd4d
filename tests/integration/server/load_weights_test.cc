// LoadWeights: what is published is what the file holds, whole or not at all, and nothing outside the folder
// is ever looked at.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "proto/safetensors/safetensors.h"
#include "server/engine/checkpoint/checkpoint_store.h"
#include "server/rpc/services/weight_loader.h"
#include "tests/support/test_server.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/checkpoint/checkpoint_folder.h"

namespace lossd::testing::load_weights_test {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

constexpr int64_t kVocab = 61;
constexpr int64_t kHidden = 20;
constexpr char kWeight[] = "lm_head.weight";

struct Tensor {
  SafetensorsTensor header;
  std::string bytes;
};

Tensor Floats(const std::string& name, std::vector<int64_t> shape, const std::vector<float>& values) {
  return {{.name = name, .dtype = SafetensorsType::kFloat32, .shape = std::move(shape)},
          {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)}};
}

class LoadWeightsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = fs::temp_directory_path() / "load_weights_test.XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    TestServerOptions options;
    options.server.weights_dir = folder_;
    Start(options);
  }
  void TearDown() override {
    server_.reset();
    fs::remove_all(folder_);
  }
  void Start(const TestServerOptions& options) {
    server_ = std::make_unique<TestServer>(options);
    stubs_ = std::make_unique<Stubs>(server_->Channel());
  }

  void Create(const std::string& name, int64_t vocab = kVocab, int64_t hidden = kHidden,
              v1::DataType type = v1::DATA_TYPE_FLOAT32, bool bias = false) {
    v1::CreateHeadRequest request;
    request.mutable_config()->set_name(name);
    request.mutable_config()->set_vocab_size(vocab);
    request.mutable_config()->set_hidden_size(hidden);
    request.mutable_config()->set_weight_dtype(type);
    request.mutable_config()->set_bias(bias);
    v1::Head head;
    grpc::ClientContext context;
    ASSERT_TRUE(stubs_->heads->CreateHead(&context, request, &head).ok());
  }

  void WriteFile(const std::string& name, const std::vector<Tensor>& tensors) const {
    std::vector<SafetensorsTensor> headers;
    for (const Tensor& tensor : tensors) headers.push_back(tensor.header);
    auto writer = SafetensorsWriter::Create(folder_ / name, headers);
    ASSERT_TRUE(writer.ok()) << writer.status();
    for (const Tensor& tensor : tensors) {
      ASSERT_TRUE(writer->Append(std::as_bytes(std::span(tensor.bytes))).ok());
    }
    ASSERT_TRUE(writer->Finish().ok());
  }

  struct Answer {
    grpc::Status status;
    v1::LoadWeightsResponse response;
  };
  Answer Load(const std::string& head, const std::string& path, const std::string& tensor = "",
              const std::string& bias = "") {
    v1::LoadWeightsRequest request;
    request.set_head(head);
    request.set_path(path);
    request.set_tensor(tensor);
    request.set_bias_tensor(bias);
    Answer answer;
    grpc::ClientContext context;
    answer.status = stubs_->heads->LoadWeights(&context, request, &answer.response);
    return answer;
  }

  // The head's weights in fp32, and its bias behind them.
  std::vector<float> Read(const std::string& head) {
    v1::ReadWeightsRequest request;
    request.set_head(head);
    request.set_dtype(v1::DATA_TYPE_FLOAT32);
    grpc::ClientContext context;
    auto reader = stubs_->heads->ReadWeights(&context, request);
    std::string weights;
    std::string bias;
    v1::ReadWeightsResponse piece;
    while (reader->Read(&piece)) {
      weights += piece.weights();
      bias += piece.bias();
    }
    EXPECT_TRUE(reader->Finish().ok());
    weights += bias;
    std::vector<float> values(weights.size() / sizeof(float));
    std::memcpy(values.data(), weights.data(), weights.size());
    return values;
  }

  grpc::Status BeginWrite(const std::string& head, const std::string& key) {
    v1::BeginWriteRequest request;
    request.set_head(head);
    request.set_write_key(key);
    v1::BeginWriteResponse response;
    grpc::ClientContext context;
    return stubs_->heads->BeginWrite(&context, request, &response);
  }

  fs::path folder_;
  std::unique_ptr<TestServer> server_;
  std::unique_ptr<Stubs> stubs_;
};

TEST_F(LoadWeightsTest, WhatTheFileHoldsIsPublishedAsANewVersion) {
  const std::vector<float> weights = RandomFloats(kVocab * kHidden, 1);
  WriteFile("model.safetensors",
            {Floats("other", {3}, {1, 2, 3}), Floats(kWeight, {kVocab, kHidden}, weights)});
  CreateHead(*stubs_, "head", kVocab, kHidden);
  const Answer answer = Load("head", "model.safetensors");
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_EQ(answer.response.weight_version(), 2U);
  EXPECT_EQ(answer.response.tensor(), kWeight);
  EXPECT_EQ(Read("head"), weights);
  EXPECT_EQ(GetHead(*stubs_, "head").staged_rows(), 0);
  EXPECT_EQ(Load("head", ".").response.weight_version(), 3U) << "the folder with that one file";
}

TEST_F(LoadWeightsTest, ValuesAreRoundedToTheHeadsTypeAndABiasComesAlong) {
  const std::vector<float> weights = RandomFloats(kVocab * kHidden, 2);
  const std::vector<float> bias = RandomFloats(kVocab, 3);
  WriteFile("m", {Floats(kWeight, {kVocab, kHidden}, weights), Floats("lm_head.bias", {kVocab}, bias),
                  Floats("b", {kVocab}, RandomFloats(kVocab, 4))});
  Create("head", kVocab, kHidden, v1::DATA_TYPE_BFLOAT16, /*bias=*/true);
  ASSERT_TRUE(Load("head", "m").status.ok());
  std::vector<float> expected(weights.size());
  std::vector<uint16_t> narrow(weights.size());
  const auto count = static_cast<int64_t>(weights.size());
  kernels::Convert(kernels::DataType::kFloat32, weights.data(), kernels::DataType::kBFloat16, narrow.data(),
                   count);
  kernels::Convert(kernels::DataType::kBFloat16, narrow.data(), kernels::DataType::kFloat32, expected.data(),
                   count);
  expected.insert(expected.end(), bias.begin(), bias.end());
  EXPECT_EQ(Read("head"), expected);
  ASSERT_TRUE(Load("head", "m", "", "b").status.ok());
  EXPECT_EQ(Read("head").back(), RandomFloats(kVocab, 4).back());
}

TEST_F(LoadWeightsTest, AnFp32MasterTakesTheFilesValuesAsTheyAre) {
  const std::vector<float> fine(kVocab * kHidden, 1.0F + 1.0F / 4096);  // 1 in bf16
  WriteFile("m", {Floats(kWeight, {kVocab, kHidden}, fine)});
  v1::CreateHeadRequest request;
  request.mutable_config()->set_name("head");
  request.mutable_config()->set_vocab_size(kVocab);
  request.mutable_config()->set_hidden_size(kHidden);
  request.mutable_config()->set_weight_dtype(v1::DATA_TYPE_BFLOAT16);
  request.mutable_config()->set_master_weights(true);
  v1::Head head;
  grpc::ClientContext context;
  ASSERT_TRUE(stubs_->heads->CreateHead(&context, request, &head).ok());
  ASSERT_TRUE(Load("head", "m").status.ok());
  EXPECT_EQ(Read("head"), fine);
}

TEST_F(LoadWeightsTest, ASixteenBitBiasIsWidened) {
  std::vector<uint16_t> ones(kVocab, 0x3f80);  // 1.0 in bf16
  Tensor bias{{.name = "lm_head.bias", .dtype = SafetensorsType::kBFloat16, .shape = {kVocab}},
              {reinterpret_cast<const char*>(ones.data()), ones.size() * 2}};
  WriteFile("m", {Floats(kWeight, {kVocab, kHidden}, RandomFloats(kVocab * kHidden, 2)), bias});
  Create("head", kVocab, kHidden, v1::DATA_TYPE_FLOAT32, /*bias=*/true);
  ASSERT_TRUE(Load("head", "m").status.ok());
  EXPECT_EQ(Read("head").back(), 1.0F);
}

TEST_F(LoadWeightsTest, ATensorIsFoundInTheShardThatAnIndexNames) {
  fs::create_directory(folder_ / "model");
  const std::vector<float> weights = RandomFloats(kVocab * kHidden, 5);
  WriteFile("model/one", {Floats("a", {1}, {1})});
  WriteFile("model/two", {Floats(kWeight, {kVocab, kHidden}, weights)});
  std::ofstream(folder_ / "model" / "model.safetensors.index.json")
      << R"({"metadata":{},"weight_map":{"a":"one","lm_head.weight":"two"}})";
  Create("head");
  ASSERT_TRUE(Load("head", "model").status.ok());
  EXPECT_EQ(Read("head"), weights);
}

TEST_F(LoadWeightsTest, WithoutANameTheOnlyTensorOfTheShapeIsTaken) {
  const std::vector<float> weights = RandomFloats(kVocab * kHidden, 6);
  WriteFile("tied",
            {Floats("wte.weight", {kVocab, kHidden}, weights), Floats("x", {kHidden, kVocab}, weights)});
  Create("head");
  const Answer tied = Load("head", "tied");
  ASSERT_TRUE(tied.status.ok()) << tied.status.error_message();
  EXPECT_EQ(tied.response.tensor(), "wte.weight");
  EXPECT_EQ(Read("head"), weights);

  WriteFile("two", {Floats("a", {kVocab, kHidden}, weights), Floats("b", {kVocab, kHidden}, weights)});
  const Answer two = Load("head", "two");
  EXPECT_EQ(two.status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(two.status.error_message(), HasSubstr("a, b"));
  EXPECT_EQ(Load("head", "two", "b").response.weight_version(), 2U);
}

// Bad input: nothing changes

TEST_F(LoadWeightsTest, WhatCannotBeLoadedIsRefusedAndTheWeightsStay) {
  CreateHead(*stubs_, "head", kVocab, kHidden);
  const std::vector<float> before = Read("head");
  const std::vector<float> weights = RandomFloats(kVocab * kHidden, 7);
  WriteFile("good",
            {Floats(kWeight, {kVocab, kHidden}, weights), Floats("v", {kVocab}, RandomFloats(kVocab, 1))});
  WriteFile("turned", {Floats(kWeight, {kHidden, kVocab}, weights)});
  WriteFile("none", {});
  fs::copy_file(folder_ / "good", folder_ / "short");
  fs::resize_file(folder_ / "short", fs::file_size(folder_ / "good") - 1);
  std::ofstream(folder_ / "lies", std::ios::binary) << std::string("\xff\xff\xff\xff\xff\xff\xff\x7f{}", 10);
  const std::string ids = R"({"lm_head.weight":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}})";
  const uint64_t size = ids.size();
  std::ofstream(folder_ / "ids", std::ios::binary)
      << std::string(reinterpret_cast<const char*>(&size), 8) << ids << std::string(8, '\0');
  fs::create_directory(folder_ / "empty");
  fs::create_symlink("/etc/hostname", folder_ / "out");

  using grpc::StatusCode;
  struct Case {
    const char* head;
    std::string path;
    std::string tensor;
    StatusCode code;
    const char* message;
  };
  const std::vector<Case> cases = {
      {"nobody", "good", "", StatusCode::NOT_FOUND, "nobody"},
      {"head", "", "", StatusCode::INVALID_ARGUMENT, "relative"},
      {"head", "../" + folder_.filename().string() + "/good", "", StatusCode::INVALID_ARGUMENT, "relative"},
      {"head", (folder_ / "good").string(), "", StatusCode::INVALID_ARGUMENT, "relative"},
      {"head", "out", "", StatusCode::PERMISSION_DENIED, "leads out"},
      {"head", "absent", "", StatusCode::NOT_FOUND, "absent"},
      {"head", "empty", "", StatusCode::NOT_FOUND, "neither"},
      {"head", "short", "", StatusCode::INVALID_ARGUMENT, "truncated"},
      {"head", "lies", "", StatusCode::INVALID_ARGUMENT, "claims"},
      {"head", "ids", "", StatusCode::INVALID_ARGUMENT, "I64"},
      {"head", "none", "", StatusCode::NOT_FOUND, "nor one of [61, 20]"},
      {"head", "turned", "", StatusCode::INVALID_ARGUMENT, "is [20, 61]; head 'head' needs [61, 20]"},
      {"head", "good", "v", StatusCode::INVALID_ARGUMENT, "is [61]"},
      {"head", "good", "w", StatusCode::NOT_FOUND, "it has lm_head.weight, v"},
      {"head", std::string(5000, 'x'), "", StatusCode::INVALID_ARGUMENT, "path has 5000 bytes"},
      {"head", "good", std::string(5000, 'x'), StatusCode::INVALID_ARGUMENT, "tensor has 5000 bytes"},
  };
  for (const Case& wrong : cases) {
    SCOPED_TRACE(wrong.path.substr(0, 50) + " " + wrong.tensor.substr(0, 50));
    const Answer answer = Load(wrong.head, wrong.path, wrong.tensor);
    EXPECT_EQ(answer.status.error_code(), wrong.code) << answer.status.error_message();
    EXPECT_THAT(answer.status.error_message(), HasSubstr(wrong.message));
  }
  Create("biased", kVocab, kHidden, v1::DATA_TYPE_FLOAT32, /*bias=*/true);
  EXPECT_EQ(Load("biased", "good").status.error_code(), StatusCode::NOT_FOUND);
  EXPECT_EQ(Load("biased", "good", "", kWeight).status.error_code(), StatusCode::INVALID_ARGUMENT);

  EXPECT_EQ(Read("head"), before);
  EXPECT_EQ(GetHead(*stubs_, "head").weight_version(), 1U);
  EXPECT_TRUE(BeginWrite("head", "free").ok()) << "a load that failed is in the way";
  EXPECT_GE(server_->rejected(engine::RejectReason::kWeightWrite), 15U);
}

TEST_F(LoadWeightsTest, ABiasThatIsNotFiniteIsRefused) {
  std::vector<float> bias(kVocab, 0.0F);
  bias[60] = std::numeric_limits<float>::infinity();
  WriteFile("m", {Floats(kWeight, {kVocab, kHidden}, RandomFloats(kVocab * kHidden, 2)),
                  Floats("lm_head.bias", {kVocab}, bias)});
  Create("head", kVocab, kHidden, v1::DATA_TYPE_FLOAT32, /*bias=*/true);
  EXPECT_EQ(Load("head", "m").status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(GetHead(*stubs_, "head").weight_version(), 0U);
  EXPECT_TRUE(BeginWrite("head", "free").ok());
}

TEST_F(LoadWeightsTest, AWeightThatTheHeadCannotHoldIsRefused) {
  std::vector<float> weights = RandomFloats(kVocab * kHidden, 2);
  weights[60 * kHidden + 3] = 70000;
  WriteFile("m", {Floats(kWeight, {kVocab, kHidden}, weights)});
  Create("head", kVocab, kHidden, v1::DATA_TYPE_FLOAT16);
  const auto loaded = Load("head", "m");
  EXPECT_EQ(loaded.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(loaded.status.error_message(), HasSubstr("weights[60, 3] is 70000"));
  EXPECT_TRUE(BeginWrite("head", "free").ok());
}

TEST_F(LoadWeightsTest, AServerWithoutAFolderLoadsNothing) {
  Start({});
  Create("head");
  const Answer answer = Load("head", "m");
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(answer.status.error_message(), HasSubstr("--weights_dir"));
}

TEST_F(LoadWeightsTest, AWriteThatNobodyFinishedIsDroppedAndItsWriterToldSo) {
  const std::vector<float> weights = RandomFloats(kVocab * kHidden, 2);
  WriteFile("m", {Floats(kWeight, {kVocab, kHidden}, weights)});
  Create("head");
  v1::BeginWriteRequest begin;
  begin.set_head("head");
  begin.set_write_key("mine");
  v1::BeginWriteResponse begun;
  grpc::ClientContext beginning;
  ASSERT_TRUE(stubs_->heads->BeginWrite(&beginning, begin, &begun).ok());
  const Answer answer = Load("head", "m");
  EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
  v1::CommitWriteRequest commit;
  commit.set_head("head");
  commit.set_write_id(begun.write_id());
  v1::CommitWriteResponse committed;
  grpc::ClientContext committing;
  const grpc::Status dropped = stubs_->heads->CommitWrite(&committing, commit, &committed);
  EXPECT_EQ(dropped.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(dropped.error_message(), HasSubstr("load that began since has dropped it"));
  EXPECT_EQ(Read("head"), weights);
}

// What happens in the middle of a load

class LoadUnderWay : public LoadWeightsTest {
 protected:
  static constexpr int64_t kRows = 6144;  // three pieces
  static constexpr int64_t kColumns = 1024;

  void SetUp() override {
    LoadWeightsTest::SetUp();
    const std::vector<float> weights(kRows * kColumns, 0.5F);
    WriteFile("large", {Floats(kWeight, {kRows, kColumns}, weights)});
    CreateHead(*stubs_, "head", kRows, kColumns);
  }

  // With `event` before the second piece; it says whether the client has gone.
  absl::Status LoadWith(const std::function<bool()>& event) {
    const rpc::WeightLoader loader(&server_->engine(), folder_);
    int piece = 0;
    rows_before_event_ = -1;
    return loader
        .Load({.head = "head", .path = "large", .tensor = {}, .bias_tensor = {}},
              [&] {
                if (++piece != 2) return false;
                rows_before_event_ = GetHead(*stubs_, "head").staged_rows();
                return event();
              })
        .status();
  }

  int64_t rows_before_event_ = -1;
};

TEST_F(LoadUnderWay, ACancelledOneStopsAndLeavesNothing) {
  const absl::Status status = LoadWith([] { return true; });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  EXPECT_EQ(rows_before_event_, kRows / 3) << "GetHead tells how far it is";
  EXPECT_EQ(GetHead(*stubs_, "head").weight_version(), 1U);
  EXPECT_EQ(GetHead(*stubs_, "head").staged_rows(), 0);
  EXPECT_TRUE(BeginWrite("head", "free").ok());
}

TEST_F(LoadUnderWay, AClientThatGoesAwayLeavesNothing) {
  v1::LoadWeightsRequest request;
  request.set_head("head");
  request.set_path("large");
  {
    grpc::ClientContext context;
    v1::LoadWeightsResponse response;
    std::thread cancel([&context] { context.TryCancel(); });
    stubs_->heads->LoadWeights(&context, request, &response);  // whichever came first
    cancel.join();
  }
  Await("the load to leave the head", [this] { return BeginWrite("head", "free").ok(); });
  EXPECT_EQ(GetHead(*stubs_, "head").staged_rows(), 0);
}

TEST_F(LoadUnderWay, AFileThatIsShortenedIsDataLossAndTheServerServesOn) {
  const std::vector<float> before = Read("head");
  const absl::Status status = LoadWith([this] {
    fs::resize_file(folder_ / "large", 4096);
    return false;
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_EQ(Read("head"), before);
  EXPECT_TRUE(BeginWrite("head", "free").ok());
}

TEST_F(LoadUnderWay, OneThatIsReplacedSaysSo) {
  const absl::Status status = LoadWith([this] {
    v1::BeginWriteRequest request;
    request.set_head("head");
    request.set_write_key("mine");
    request.set_replace(true);
    v1::BeginWriteResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(stubs_->heads->BeginWrite(&context, request, &response).ok());
    return false;
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("load them again"));
  EXPECT_FALSE(BeginWrite("head", "another").ok()) << "the write that replaced it was given up with it";
}

TEST_F(LoadUnderWay, ADeletedHeadEndsIt) {
  const absl::Status status = LoadWith([this] {
    v1::DeleteHeadRequest request;
    request.set_name("head");
    v1::DeleteHeadResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(stubs_->heads->DeleteHead(&context, request, &response).ok());
    return false;
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("was deleted"));
}

TEST_F(LoadUnderWay, ARestoreUndoesIt) {
  engine::CheckpointFolder checkpoints;
  TestServerOptions options;
  options.server.weights_dir = folder_;
  options.engine.checkpoints = *engine::CheckpointStore::Open(checkpoints.path());
  Start(options);
  CreateHead(*stubs_, "head", kRows, kColumns);
  v1::SaveCheckpointRequest save;
  save.set_head("head");
  save.set_tag("a");
  v1::SaveCheckpointResponse saved;
  grpc::ClientContext save_context;
  ASSERT_TRUE(stubs_->heads->SaveCheckpoint(&save_context, save, &saved).ok());
  const std::vector<float> before = Read("head");
  const absl::Status status = LoadWith([this] {
    v1::RestoreCheckpointRequest request;
    request.set_head("head");
    v1::RestoreCheckpointResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(stubs_->heads->RestoreCheckpoint(&context, request, &response).ok());
    return false;
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("restored from a checkpoint since it began"));
  EXPECT_EQ(Read("head"), before);
  EXPECT_TRUE(BeginWrite("head", "free").ok()) << "it is still in the way";
  server_.reset();  // before its folder goes
}

TEST_F(LoadUnderWay, ADrainEndsIt) {
  const absl::Status status = LoadWith([this] {
    server_->engine().BeginDrain();
    return false;
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
}

}  // namespace
}  // namespace lossd::testing::load_weights_test
