// A coordinator that vanishes without a word: calls that were passed on to it end when it is missed.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "lossd/v1/head.grpc.pb.h"
#include "lossd/v1/loss.grpc.pb.h"
#include "server/rpc/replicas/passed_calls.h"
#include "tests/unit/rpc/replicas/set_under_test.h"

namespace lossd::rpc::lost_coordinator_test {
namespace {

using engine::testing::ReplicaServers;
using engine::testing::SetSize;
using replica_set_test::SetUnderTest;
using ::testing::AllOf;
using ::testing::HasSubstr;

// Ends only when nobody waits for it.
class Unanswered final : public grpc::ServerUnaryReactor {
 public:
  explicit Unanswered(std::atomic<int>* calls) { ++*calls; }
  void OnCancel() override { Finish(grpc::Status::CANCELLED); }
  void OnDone() override { delete this; }  // NOLINT(cppcoreguidelines-owning-memory): gRPC is done with it
};

class HeadsWithoutAnswers final : public v1::HeadService::CallbackService {
 public:
  grpc::ServerUnaryReactor* GetHead(grpc::CallbackServerContext* /*context*/,
                                    const v1::GetHeadRequest* /*request*/, v1::Head* /*head*/) override {
    return new Unanswered(&calls);
  }
  std::atomic<int> calls = 0;
};

class SessionsWithoutAnswers final : public v1::LossService::CallbackService {
 public:
  grpc::ServerUnaryReactor* OpenSession(grpc::CallbackServerContext* /*context*/,
                                        const v1::OpenSessionRequest* /*request*/,
                                        v1::OpenSessionResponse* /*response*/) override {
    return new Unanswered(&calls);
  }
  std::atomic<int> calls = 0;
};

// At the other replica, as LossService has it.
class PlacedSessions final : public v1::LossService::CallbackService {
 public:
  explicit PlacedSessions(SessionPlacer* placer) : placer_(placer) {}
  grpc::ServerUnaryReactor* OpenSession(grpc::CallbackServerContext* context,
                                        const v1::OpenSessionRequest* request,
                                        v1::OpenSessionResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    placer_->OpenSession(*context, *request,
                         [reactor, response](const grpc::Status& status, v1::OpenSessionResponse opened) {
                           *response = std::move(opened);
                           reactor->Finish(status);
                         });
    return reactor;
  }

 private:
  SessionPlacer* const placer_;
};

// Two replicas, each a server. The first one takes calls and answers none.
class LostCoordinatorTest : public ::testing::Test {
 protected:
  LostCoordinatorTest() {
    grpc::ServerBuilder first;
    first.RegisterService(&heads_);
    first.RegisterService(&sessions_);
    coordinator_ = first.BuildAndStart();
    set_.MeetAll();
    set_.set(0).Serve({}, coordinator_->InProcessChannel({}));
    grpc::ServerBuilder second;
    second.RegisterService(&placed_);
    second.RegisterCallbackGenericService(&passed_);
    replica_ = second.BuildAndStart();
    to_replica_ = replica_->InProcessChannel({});
  }
  ~LostCoordinatorTest() override {
    set_.set(0).StopServing();
    const auto now = std::chrono::system_clock::now();
    replica_->Shutdown(now);
    coordinator_->Shutdown(now);
  }

  // Makes it, and silences the coordinator when it has come there.
  template <class Call>
  grpc::Status CallAndSilence(Call call, const std::atomic<int>& calls) {
    std::future<grpc::Status> called = std::async(std::launch::async, call);
    while (calls == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    set_.proxy().Silence();
    return called.get();
  }

  HeadsWithoutAnswers heads_;
  SessionsWithoutAnswers sessions_;
  std::unique_ptr<grpc::Server> coordinator_;
  // With a plan: who is silent is lost sooner.
  SetUnderTest set_{SetSize{2}, ReplicaServers::AdamWHead(),
                    [](int /*connection*/) { return std::vector<lossd::testing::Fault>(); }};
  // How the other one reaches the first: what it has found before, or what it finds now.
  absl::StatusOr<CoordinatorCalls> found_ = absl::UnavailableError("");
  PassedCalls passed_{[this] { return found_.ok() ? found_ : set_.set(1).Coordinator(); }, nullptr};
  PlacedSessions placed_{&set_.set(1).sessions()};
  std::unique_ptr<grpc::Server> replica_;
  std::shared_ptr<grpc::Channel> to_replica_;
};

TEST_F(LostCoordinatorTest, ACallThatWasPassedOnIsToldWhyItIsLost) {
  const auto stub = v1::HeadService::NewStub(to_replica_);
  const auto call = [&stub] {
    grpc::ClientContext context;
    v1::Head head;
    return stub->GetHead(&context, {}, &head);
  };
  const grpc::Status status = CallAndSilence(call, heads_.calls);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), AllOf(HasSubstr("was passed on"), HasSubstr("silent for 1s")));
  EXPECT_EQ(call().error_code(), grpc::StatusCode::UNAVAILABLE) << "it is missing";
}

TEST_F(LostCoordinatorTest, WhoOpensASessionThereIsToldWhyItIsLost) {
  const auto stub = v1::LossService::NewStub(to_replica_);
  const auto call = [&stub] {
    grpc::ClientContext context;
    v1::OpenSessionResponse response;
    return stub->OpenSession(&context, {}, &response);
  };
  const grpc::Status status = CallAndSilence(call, sessions_.calls);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), AllOf(HasSubstr("was passed on"), HasSubstr("silent for 1s")));
}

TEST_F(LostCoordinatorTest, ACallThatBeginsWhileItIsLostEndsAsWell) {
  found_ = set_.set(1).Coordinator();
  ASSERT_TRUE(found_.ok()) << found_.status();
  found_->epoch->End(absl::UnavailableError("as the test has it"));
  const auto stub = v1::HeadService::NewStub(to_replica_);
  grpc::ClientContext context;
  v1::Head head;
  const grpc::Status status = stub->GetHead(&context, {}, &head);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("as the test has it"));
}

}  // namespace
}  // namespace lossd::rpc::lost_coordinator_test
