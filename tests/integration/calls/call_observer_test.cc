// What the server counts and remembers of calls, however they end: real calls over loopback.
#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "grpcpp/generic/generic_stub.h"
#include "tests/support/test_server.h"
#include "tests/support/wait.h"

namespace lossd::testing::call_observer_test {
namespace {

using std::chrono::milliseconds;

constexpr char kTraceId[] = "4bf92f3577b34da6a3ce929d0e0e4736";
const std::string kTraceParent = std::string("00-") + kTraceId + "-00f067aa0ba902b7-01";
constexpr int64_t kVocab = 64;
constexpr int64_t kHidden = 8;

class CallObserverTest : public ::testing::Test {
 protected:
  telemetry::RpcMethod& Method(const std::string& name) {
    telemetry::RpcMethod* const method = server_.counters().rpcs.Find(name);
    EXPECT_NE(method, nullptr) << name;
    return *method;
  }

  uint64_t Ended(const std::string& name, grpc::StatusCode code) {
    return Method(name).ended[static_cast<size_t>(code)];
  }

  // A client has its answer a little before gRPC is done with the call.
  void AwaitIdle() {
    for (const auto& method : server_.counters().rpcs.methods()) {
      Await("calls to end", [&] { return method->in_flight == 0; });
    }
  }

  // All calls of this method that ended are so many, and ended with this code.
  void ExpectEnded(const std::string& name, grpc::StatusCode code, uint64_t count = 1) {
    AwaitIdle();
    const auto& ended = Method(name).ended;
    EXPECT_EQ(Ended(name, code), count) << name;
    EXPECT_EQ(std::accumulate(ended.begin(), ended.end(), uint64_t{0}), count) << name;
    uint64_t timed = 0;
    for (size_t i = 0; i <= engine::DurationHistogram::kBounds.size(); ++i) {
      timed += Method(name).seconds.bucket(i);
    }
    EXPECT_EQ(timed, count) << name;
  }

  std::vector<telemetry::RecentError> Errors() { return server_.counters().errors.Read(); }

  TestServer server_;
  Stubs stubs_{server_.Channel()};
};

TEST_F(CallObserverTest, CallsThatSucceedAreCountedAndRemembered) {
  CreateHead(stubs_, "h", kVocab, kHidden);
  for (const char* method : {"HeadService/CreateHead", "HeadService/BeginWrite", "HeadService/WriteWeights",
                             "HeadService/CommitWrite"}) {
    ExpectEnded(method, grpc::StatusCode::OK);
  }
  EXPECT_TRUE(Errors().empty());
}

TEST_F(CallObserverTest, AnErrorIsRememberedAsTheClientGotIt) {
  v1::GetHeadRequest request;
  request.set_name("absent");
  v1::Head head;
  grpc::ClientContext context;
  context.AddMetadata("traceparent", kTraceParent);
  context.AddMetadata("tracestate", "congo=t61rcWkgMzE");
  const grpc::Status status = stubs_.heads->GetHead(&context, request, &head);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  ExpectEnded("HeadService/GetHead", grpc::StatusCode::NOT_FOUND);
  ASSERT_EQ(Errors().size(), 1u);
  const telemetry::RecentError error = Errors()[0];
  EXPECT_EQ(error.method, "HeadService/GetHead");
  EXPECT_EQ(error.code, grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(error.message, status.error_message());
  EXPECT_EQ(error.trace_id, kTraceId);
}

TEST_F(CallObserverTest, ATraceParentThatIsNoneIsIgnored) {
  const std::string upper = "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01";
  for (const std::vector<std::string>& parents : std::vector<std::vector<std::string>>{
           {}, {""}, {"nonsense"}, {upper}, {std::string(4000, 'a')}, {kTraceParent, kTraceParent}}) {
    v1::GetHeadRequest request;
    request.set_name("absent");
    v1::Head head;
    grpc::ClientContext context;
    for (const std::string& parent : parents) context.AddMetadata("traceparent", parent);
    EXPECT_EQ(stubs_.heads->GetHead(&context, request, &head).error_code(), grpc::StatusCode::NOT_FOUND);
    AwaitIdle();
    EXPECT_EQ(Errors().at(0).trace_id, "");
  }
}

TEST_F(CallObserverTest, AStreamIsUnderWayUntilItEnds) {
  CreateHead(stubs_, "h", kVocab, kHidden);
  const v1::OpenSessionResponse session = OpenSession(stubs_, "h", "k");
  {
    ComputeStream stream(stubs_, session);
    ASSERT_TRUE(stream.Compute(MakeChunk(1, session.generation(), 4, kVocab, kHidden, 1)).has_value());
    EXPECT_EQ(Method("LossService/Compute").in_flight, 1);
    stream.WritesDone();
    EXPECT_TRUE(stream.Finish().ok());
  }
  ExpectEnded("LossService/Compute", grpc::StatusCode::OK);
}

TEST_F(CallObserverTest, AStreamThatTheServerEndsHasItsCodeThoughTheClientGoesOnSending) {
  CreateHead(stubs_, "h", kVocab, kHidden);
  const v1::OpenSessionResponse session = OpenSession(stubs_, "h", "k");
  ComputeStream stream(stubs_, session);
  for (uint64_t sequence = 7; stream.Send(MakeChunk(sequence, 1, 4, kVocab, kHidden, 1)); ++sequence) {
  }
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << status.error_message();
  ExpectEnded("LossService/Compute", grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(Errors().at(0).message, status.error_message());
}

TEST_F(CallObserverTest, WhatAClientCancelsCountsOnceAndIsNoError) {
  CreateHead(stubs_, "h", kVocab, kHidden);
  const v1::OpenSessionResponse session = OpenSession(stubs_, "h", "k");
  {
    ComputeStream stream(stubs_, session);
    for (uint64_t sequence = 1; sequence <= 20; ++sequence) {
      stream.Send(MakeChunk(sequence, session.generation(), 4, kVocab, kHidden, 1));
    }
    stream.Cancel();
  }
  ExpectEnded("LossService/Compute", grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Errors().empty());
}

TEST_F(CallObserverTest, EachKindOfCallMayBeCancelled) {
  // Large enough that what is read does not fit into buffers.
  constexpr int64_t kRows = 4096;
  constexpr int64_t kColumns = 2048;
  CreateHead(stubs_, "h", kRows, kColumns);
  {
    grpc::ClientContext context;
    v1::WriteWeightsResponse response;
    auto writer = stubs_.heads->WriteWeights(&context, &response);
    Await("the call", [this] { return Method("HeadService/WriteWeights").in_flight > 0; });
    context.TryCancel();
    EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  {
    grpc::ClientContext context;
    v1::ReadWeightsRequest request;
    request.set_head("h");
    auto reader = stubs_.heads->ReadWeights(&context, request);
    v1::ReadWeightsResponse piece;
    ASSERT_TRUE(reader->Read(&piece));
    context.TryCancel();
    while (reader->Read(&piece)) {
    }
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  ExpectEnded("HeadService/ReadWeights", grpc::StatusCode::CANCELLED);
  EXPECT_EQ(Ended("HeadService/WriteWeights", grpc::StatusCode::CANCELLED), 1u);
}

TEST_F(CallObserverTest, ADeadlineThatIsOverIsNamedAsSuch) {
  CreateHead(stubs_, "h", kVocab, kHidden);
  const v1::OpenSessionResponse session = OpenSession(stubs_, "h", "k");
  {
    ComputeStream stream(stubs_, session, 0, milliseconds(2000));
    EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  ExpectEnded("LossService/Compute", grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(Errors().size(), 1u);
}

// The client's deadline began before the server saw the call, so the client may give up before the server's
// own timer ends.
TEST_F(CallObserverTest, WhoGivesUpJustBeforeTheDeadlineHasWaitedForIt) {
  CreateHead(stubs_, "h", kVocab, kHidden);
  const v1::OpenSessionResponse session = OpenSession(stubs_, "h", "k");
  {
    ComputeStream stream(stubs_, session, 0, milliseconds(1000));
    std::this_thread::sleep_for(milliseconds(950));
    stream.Cancel();
  }
  ExpectEnded("LossService/Compute", grpc::StatusCode::DEADLINE_EXCEEDED);
}

TEST_F(CallObserverTest, ADrainEndsStreamsWithUnavailable) {
  CreateHead(stubs_, "h", kVocab, kHidden);
  const v1::OpenSessionResponse session = OpenSession(stubs_, "h", "k");
  ComputeStream stream(stubs_, session);
  std::thread drain([this] { server_.server().Drain(absl::Seconds(20)); });
  EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  drain.join();
  ExpectEnded("LossService/Compute", grpc::StatusCode::UNAVAILABLE);
}

// What is sent as a request and what is not one, to a method that takes a message of protobuf.
TEST_F(CallObserverTest, ARequestThatCannotBeReadCounts) {
  grpc::GenericStub generic(server_.Channel());
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  const grpc::Slice nonsense(std::string(40, '\xff'));
  const auto call =
      generic.PrepareUnaryCall(&context, "/lossd.v1.HeadService/GetHead", {&nonsense, 1}, &queue);
  call->StartCall();
  grpc::ByteBuffer response;
  grpc::Status status;
  call->Finish(&response, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  ASSERT_TRUE(queue.Next(&tag, &ok));
  EXPECT_FALSE(status.ok());
  ExpectEnded("HeadService/GetHead", status.error_code());
}

TEST_F(CallObserverTest, ManyCallsThatEndInEveryWayLeaveNothingUnderWay) {
  CreateHead(stubs_, "h", kVocab, kHidden);
  constexpr int kThreads = 6;
  constexpr int kRounds = 40;
  std::atomic<uint64_t> answered = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      Stubs stubs(server_.Channel());
      std::mt19937 random(static_cast<uint32_t>(i));
      const v1::OpenSessionResponse session = OpenSession(stubs, "h", "client " + std::to_string(i));
      for (int round = 0; round < kRounds; ++round) {
        ComputeStream stream(stubs, session);
        const uint64_t next = stream.ready().marks().accepted() + 1;
        for (uint64_t sequence = next; sequence < next + random() % 4; ++sequence) {
          stream.Send(MakeChunk(sequence, session.generation(), 4, kVocab, kHidden, 1));
        }
        if (random() % 2 == 0) {
          stream.Cancel();
        } else {
          stream.WritesDone();
        }
        if (stream.Finish().ok()) ++answered;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  AwaitIdle();
  EXPECT_EQ(Ended("LossService/Compute", grpc::StatusCode::OK), answered);
  const auto& ended = Method("LossService/Compute").ended;
  EXPECT_EQ(std::accumulate(ended.begin(), ended.end(), uint64_t{0}), uint64_t{kThreads * kRounds});
}

}  // namespace
}  // namespace lossd::testing::call_observer_test
