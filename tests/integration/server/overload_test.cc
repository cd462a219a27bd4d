// More work than the server can do at once, through real gRPC, on a device that does what the test says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "google/protobuf/any.pb.h"
#include "tests/support/test_server.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/fake_device.h"

namespace lossd::testing::overload_test {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kVocab = 64;
constexpr int64_t kHidden = 8;
constexpr int64_t kFull = 64;  // rows of a batch
constexpr int64_t kLaneCredit = 16 << 10;

TestServerOptions Options(engine::FakeGate* gate, const engine::FakeOptions& device) {
  TestServerOptions options;
  options.engine.memory_limit_bytes = 64 << 20;
  options.engine.lane_credit_bytes = kLaneCredit;
  options.engine.staging_bytes = 8 * kLaneCredit;
  options.engine.max_streams = 20;
  options.device = [gate, device] { return engine::MakeFakeDevice(gate, device); };
  return options;
}

// Zero if there is none.
absl::Duration RetryDelay(const grpc::Status& status) {
  v1::RichStatus rich;
  v1::RetryInfo info;
  if (!rich.ParseFromString(status.error_details())) return absl::ZeroDuration();
  for (const google::protobuf::Any& detail : rich.details()) {
    if (detail.UnpackTo(&info)) {
      return absl::Seconds(info.retry_delay().seconds()) + absl::Nanoseconds(info.retry_delay().nanos());
    }
  }
  return absl::ZeroDuration();
}

class OverloadTest : public ::testing::Test {
 protected:
  explicit OverloadTest(const engine::FakeOptions& device = {.most_batches = 2, .rows_per_batch = kFull})
      : server_(Options(&gate_, device)), stubs_(server_.Channel()) {
    CreateHead(stubs_, "h", kVocab, kHidden);
  }
  ~OverloadTest() override { gate_.LetThrough(); }

  // What the device knows it by is `mark`.
  static v1::Chunk Marked(uint64_t sequence, int64_t tokens, float mark) {
    v1::Chunk chunk = MakeChunk(sequence, 1, tokens, kVocab, kHidden, 3);
    chunk.set_gradient_scale(mark);
    return chunk;
  }
  grpc::Status TryOpen(const std::string& client_key, int32_t lanes, v1::OpenSessionResponse* response) {
    v1::OpenSessionRequest request;
    request.set_head("h");
    request.set_client_key(client_key);
    request.set_lanes(lanes);
    grpc::ClientContext context;
    return stubs_.losses->OpenSession(&context, request, response);
  }
  engine::Counters& counters() { return server_.engine().counters(); }
  // Returns once the server reads no more.
  void AwaitQuiet() {
    Await("the server to read no more", [this] {
      const uint64_t before = counters().payload_bytes_in;
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      return counters().payload_bytes_in == before;
    });
  }

  engine::FakeGate gate_;
  TestServer server_;
  Stubs stubs_;
};

// Answers that left while dW is still being added to

TEST_F(OverloadTest, WhoeverHasAnAnswerFindsItCountedOnce) {
  const v1::OpenSessionResponse session = OpenSession(stubs_, "h", "c");
  const auto expect_counted = [&](uint64_t chunks, uint64_t tokens, const std::string& when) {
    SCOPED_TRACE(when);
    v1::GetStatusResponse status;
    grpc::ClientContext context;
    ASSERT_TRUE(stubs_.status->GetStatus(&context, {}, &status).ok());
    EXPECT_EQ(status.chunks_applied(), chunks);
    EXPECT_EQ(status.tokens_applied(), tokens);
    EXPECT_EQ(status.heads(0).window_tokens(), tokens);
    const std::shared_ptr<engine::Head> head = *server_.engine().FindHead("h");
    EXPECT_EQ(head->Snapshot().window_tokens, tokens) << "as metrics and the status page have it";
    EXPECT_EQ(head->Snapshot().window_since.has_value(), tokens > 0);
    EXPECT_EQ(head->counters().loss, tokens > 0 ? 1 : 0);
  };
  gate_.Hold();
  gate_.LetAnswers(1);
  {
    ComputeStream stream(stubs_, session);
    expect_counted(0, 0, "before");
    ASSERT_TRUE(stream.Compute(Marked(1, 3, 1)).has_value());
    expect_counted(1, 3, "dW is under way");
  }
  ComputeStream again(stubs_, session);
  EXPECT_EQ(again.ready().marks().applied(), 0U);
  again.Send(Marked(1, 3, 1));
  gate_.LetThrough();
  EXPECT_EQ(again.ReadResult(1)->disposition(), v1::DISPOSITION_REPEATED);
  expect_counted(1, 3, "sent again");
  EXPECT_EQ(PeekWindow(stubs_, "h").tokens, 3U);
  ASSERT_TRUE(again.Compute(Marked(2, 2, 1)).has_value());
  expect_counted(2, 5, "the window is open again");
}

// What a stream leaves behind

class AbandonedWorkTest : public OverloadTest {
 protected:
  // Two batches under way, and a full one gathered for the next from `stays_` and a stream that goes.
  void Prepare(std::optional<std::chrono::milliseconds> timeout) {
    const v1::OpenSessionResponse busy = OpenSession(stubs_, "h", "busy");
    gate_.Hold();
    busy_ = std::make_unique<ComputeStream>(stubs_, busy);
    busy_->Send(Marked(1, kFull, 1));
    gate_.AwaitStarted(1);
    busy_->Send(Marked(2, kFull, 2));
    gate_.AwaitStarted(2);
    stays_ = std::make_unique<ComputeStream>(stubs_, OpenSession(stubs_, "h", "stays"));
    stays_->Send(Marked(1, 8, 7));
    Await("chunks to be queued", [&] { return counters().queued_chunks == 1; });
    credit_before_ = counters().credit_bytes;
    goes_ = std::make_unique<ComputeStream>(stubs_, OpenSession(stubs_, "h", "goes"), 0, timeout);
    goes_->Send(Marked(1, 20, 100));
    goes_->Send(Marked(2, 20, 100));
    goes_->Send(Marked(3, 16, 100));
  }
  void ExpectNothingIsLeftOfIt() {
    Await("chunks to be withdrawn", [&] { return counters().chunks_withdrawn == 3; });
    EXPECT_EQ(counters().queued_chunks, 1);
    Await("credit to be returned", [&] { return counters().credit_bytes == credit_before_; });
    stays_->Send(Marked(2, 8, 8));
    Await("chunks to be queued", [&] { return counters().queued_chunks == 2; });
    gate_.LetThrough();
    EXPECT_TRUE(stays_->ReadResult(2).has_value());
    EXPECT_THAT(gate_.batches(), ElementsAre(ElementsAre(1), ElementsAre(2), ElementsAre(7, 8)))
        << "there is room again in the batch";
    EXPECT_EQ(counters().batch_rows.sum(), 2 * kFull + 16);
  }

  std::unique_ptr<ComputeStream> busy_, stays_, goes_;
  int64_t credit_before_ = 0;
};

TEST_F(AbandonedWorkTest, ChunksOfACancelledStreamLeaveTheQueueAndTheBatchAtOnce) {
  Prepare(std::nullopt);
  Await("chunks to be queued", [&] { return counters().queued_chunks == 4; });
  EXPECT_GT(counters().credit_bytes, credit_before_);
  goes_->Cancel();
  ExpectNothingIsLeftOfIt();
}

TEST_F(AbandonedWorkTest, ChunksOfAStreamPastItsDeadlineLeaveTheQueueAndTheBatchAtOnce) {
  Prepare(std::chrono::seconds(3));
  Await("chunks to be queued", [&] { return counters().queued_chunks == 4; });
  EXPECT_EQ(goes_->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  ExpectNothingIsLeftOfIt();
}

TEST_F(AbandonedWorkTest, ADrainEndsStreamsInTimeThoughTheDeviceIsNotDone) {
  Prepare(std::nullopt);
  std::thread drain([this] { server_.server().Drain(absl::Milliseconds(100)); });
  EXPECT_FALSE(goes_->Finish().ok());
  EXPECT_FALSE(stays_->Finish().ok());
  gate_.LetThrough();
  drain.join();
  EXPECT_EQ(counters().queued_chunks, 0);
}

// Shares

class OneByOneTest : public OverloadTest {
 protected:
  OneByOneTest() : OverloadTest({.most_batches = 1, .rows_per_batch = 1}) {}
};

TEST_F(OneByOneTest, AClientThatKeepsItsCreditFullDoesNotKeepALightOneWaiting) {
  ComputeStream heavy(stubs_, OpenSession(stubs_, "h", "heavy"));
  ComputeStream light(stubs_, OpenSession(stubs_, "h", "light"));
  gate_.Hold();
  for (uint64_t sequence = 1; sequence <= 8; ++sequence) heavy.Send(Marked(sequence, 32, 1));
  AwaitQuiet();
  ASSERT_GE(counters().queued_chunks, 3);
  for (uint64_t sequence = 1; sequence <= 3; ++sequence) light.Send(Marked(sequence, 4, 2));
  AwaitQuiet();
  gate_.LetThrough();
  ASSERT_TRUE(heavy.ReadResult(8).has_value());
  ASSERT_TRUE(light.ReadResult(3).has_value());
  const std::vector<engine::FakeBatch> order = gate_.batches();
  const auto last = std::find(order.rbegin(), order.rend(), engine::FakeBatch{2});
  EXPECT_LE(order.rend() - last, 2 + 3) << "behind what was under way and the one that was next";
}

// Credit

TEST_F(OneByOneTest, ManyLanesShareTheCreditOfTheirSession) {
  constexpr int32_t kLanes = 16;
  gate_.Hold();
  const v1::OpenSessionResponse session = OpenSession(stubs_, "h", "wide", kLanes);
  std::vector<std::unique_ptr<ComputeStream>> lanes;
  for (int32_t lane = 0; lane < kLanes; ++lane) {
    lanes.push_back(std::make_unique<ComputeStream>(stubs_, session, lane));
    // As many as a lane of a session alone would have taken.
    for (uint64_t sequence = 1; sequence <= 4; ++sequence) lanes.back()->Send(Marked(sequence, 64, 1));
  }
  AwaitQuiet();
  const int64_t taken = 1 + counters().queued_chunks;
  EXPECT_GE(taken, kLanes) << "every lane may always have one chunk";
  EXPECT_LE(taken, 14 + kLanes) << "what four lanes' credit holds, and what was being read meanwhile";
  gate_.LetThrough();
  for (const auto& lane : lanes) {
    ASSERT_TRUE(lane->ReadResult(4).has_value()) << "those that waited for credit go on";
    lane->WritesDone();
    EXPECT_TRUE(lane->Finish().ok());
  }
  Await("credit to be returned", [&] { return counters().credit_bytes == 0; });
}

TEST_F(OverloadTest, ManyLanesTakeNoMoreOfTheStagingMemoryThanFour) {
  v1::OpenSessionResponse first;
  v1::OpenSessionResponse ignored;
  ASSERT_TRUE(TryOpen("a", 16, &first).ok());
  EXPECT_EQ(server_.engine().staging_reserved(), 4 * kLaneCredit);
  ASSERT_TRUE(TryOpen("b", 2, &ignored).ok());
  ASSERT_TRUE(TryOpen("c", 2, &ignored).ok());
  EXPECT_EQ(server_.engine().staging_reserved(), 8 * kLaneCredit);
  EXPECT_EQ(TryOpen("d", 1, &ignored).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  ASSERT_TRUE(server_.engine().CloseSession(first.session_id()).ok());
  EXPECT_TRUE(TryOpen("d", 1, &ignored).ok());
}

// Refusals

TEST_F(OverloadTest, SessionsThatDoNotFitAreToldToComeBackTheLaterTheMoreTheyAre) {
  v1::OpenSessionResponse ignored;
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(TryOpen(std::to_string(i), 1, &ignored).ok());
  absl::Duration last;
  const absl::Time before = absl::Now();
  for (int i = 0; i < 100; ++i) {
    const grpc::Status status = TryOpen("more" + std::to_string(i), 1, &ignored);
    ASSERT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(status.error_message(), ::testing::HasSubstr("--staging_bytes"));
    const absl::Duration delay = RetryDelay(status);
    if (i == 0) {
      EXPECT_EQ(delay, absl::Seconds(1));
    }
    last = delay;
  }
  // 20 ms more for each of them, less the time that they took.
  EXPECT_GT(last + (absl::Now() - before), absl::Seconds(1) + 90 * absl::Milliseconds(20));
  EXPECT_LE(last, absl::Seconds(3));
  EXPECT_EQ(server_.engine().sessions(), 8);
  EXPECT_EQ(GetHead(stubs_, "h").open_sessions(), 8) << "nothing is kept of those that were refused";
}

// It keeps the answer that its client does not read, which no credit counts any more.
TEST_F(OverloadTest, AStreamThatWasFencedAndIsNotReadIsCancelled) {
  constexpr int64_t kWide = 4096;
  CreateHead(stubs_, "wide", kVocab, kWide);
  const v1::OpenSessionResponse session = OpenSession(stubs_, "wide", "mute");
  ComputeStream mute(stubs_, session);
  ASSERT_TRUE(mute.Send(MakeChunk(1, 1, 1000, kVocab, kWide, 3)));
  Await("answers to be sent", [&] { return counters().payload_bytes_out > 0; });
  AwaitQuiet();
  Stubs elsewhere(server_.Channel());
  ComputeStream next(elsewhere, session);
  EXPECT_EQ(counters().live_streams, 2) << "16 MB are more than is on its way unasked";
  server_.server().Tick();
  server_.server().Tick();
  Await("streams to come or go", [&] { return counters().live_streams == 1; });
  EXPECT_EQ(next.ready().marks().accepted(), 1U);
}

TEST_F(OverloadTest, StreamsBeyondTheLimitAreRefusedUntilOneEnds) {
  const v1::OpenSessionResponse session = OpenSession(stubs_, "h", "c");
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReaderWriter<v1::ComputeRequest, v1::ComputeResponse>>> silent;
  while (counters().live_streams < 20) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    const int64_t before = counters().live_streams;
    silent.push_back(stubs_.losses->Compute(contexts.back().get()));
    Await("streams to come or go", [&] { return counters().live_streams > before; });
  }
  ComputeStream refused(stubs_, session);
  const grpc::Status status = refused.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), ::testing::HasSubstr("--max_streams"));
  EXPECT_GE(RetryDelay(status), absl::Seconds(1));
  contexts.front()->TryCancel();
  Await("streams to come or go", [&] { return counters().live_streams < 20; });
  ComputeStream taken(stubs_, session);
  EXPECT_TRUE(taken.Compute(Marked(1, 4, 1)).has_value());
  for (const auto& context : contexts) context->TryCancel();
}

}  // namespace
}  // namespace lossd::testing::overload_test
