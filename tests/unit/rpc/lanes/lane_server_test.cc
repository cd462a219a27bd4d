// A rank's server of lanes, between a client and a leader that does what a test says.
#include "server/rpc/lanes/lane_server.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "lossd/group/v1/relay.grpc.pb.h"
#include "lossd/v1/head.grpc.pb.h"
#include "lossd/v1/loss.grpc.pb.h"
#include "server/rpc/calls/methods.h"
#include "server/telemetry/common/service_counters.h"
#include "tests/support/wait.h"

namespace lossd::rpc::lane_server_test {
namespace {

using grpc::StatusCode;

constexpr int64_t kTokens = 4;
constexpr int64_t kHidden = 2;

class FakeLeader final : public group::v1::RelayService::Service {
 public:
  using Stream = grpc::ServerReaderWriter<v1::ComputeResponse, group::v1::RelayRequest>;

  FakeLeader() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~FakeLeader() override { server_->Shutdown(std::chrono::system_clock::now()); }

  std::shared_ptr<grpc::Channel> Channel() const {
    return grpc::CreateChannel("127.0.0.1:" + std::to_string(port_), grpc::InsecureChannelCredentials());
  }

  grpc::Status Relay(grpc::ServerContext* context, Stream* stream) override {
    for (const auto& [name, value] : context->client_metadata()) {
      if (name == "traceparent") traceparent_ = std::string(value.data(), value.size());
    }
    return serve(stream);
  }
  grpc::Status Settle(
      grpc::ServerContext* /*context*/,
      grpc::ServerReaderWriter<group::v1::SettleResponse, group::v1::SettleRequest>* stream) override {
    group::v1::SettleRequest request;
    if (!stream->Read(&request)) return grpc::Status::CANCELLED;
    settled_relay_ = request.relay().relay();
    group::v1::SettleResponse response;
    response.set_last_payload(known);
    stream->Write(response);
    ++settled_;
    return grpc::Status::OK;
  }

  // Reads the next one.
  static group::v1::RelayRequest Next(Stream* stream) {
    group::v1::RelayRequest request;
    stream->Read(&request);
    return request;
  }
  static void SayReady(Stream* stream) {
    Next(stream);
    v1::ComputeResponse response;
    response.mutable_ready();
    stream->Write(response);
  }
  static void Answer(Stream* stream, const v1::Chunk& chunk, v1::Disposition disposition) {
    v1::ComputeResponse response;
    response.mutable_result()->set_sequence(chunk.sequence());
    response.mutable_result()->set_disposition(disposition);
    response.mutable_result()->set_losses(std::string(4 * kTokens, 'l'));
    stream->Write(response);
  }

  std::function<grpc::Status(Stream*)> serve;
  uint64_t known = 0;  // the last payload, as Settle tells it
  int settled() const { return settled_; }
  uint64_t settled_relay() const { return settled_relay_; }
  const std::string& traceparent() const { return traceparent_; }

 private:
  int port_ = 0;
  std::atomic<int> settled_ = 0;
  std::atomic<uint64_t> settled_relay_ = 0;
  std::string traceparent_;
  std::unique_ptr<grpc::Server> server_;
};

v1::Chunk ChunkOf(const group::v1::RelayRequest& request) {
  v1::ComputeRequest inner;
  EXPECT_TRUE(inner.ParseFromString(request.request()));
  return inner.chunk();
}

class LaneServerTest : public ::testing::Test {
 protected:
  using ClientStream = grpc::ClientReaderWriter<v1::ComputeRequest, v1::ComputeResponse>;

  void SetUp() override {
    LaneServerOptions options{.listen = "127.0.0.1:0", .leader_place = "the leader there"};
    options.counters = &counters_;
    options.lane_credit_bytes = 4096;
    auto server = LaneServer::Open(options);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    server_->Serve(
        [](engine::Payload payload) { return payload; }, &payloads_,
        {.channel = leader_.Channel(), .identify = [](grpc::ClientContext*) {}, .epoch = 3, .rank = 2});
    channel_ = grpc::CreateChannel("127.0.0.1:" + std::to_string(server_->port()),
                                   grpc::InsecureChannelCredentials());
  }
  void TearDown() override { server_.reset(); }

  std::unique_ptr<ClientStream> Open(grpc::ClientContext* context) {
    auto stream = v1::LossService::NewStub(channel_)->Compute(context);
    v1::ComputeRequest start;
    start.mutable_start()->set_session_id("s");
    stream->Write(start);
    return stream;
  }
  static v1::ComputeRequest Chunk(uint64_t sequence) {
    v1::ComputeRequest request;
    v1::Chunk& chunk = *request.mutable_chunk();
    chunk.set_sequence(sequence);
    chunk.set_tokens(kTokens);
    chunk.set_hidden_dtype(v1::DATA_TYPE_FLOAT32);
    chunk.set_labels(std::string(8 * kTokens, '\0'));
    chunk.set_hidden_states(std::string(4 * kTokens * kHidden, '\0'));
    return request;
  }
  static grpc::Status End(ClientStream* stream) {
    v1::ComputeResponse response;
    while (stream->Read(&response)) {
    }
    return stream->Finish();
  }
  void AwaitPayloads(int64_t count) const {
    while (payloads_.count() != count) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }

  telemetry::ServiceCounters counters_{MethodNames()};
  void AwaitGate() {
    lossd::testing::Await("the gate to open", [this] { return gate_.try_wait(); });
  }

  std::latch gate_{1};  // that a leader may wait for
  FakeLeader leader_;
  engine::RankPayloads payloads_;
  std::unique_ptr<LaneServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(LaneServerTest, HiddenStatesStayAndDxIsPutIntoTheAnswer) {
  leader_.serve = [this](FakeLeader::Stream* stream) {
    const auto hello = FakeLeader::Next(stream);
    EXPECT_EQ(hello.hello().epoch(), 3);
    EXPECT_EQ(hello.hello().rank(), 2);
    EXPECT_GT(hello.hello().relay(), 0U);
    v1::ComputeResponse ready;
    ready.mutable_ready();
    stream->Write(ready);
    const auto request = FakeLeader::Next(stream);
    EXPECT_FALSE(request.has_hello());
    EXPECT_EQ(request.hidden_states().bytes(), 4 * kTokens * kHidden);
    const v1::Chunk chunk = ChunkOf(request);
    EXPECT_EQ(chunk.labels().size(), 8U * kTokens);
    EXPECT_EQ(chunk.hidden_states(), "");
    const auto payload = payloads_.Find(request.payload());
    EXPECT_EQ(payload->hidden_states().size(), 4 * kTokens * kHidden);
    engine::ResultBytes dx(3);
    std::memcpy(dx.data(), "dX!", 3);
    payload->Answer(dx);
    FakeLeader::Answer(stream, chunk, v1::DISPOSITION_ACCUMULATED);
    payloads_.Release(request.payload());
    leader_.known = request.payload();
    EXPECT_FALSE(stream->Read(std::make_unique<group::v1::RelayRequest>().get()));
    return grpc::Status::OK;
  };
  grpc::ClientContext context;
  context.AddMetadata("traceparent", "00-trace");
  const auto stream = Open(&context);
  v1::ComputeResponse response;
  ASSERT_TRUE(stream->Read(&response));
  stream->Write(Chunk(1));
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.result().losses(), std::string(4 * kTokens, 'l'));
  EXPECT_EQ(response.result().dx(), "dX!");
  stream->WritesDone();
  EXPECT_TRUE(End(stream.get()).ok());
  EXPECT_EQ(leader_.traceparent(), "00-trace");
  AwaitPayloads(0);
}

TEST_F(LaneServerTest, WhatTheLeaderNeverHeardOfIsReleasedAndNothingElse) {
  leader_.serve = [&](FakeLeader::Stream* stream) {
    FakeLeader::SayReady(stream);
    leader_.known = FakeLeader::Next(stream).payload();
    FakeLeader::Next(stream);  // which it forgets
    AwaitGate();
    return grpc::Status::OK;
  };
  grpc::ClientContext context;
  const auto stream = Open(&context);
  v1::ComputeResponse response;
  ASSERT_TRUE(stream->Read(&response));
  stream->Write(Chunk(1));
  stream->Write(Chunk(2));
  stream->Write(Chunk(3));
  AwaitPayloads(3);
  context.TryCancel();
  EXPECT_EQ(End(stream.get()).error_code(), StatusCode::CANCELLED);
  gate_.count_down();
  AwaitPayloads(1);
  EXPECT_EQ(leader_.settled(), 1);
  EXPECT_NE(payloads_.Find(leader_.known), nullptr) << "this is the leader's to release";
}

TEST_F(LaneServerTest, NothingIsTakenBeforeTheLeaderIsReady) {
  leader_.serve = [&](FakeLeader::Stream* /*stream*/) -> grpc::Status {
    AwaitGate();
    return {StatusCode::FAILED_PRECONDITION, "no"};
  };
  grpc::ClientContext context;
  const auto stream = Open(&context);
  stream->Write(Chunk(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // in which it might have come
  EXPECT_EQ(payloads_.count(), 0);
  gate_.count_down();
  const grpc::Status status = End(stream.get());
  EXPECT_EQ(status.error_code(), StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(status.error_message(), "no");
  EXPECT_EQ(leader_.settled(), 0) << "there was nothing to settle";
}

TEST_F(LaneServerTest, AFullCreditWaitsForAnswers) {
  constexpr int kChunks = 200;
  int64_t most = 0;
  leader_.serve = [&](FakeLeader::Stream* stream) {
    FakeLeader::SayReady(stream);
    for (int i = 0; i < kChunks; ++i) {
      const auto request = FakeLeader::Next(stream);
      if (i == 50) std::this_thread::sleep_for(std::chrono::milliseconds(50));  // others may come
      most = std::max(most, payloads_.count());
      leader_.known = request.payload();
      FakeLeader::Answer(stream, ChunkOf(request), v1::DISPOSITION_REJECTED);
      payloads_.Release(request.payload());
    }
    return grpc::Status::OK;
  };
  grpc::ClientContext context;
  const auto stream = Open(&context);
  std::thread writing([&] {
    for (int i = 1; i <= kChunks; ++i) stream->Write(Chunk(static_cast<uint64_t>(i)));
  });
  int answers = 0;
  for (v1::ComputeResponse response; stream->Read(&response);) answers += response.has_result() ? 1 : 0;
  writing.join();
  EXPECT_EQ(answers, kChunks);
  EXPECT_TRUE(stream->Finish().ok());
  // 4096 bytes of credit; a chunk has some 100, and memory that gRPC keeps for it.
  EXPECT_LE(most, 42);
  EXPECT_GE(most, 1);
}

TEST_F(LaneServerTest, ALeaderThatBreaksOffIsToldAsUnavailable) {
  leader_.serve = [](FakeLeader::Stream* stream) {
    FakeLeader::SayReady(stream);
    return grpc::Status(StatusCode::CANCELLED, "away");
  };
  grpc::ClientContext context;
  const auto stream = Open(&context);
  EXPECT_EQ(End(stream.get()).error_code(), StatusCode::UNAVAILABLE);
}

TEST_F(LaneServerTest, TheLeadersStatusIsTheClients) {
  leader_.serve = [](FakeLeader::Stream* stream) {
    FakeLeader::SayReady(stream);
    return grpc::Status(StatusCode::ABORTED, "another stream took the lane", "details");
  };
  grpc::ClientContext context;
  const auto stream = Open(&context);
  const grpc::Status status = End(stream.get());
  EXPECT_EQ(status.error_code(), StatusCode::ABORTED);
  EXPECT_EQ(status.error_message(), "another stream took the lane");
  EXPECT_EQ(status.error_details(), "details");
}

TEST_F(LaneServerTest, ADrainWaitsForStreamsAndThenTakesNone) {
  leader_.serve = [](FakeLeader::Stream* stream) {
    FakeLeader::SayReady(stream);
    return grpc::Status(StatusCode::UNAVAILABLE, "the leader drains");
  };
  grpc::ClientContext context;
  const auto stream = Open(&context);
  v1::ComputeResponse response;
  ASSERT_TRUE(stream->Read(&response));
  server_->Drain(absl::Minutes(10));
  const grpc::Status status = End(stream.get());
  EXPECT_EQ(status.error_message(), "the leader drains");
}

TEST_F(LaneServerTest, ADrainWithoutPatienceCutsWhatIsLeft) {
  leader_.serve = [&](FakeLeader::Stream* stream) {
    FakeLeader::SayReady(stream);
    leader_.known = FakeLeader::Next(stream).payload();
    AwaitGate();
    return grpc::Status::OK;
  };
  grpc::ClientContext context;
  const auto stream = Open(&context);
  v1::ComputeResponse response;
  ASSERT_TRUE(stream->Read(&response));
  stream->Write(Chunk(1));
  AwaitPayloads(1);
  server_->Drain(absl::ZeroDuration());
  EXPECT_FALSE(End(stream.get()).ok());
  gate_.count_down();
}

TEST_F(LaneServerTest, OtherCallsAreSentToTheLeader) {
  grpc::ClientContext context;
  v1::ListHeadsResponse response;
  const grpc::Status status = v1::HeadService::NewStub(channel_)->ListHeads(&context, {}, &response);
  EXPECT_EQ(status.error_code(), StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(status.error_message(), "rank 2 of a group takes Compute streams alone: call the leader there");
}

}  // namespace
}  // namespace lossd::rpc::lane_server_test
