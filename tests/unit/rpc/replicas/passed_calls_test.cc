// Calls that come to one server and are served by another, as they are.
#include "server/rpc/replicas/passed_calls.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "lossd/v1/head.grpc.pb.h"
#include "server/engine/device/cpu/cpu_backend.h"
#include "server/engine/engine.h"
#include "server/rpc/calls/methods.h"
#include "server/rpc/services/head_service.h"
#include "server/rpc/services/row_stream_reactor.h"
#include "server/telemetry/common/service_counters.h"

namespace lossd::rpc {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kVocab = 300;
constexpr int64_t kHidden = 8;
constexpr int kMostPassed = 20;

// A coordinator with a head service, its control, and a replica that passes on, each a gRPC server.
class PassedCallsTest : public ::testing::Test {
 protected:
  PassedCallsTest() {
    grpc::ServerBuilder own;
    own.RegisterService(&heads_);
    coordinator_ = own.BuildAndStart();
    grpc::ServerBuilder control;
    int port = 0;
    control.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    control.RegisterService(&passes_);
    control_ = control.BuildAndStart();
    to_control_ = ChannelTo(port);
    grpc::ServerBuilder replica;
    replica.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    replica.RegisterCallbackGenericService(&passed_);
    replica_ = replica.BuildAndStart();
    stub_ = v1::HeadService::NewStub(ChannelTo(port));
    direct_ = v1::HeadService::NewStub(coordinator_->InProcessChannel({}));
    passes_.Open(coordinator_->InProcessChannel({}));
  }
  // Calls are over at all of them.
  ~PassedCallsTest() override {
    replica_->Shutdown();
    control_->Shutdown();
    coordinator_->Shutdown();
  }

  static std::shared_ptr<grpc::Channel> ChannelTo(int port) {
    return grpc::CreateChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials());
  }
  absl::StatusOr<CoordinatorCalls> Find() const {
    if (!found_.ok()) return found_;
    absl::StatusOr<std::shared_ptr<const void>> place = places_.Take();
    if (!place.ok()) return place.status();
    return CoordinatorCalls{
        .channel = to_control_,
        .identify = [this](grpc::ClientContext* context) { ShowToken({.token = shown_}, context); },
        .epoch = std::make_shared<EpochCalls>(),
        .place = *std::move(place)};
  }
  grpc::Status CreateHead() {
    v1::CreateHeadRequest request;
    request.mutable_config()->set_name("h");
    request.mutable_config()->set_vocab_size(kVocab);
    request.mutable_config()->set_hidden_size(kHidden);
    request.mutable_config()->set_weight_dtype(v1::DATA_TYPE_FLOAT32);
    grpc::ClientContext context;
    v1::Head head;
    return stub_->CreateHead(&context, request, &head);
  }

  std::string shown_ = "a secret of the replicas";
  absl::Status found_;
  mutable PassPlaces places_{kMostPassed};
  std::unique_ptr<engine::Engine> engine_ =
      *engine::Engine::Create({}, *engine::CreateCpuDevice(int64_t{1} << 20));
  telemetry::ServiceCounters counters_{MethodNames()};
  CallReports reports_{&counters_};
  HeadService heads_{engine_.get(), "", kRowMessageBytes};
  PassService passes_{{.token = "a secret of the replicas"}};
  PassedCalls passed_{[this] { return Find(); }, &reports_};
  std::shared_ptr<grpc::Channel> to_control_;
  std::unique_ptr<grpc::Server> coordinator_;
  std::unique_ptr<grpc::Server> control_;
  std::unique_ptr<grpc::Server> replica_;
  std::unique_ptr<v1::HeadService::Stub> stub_;
  std::unique_ptr<v1::HeadService::Stub> direct_;
};

TEST_F(PassedCallsTest, CallsOfEveryKindAreServedByTheCoordinator) {
  ASSERT_TRUE(CreateHead().ok());
  v1::BeginWriteRequest begin;
  begin.set_head("h");
  begin.set_write_key("k");
  v1::BeginWriteResponse begun;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(stub_->BeginWrite(&context, begin, &begun).ok());
  }
  std::vector<float> rows(kHidden);
  {
    grpc::ClientContext context;
    v1::WriteWeightsResponse written;
    auto writer = stub_->WriteWeights(&context, &written);
    for (int64_t row = 0; row < kVocab; ++row) {
      for (float& value : rows) value = static_cast<float>(row);
      v1::WriteWeightsRequest request;
      request.set_head("h");
      request.set_write_id(begun.write_id());
      request.set_first_row(row);
      request.set_rows(1);
      request.set_dtype(v1::DATA_TYPE_FLOAT32);
      request.set_weights(rows.data(), rows.size() * sizeof(float));
      ASSERT_TRUE(writer->Write(request));
    }
    writer->WritesDone();
    ASSERT_TRUE(writer->Finish().ok());
    EXPECT_EQ(written.rows_received(), kVocab);
  }
  {
    grpc::ClientContext context;
    v1::CommitWriteRequest commit;
    commit.set_head("h");
    commit.set_write_id(begun.write_id());
    v1::CommitWriteResponse committed;
    ASSERT_TRUE(stub_->CommitWrite(&context, commit, &committed).ok());
    EXPECT_EQ(committed.weight_version(), 1U);
  }
  grpc::ClientContext context;
  v1::ReadWeightsRequest read;
  read.set_head("h");
  auto reader = stub_->ReadWeights(&context, read);
  std::string all;
  v1::ReadWeightsResponse piece;
  while (reader->Read(&piece)) all += piece.weights();
  ASSERT_TRUE(reader->Finish().ok());
  ASSERT_EQ(all.size(), static_cast<size_t>(kVocab * kHidden) * sizeof(float));
  EXPECT_EQ(reinterpret_cast<const float*>(all.data())[299 * kHidden], 299.0F);
  // The call ends at the server a moment after its answer.
  while (counters_.rpcs.Find("HeadService/CommitWrite")->in_flight > 0) std::this_thread::yield();
}

TEST_F(PassedCallsTest, ErrorsAreTheCoordinatorsWithTheirDetails) {
  v1::GetHeadRequest request;
  request.set_name("nowhere");
  v1::Head head;
  grpc::ClientContext one;
  const grpc::Status passed = stub_->GetHead(&one, request, &head);
  grpc::ClientContext other;
  const grpc::Status direct = direct_->GetHead(&other, request, &head);
  EXPECT_EQ(passed.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(passed.error_message(), direct.error_message());
  EXPECT_EQ(passed.error_details(), direct.error_details());
}

// They would wait for those before them, which may never end.
TEST_F(PassedCallsTest, MoreThanThereArePlacesForAreRefusedUntilOthersEnd) {
  ASSERT_TRUE(CreateHead().ok());
  struct Write {
    grpc::ClientContext context;
    v1::WriteWeightsResponse response;
    std::unique_ptr<grpc::ClientWriter<v1::WriteWeightsRequest>> writer;
  };
  std::vector<Write> writes(kMostPassed);
  for (Write& write : writes) write.writer = stub_->WriteWeights(&write.context, &write.response);
  grpc::Status status;
  do {
    status = CreateHead();  // the first ones may come before the last write
  } while (status.ok());
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("20 calls are passed on"));
  for (Write& write : writes) write.context.TryCancel();
  for (Write& write : writes) write.writer->Finish();
  do {
    status = CreateHead();
  } while (!status.ok());
}

TEST_F(PassedCallsTest, WithoutACoordinatorCallsAreToldWhy) {
  found_ = absl::UnavailableError("not all replicas are there: replica 1 of 2 did not join");
  const grpc::Status status = CreateHead();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("replica 1 of 2"));
}

TEST_F(PassedCallsTest, ACoordinatorThatDoesNotServeIsUnavailable) {
  passes_.Close();
  EXPECT_EQ(CreateHead().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(PassedCallsTest, WhoDoesNotKnowTheSecretCallsNothing) {
  shown_ = "a secret of strangers";
  EXPECT_EQ(CreateHead().error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_TRUE(engine_->Heads().empty());
}

TEST_F(PassedCallsTest, OtherMethodsAreNotPassedOn) {
  grpc::ClientContext context;
  ShowToken({.token = shown_}, &context);
  context.AddMetadata("lossd-pass-method", "/lossd.v1.StatusService/Drain");
  group::v1::PassedMessage message;
  auto stream = group::v1::PassService::NewStub(to_control_)->Pass(&context);
  stream->Write(message);
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(PassedCallsTest, CallsThatAreGivenUpAtAnyTimeEndEverywhere) {
  ASSERT_TRUE(CreateHead().ok());
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < 4; ++thread) {
    threads.emplace_back([this, thread] {
      std::mt19937 random(thread);
      for (int i = 0; i < 100; ++i) {
        grpc::ClientContext context;
        context.set_deadline(std::chrono::system_clock::now() + std::chrono::microseconds(random() % 3000));
        v1::ListHeadsRequest request;
        v1::ListHeadsResponse response;
        (void)stub_->ListHeads(&context, request, &response);
        grpc::ClientContext writing;
        v1::WriteWeightsResponse written;
        auto writer = stub_->WriteWeights(&writing, &written);
        v1::WriteWeightsRequest rows;
        rows.set_head("h");
        rows.set_weights(std::string(10000, 'x'));
        if (random() % 2 == 0) writer->Write(rows);
        writing.TryCancel();
        (void)writer->Finish();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE([this] {
    while (counters_.rpcs.Find("HeadService/WriteWeights")->in_flight > 0) std::this_thread::yield();
    return true;
  }());
}

}  // namespace
}  // namespace lossd::rpc
