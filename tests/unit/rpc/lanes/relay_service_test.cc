// The leader's end of relays, over real gRPC, with a real engine behind it: what ranks, and those who are
// none, may say to it. Nothing that is taken here is computed; that takes several processes
// (integration/lanes).
#include "server/rpc/lanes/relay_service.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "lossd/group/v1/relay.grpc.pb.h"
#include "server/engine/common/mutex.h"
#include "server/rpc/group/group_credentials.h"
#include "tests/support/test_server.h"
#include "tests/support/wait.h"

namespace lossd::rpc::relay_service_test {
namespace {

using grpc::StatusCode;

constexpr char kToken[] = "the token of this epoch";
constexpr int64_t kVocab = 8;
constexpr int64_t kHidden = 4;

// Remembers what the leader has ranks do.
class Ranks final : public engine::RankChannel {
 public:
  void Send(engine::GroupCommand /*command*/) override {}
  absl::Status Ask(engine::GroupCommand /*command*/) override { return absl::OkStatus(); }
  void SendTo(int32_t rank, engine::GroupCommand command) override {
    const engine::MutexLock lock(mutex_);
    released_.emplace_back(rank, std::get<engine::ReleasePayloadCommand>(command).payload);
    changed_.NotifyAll();
  }
  std::vector<engine::AnsweredChunk> TakeAnswered() override { return {}; }
  uint64_t BatchesApplied() const override { return 0; }
  engine::GroupReport Report() const override { return {}; }

  using Released = std::vector<std::pair<int32_t, uint64_t>>;
  Released AwaitReleased(size_t count) {
    const engine::MutexLock lock(mutex_);
    while (released_.size() < count) changed_.Wait(mutex_);
    return released_;
  }

 private:
  engine::Mutex mutex_;
  engine::CondVar changed_;
  Released released_ ABSL_GUARDED_BY(mutex_);
};

class RelayServiceTest : public ::testing::Test {
 protected:
  using Stream = grpc::ClientReaderWriter<group::v1::RelayRequest, v1::ComputeResponse>;
  using Stub = group::v1::RelayService::Stub;

  RelayServiceTest() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service_);
    control_ = builder.BuildAndStart();
    stub_ = group::v1::RelayService::NewStub(
        grpc::CreateChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials()));
  }
  ~RelayServiceTest() override {
    server_.reset();  // before the control of its group, as in the program
    control_->Shutdown(std::chrono::system_clock::now());
  }

  void Serve() {
    testing::TestServerOptions options;
    options.server.relays = &service_;
    options.server.group = {.ranks = ranks_, .epoch = 5, .count = 3};
    options.server.lanes = {RankLanes{.port = 77}, RankLanes{}};
    server_ = std::make_unique<testing::TestServer>(options);
    stubs_ = std::make_unique<testing::Stubs>(server_->Channel());
    testing::CreateHead(*stubs_, "h", kVocab, kHidden);
    session_ = testing::OpenSession(*stubs_, "h", "trainer");
  }

  std::unique_ptr<Stream> Relay(grpc::ClientContext* context, const std::string& token = kToken) {
    ShowToken({.token = token}, context);
    return stub_->Relay(context);
  }
  group::v1::RelayRequest Start(uint64_t relay = 1) const {
    v1::ComputeRequest start;
    start.mutable_start()->set_session_id(session_.session_id());
    start.mutable_start()->set_incarnation(session_.incarnation());
    group::v1::RelayRequest message;
    message.mutable_hello()->set_epoch(5);
    message.mutable_hello()->set_rank(2);
    message.mutable_hello()->set_relay(relay);
    message.set_request(start.SerializeAsString());
    return message;
  }
  // Non-finite, so that it is rejected before any device sees it.
  group::v1::RelayRequest Chunk(uint64_t sequence, uint64_t payload) const {
    v1::ComputeRequest request;
    *request.mutable_chunk() = testing::MakeChunk(sequence, session_.generation(), 2, kVocab, kHidden, 1);
    request.mutable_chunk()->clear_hidden_states();
    group::v1::RelayRequest message;
    message.set_request(request.SerializeAsString());
    message.set_payload(payload);
    message.mutable_hidden_states()->set_bytes(2 * kHidden * 4);
    message.mutable_hidden_states()->set_non_finite(3);
    return message;
  }
  static grpc::Status End(Stream* stream) {
    for (v1::ComputeResponse response; stream->Read(&response);) {
    }
    return stream->Finish();
  }
  grpc::Status Say(const std::vector<group::v1::RelayRequest>& messages) {
    grpc::ClientContext context;
    const auto stream = Relay(&context);
    for (const auto& message : messages) stream->Write(message);
    stream->WritesDone();
    return End(stream.get());
  }
  uint64_t Settle(uint64_t relay) {
    grpc::ClientContext context;
    ShowToken({.token = kToken}, &context);
    group::v1::SettleRequest request;
    request.mutable_relay()->set_epoch(5);
    request.mutable_relay()->set_rank(2);
    request.mutable_relay()->set_relay(relay);
    const auto stream = stub_->Settle(&context);
    stream->Write(request);
    stream->WritesDone();
    group::v1::SettleResponse response;
    stream->Read(&response);
    const grpc::Status status = stream->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.last_payload();
  }

  const std::shared_ptr<Ranks> ranks_ = std::make_shared<Ranks>();
  RelayService service_{[](const grpc::CallbackServerContext& context) {
    return ShowsToken({.token = kToken}, context) ? grpc::Status::OK
                                                  : grpc::Status(StatusCode::PERMISSION_DENIED, "no");
  }};
  std::unique_ptr<grpc::Server> control_;
  std::unique_ptr<Stub> stub_;
  std::unique_ptr<testing::TestServer> server_;
  std::unique_ptr<testing::Stubs> stubs_;
  v1::OpenSessionResponse session_;
};

TEST_F(RelayServiceTest, StrangersAreRefused) {
  Serve();
  for (const std::string token : {"", "the token of that epoch"}) {
    grpc::ClientContext context;
    const auto stream = Relay(&context, token);
    stream->Write(Start());
    EXPECT_EQ(End(stream.get()).error_code(), StatusCode::PERMISSION_DENIED);
    grpc::ClientContext settling;
    ShowToken({.token = token}, &settling);
    // Before anything is said: what a stranger sends is not read.
    EXPECT_EQ(stub_->Settle(&settling)->Finish().error_code(), StatusCode::PERMISSION_DENIED);
  }
}

TEST_F(RelayServiceTest, ThereIsNothingBeforeTheLeaderServesAndAfterIt) {
  EXPECT_EQ(Say({}).error_code(), StatusCode::UNAVAILABLE);
  Serve();
  EXPECT_TRUE(Say({Start()}).ok());
  server_.reset();
  EXPECT_EQ(Say({}).error_code(), StatusCode::UNAVAILABLE);
}

TEST_F(RelayServiceTest, ClientsAreToldWhereRanksTakeLanes) {
  Serve();
  const std::vector<std::string> addresses(session_.lane_addresses().begin(),
                                           session_.lane_addresses().end());
  EXPECT_EQ(addresses, (std::vector<std::string>{"", ":77", ""}));
}

TEST_F(RelayServiceTest, ARejectedChunkIsAnsweredAndReleasedAtItsRank) {
  Serve();
  grpc::ClientContext context;
  const auto stream = Relay(&context);
  stream->Write(Start());
  v1::ComputeResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_TRUE(response.has_ready());
  stream->Write(Chunk(1, 7));
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.result().disposition(), v1::DISPOSITION_REJECTED);
  EXPECT_EQ(response.result().error().message(),
            "hidden_states holds 3 non-finite values of 8; all must be finite");
  EXPECT_EQ(ranks_->AwaitReleased(1), (Ranks::Released{{2, 7}}));
  stream->WritesDone();
  EXPECT_TRUE(End(stream.get()).ok());
  EXPECT_EQ(Settle(1), 7U);
}

TEST_F(RelayServiceTest, ARelayIsSettledByWhatWasTaken) {
  Serve();
  grpc::ClientContext context;
  const auto stream = Relay(&context);
  stream->Write(Start());
  v1::ComputeResponse response;
  ASSERT_TRUE(stream->Read(&response));
  stream->Write(Chunk(1, 3));
  ASSERT_TRUE(stream->Read(&response));
  stream->Write(Chunk(9, 4));  // a gap: the stream ends, and the next one is not taken
  stream->Write(Chunk(10, 5));
  EXPECT_EQ(End(stream.get()).error_code(), StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(Settle(1), 4U);
  EXPECT_EQ(ranks_->AwaitReleased(2), (Ranks::Released{{2, 3}, {2, 4}}));
  EXPECT_EQ(Settle(1), 0U) << "it is forgotten";
}

TEST_F(RelayServiceTest, MessagesThatMakeNoSenseEndTheStream) {
  Serve();
  group::v1::RelayRequest no_hello = Start();
  no_hello.clear_hello();
  EXPECT_EQ(Say({no_hello}).error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Say({Start(2), Start(2)}).error_code(), StatusCode::INVALID_ARGUMENT) << "a second hello";
  group::v1::RelayRequest garbage = Start(3);
  garbage.set_request("\xff\xff");
  EXPECT_EQ(Say({garbage}).error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Say({Chunk(1, 1)}).error_code(), StatusCode::INVALID_ARGUMENT);
  for (const auto& [epoch, rank] : {std::pair{4, 2}, {5, 0}, {5, 3}, {5, -1}}) {
    group::v1::RelayRequest foreign = Start(4);
    foreign.mutable_hello()->set_epoch(epoch);
    foreign.mutable_hello()->set_rank(rank);
    EXPECT_EQ(Say({foreign}).error_code(), StatusCode::FAILED_PRECONDITION);
  }
  EXPECT_TRUE(Say({Start(5)}).ok()) << "and others go on";
  lossd::testing::Await("the streams to end", [&] { return server_->engine().counters().live_streams == 0; });
}

TEST_F(RelayServiceTest, TwoRelaysOfOneNumberAreNotBothTaken) {
  Serve();
  grpc::ClientContext context;
  const auto stream = Relay(&context);
  stream->Write(Start(6));
  v1::ComputeResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(Say({Start(6)}).error_code(), StatusCode::INVALID_ARGUMENT);
  stream->Write(Chunk(1, 1));
  EXPECT_TRUE(stream->Read(&response));
}

TEST_F(RelayServiceTest, ADrainEndsRelaysAndWaitsForThem) {
  Serve();
  grpc::ClientContext context;
  const auto stream = Relay(&context);
  stream->Write(Start());
  v1::ComputeResponse response;
  ASSERT_TRUE(stream->Read(&response));
  server_->server().Drain(absl::Minutes(10));
  EXPECT_EQ(server_->engine().counters().live_streams, 0);
  EXPECT_EQ(End(stream.get()).error_code(), StatusCode::UNAVAILABLE);
}

TEST_F(RelayServiceTest, ADrainWithoutPatienceMeetsRelaysThatAreEnding) {
  for (int round = 0; round < 20; ++round) {
    Serve();
    std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
    std::vector<std::unique_ptr<Stream>> streams;
    for (uint64_t relay = 1; relay <= 8; ++relay) {
      contexts.push_back(std::make_unique<grpc::ClientContext>());
      streams.push_back(Relay(contexts.back().get()));
      streams.back()->Write(Start(relay));
    }
    for (const auto& context : contexts) context->TryCancel();
    server_.reset();
    for (const auto& stream : streams) EXPECT_FALSE(End(stream.get()).ok());
  }
}

TEST_F(RelayServiceTest, LanesOfDeterministicSessionsAreTheLeaders) {
  Serve();
  grpc::ClientContext opening;
  v1::OpenSessionRequest request;
  request.set_head("h");
  request.set_client_key("deterministic");
  request.set_deterministic(true);
  ASSERT_TRUE(stubs_->losses->OpenSession(&opening, request, &session_).ok());
  EXPECT_EQ(Say({Start()}).error_code(), StatusCode::FAILED_PRECONDITION);
}

}  // namespace
}  // namespace lossd::rpc::relay_service_test
