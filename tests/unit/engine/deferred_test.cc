// Heads that defer dW: chunks are answered without it, and it is made exactly once whatever happens
// meanwhile.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <future>
#include <numeric>
#include <utility>

#include "server/engine/cpu_backend.h"
#include "server/engine/random_id.h"
#include "tests/unit/engine/engine_fixture.h"

namespace lossd::engine::deferred_test {
namespace {

using ::testing::ElementsAre;

constexpr auto kOnlyDw = ComputeMode::kWeightGradientOnly;

class DeferredTest : public ::testing::Test, protected EngineFixture {
 protected:
  // Every chunk takes a page of the memory.
  static HeadConfig Room(int64_t chunks) {
    HeadConfig config;
    config.deferred_bytes = chunks * 4096;
    return config;
  }
  explicit DeferredTest(int64_t chunks = 8, FakeOptions device = {}, EngineOptions options = {})
      : EngineFixture(std::move(options), device, Room(chunks)) {}

  std::vector<ComputeMode> Modes() {
    std::vector<ComputeMode> modes;
    for (const RowKind& kind : gate.kinds()) modes.push_back(kind.mode);
    return modes;
  }
  // Answered, with dW on the device, which holds it.
  void AnswerOne(const LaneAttachment& lane, Chunk chunk) {
    gate.Hold();
    Submit(lane, std::move(chunk));
    gate.AwaitStarted(1);
    gate.LetThrough(1);
    listener_->AwaitAnswers(1);
    gate.AwaitStarted(2);
  }

  std::shared_ptr<RecordingListener> listener_ = std::make_shared<RecordingListener>();
};

TEST_F(DeferredTest, AChunkIsAnsweredWithoutItsDwWhichAnIdleDeviceMakesAndOnlyThenIsItApplied) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  AnswerOne(lane, MakeChunk(1, 5));
  EXPECT_THAT(Modes(), ElementsAre(ComputeMode::kLossAndGradients, kOnlyDw));
  EXPECT_EQ(listener_->applied(), 0U);
  EXPECT_EQ(head->Info().window_tokens, 0U);
  gate.LetThrough();
  EXPECT_EQ(GradientSum(), 5);
  EXPECT_EQ(listener_->applied(), 1U);
  EXPECT_EQ(listener_->answers(), 1U);
  EXPECT_EQ(head->Info().window_tokens, 1U);
  EXPECT_EQ(engine->counters().chunks_accumulated, 1U);
  EXPECT_EQ(engine->counters().chunks_deferred, 1U);
  EXPECT_EQ(engine->counters().tokens_valid, 1U);
}

TEST_F(DeferredTest, WhatComesMeanwhileGoesFirstAndMarksWaitForTheOldest) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 1));
  gate.AwaitStarted(1);
  Chunk losses = MakeChunk(2, 2);
  losses.mode = ComputeMode::kLossOnly;
  Submit(lane, std::move(losses));
  Chunk bad = MakeChunk(3, 3);
  bad.labels[0] = 99;
  Submit(lane, std::move(bad));
  gate.LetThrough(2);
  listener_->AwaitAnswers(3);
  gate.AwaitStarted(3);
  EXPECT_THAT(Modes(), ElementsAre(ComputeMode::kLossAndGradients, ComputeMode::kLossOnly, kOnlyDw));
  EXPECT_EQ(listener_->applied(), 0U) << "2 and 3 are done, 1 is not in dW";
  gate.LetThrough();
  EXPECT_EQ(GradientSum(), 1);
  EXPECT_EQ(listener_->applied(), 3U);
}

TEST_F(DeferredTest, AFlushHasWhatWasDeferred) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  AnswerOne(lane, MakeChunk(1, 7));
  std::promise<absl::StatusOr<FlushInfo>> begun;
  head->BeginFlush(1, Marks(), 1.0f,
                   [&](absl::StatusOr<FlushInfo> flush) { begun.set_value(std::move(flush)); });
  gate.LetThrough();
  const absl::StatusOr<FlushInfo> flush = begun.get_future().get();
  ASSERT_TRUE(flush.ok()) << flush.status();
  EXPECT_EQ(flush->window_tokens, 1U);
  EXPECT_GT(flush->summary.norm, 0);
  ASSERT_TRUE(head->CommitFlush(flush->flush_id).ok());
  Submit(lane, MakeChunk(2, 3, 2));
  EXPECT_EQ(GradientSum(), 3);
}

TEST_F(DeferredTest, NewWeightsAreNotPublishedBeforeWhatTheOldOnesAnswered) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  AnswerOne(lane, MakeChunk(1, 1));
  std::future<uint64_t> written = std::async(std::launch::async, [this] { return WriteWeights(); });
  EXPECT_EQ(head->weight_version(), 1U);
  gate.LetThrough();
  EXPECT_EQ(written.get(), 2U);
  EXPECT_EQ(listener_->applied(), 1U) << "before the write was published";
}

TEST_F(DeferredTest, ACutStreamFindsItsMarkAndARepeatIsNotAddedAgain) {
  const std::string session = Open("c");
  const LaneAttachment lane = Attach(session, listener_);
  AnswerOne(lane, MakeChunk(1, 5));
  head->DetachLane(lane);
  auto other = std::make_shared<RecordingListener>();
  const LaneAttachment again = Attach(session, other);
  EXPECT_EQ(again.marks.accepted, 1U);
  EXPECT_EQ(again.marks.applied, 0U);
  Submit(again, MakeChunk(1, 5));
  gate.LetThrough();
  EXPECT_EQ(other->AwaitAnswers(1)[0].disposition, Disposition::kRepeated);
  EXPECT_EQ(GradientSum(), 5);
  EXPECT_EQ(other->applied(), 1U) << "told to the stream of now";
  EXPECT_EQ(listener_->applied(), 0U);
}

TEST_F(DeferredTest, AClosedSessionsDwIsMadeAllTheSame) {
  const std::string session = Open("c");
  AnswerOne(Attach(session, listener_), MakeChunk(1, 5));
  ASSERT_TRUE(engine->CloseSession(session).ok());
  gate.LetThrough();
  EXPECT_EQ(GradientSum(), 5);
}

TEST_F(DeferredTest, ADrainWaitsForIt) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  AnswerOne(lane, MakeChunk(1, 5));
  engine->BeginDrain();
  gate.LetThrough();
  engine->WaitIdle();
  EXPECT_EQ(listener_->applied(), 1U);
}

TEST_F(DeferredTest, ADeletedHeadGivesItsMemoryBackWithoutMakingIt) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  for (uint64_t sequence = 1; sequence <= 3; ++sequence) {
    Submit(lane, MakeChunk(sequence, 1));
    gate.AwaitStarted(sequence);
    if (sequence < 3) gate.LetThrough(1);
  }
  const size_t started = gate.batches().size();
  std::promise<void> released;
  ASSERT_TRUE(engine->DeleteHead("h", Engine::DiscardGradient::kYes, [&] { released.set_value(); }).ok());
  gate.LetThrough();
  released.get_future().wait();
  EXPECT_EQ(engine->budget().reserved(), 0);
  EXPECT_EQ(gate.batches().size(), started);
}

TEST_F(DeferredTest, ADeviceThatFailsMeanwhileEndsTheStream) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  AnswerOne(lane, MakeChunk(1, 5));
  gate.Fail();
  gate.LetThrough();
  engine->WaitIdle();
  ASSERT_TRUE(listener_->ended().has_value());
  EXPECT_EQ(listener_->ended()->code(), absl::StatusCode::kInternal);
  EXPECT_EQ(listener_->applied(), 0U);
  EXPECT_EQ(BeginFlush(1, {}).status().code(), absl::StatusCode::kInternal);
}

TEST_F(DeferredTest, TheMemoryIsReservedWithTheHeadAndFrozenHeadsTakeNone) {
  const auto of = [](const MemoryPlan& plan) {
    int64_t bytes = 0;
    for (const MemoryItem& item : plan) bytes += item.purpose == "deferred" ? item.bytes : 0;
    return bytes;
  };
  EXPECT_EQ(of(head->Info().memory), 8 * 4096);
  EXPECT_EQ(of(engine->ReservedMemory()), 8 * 4096);
  HeadConfig frozen = head->config();
  frozen.name = "frozen";
  frozen.weight_gradients = WeightGradients::kFrozen;
  const auto created = engine->CreateHead(frozen);
  ASSERT_TRUE(created.ok()) << created.status();
  EXPECT_EQ(of((*created)->Info().memory), 0);
  HeadConfig negative = head->config();
  negative.name = "negative";
  negative.deferred_bytes = -1;
  EXPECT_EQ(engine->CreateHead(negative).status().code(), absl::StatusCode::kInvalidArgument);
  HeadConfig huge = head->config();
  huge.name = "huge";
  huge.deferred_bytes = int64_t{1} << 45;
  EXPECT_EQ(engine->CreateHead(huge).status().code(), absl::StatusCode::kResourceExhausted);
}

class SmallRoomTest : public DeferredTest {
 protected:
  SmallRoomTest() : DeferredTest(2) {}
};

TEST_F(SmallRoomTest, WhatDoesNotFitIsAddedAtOnceAndTheRestIsHurried) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  for (uint64_t sequence = 1; sequence <= 4; ++sequence) {
    Submit(lane, MakeChunk(sequence, static_cast<float>(sequence)));
  }
  gate.LetThrough();
  EXPECT_EQ(GradientSum(), 10);
  EXPECT_EQ(listener_->applied(), 4U);
  EXPECT_EQ(engine->counters().chunks_deferred, 2U);
  EXPECT_EQ(engine->counters().chunks_accumulated, 4U);
  Submit(lane, MakeChunk(5, 5));
  EXPECT_EQ(GradientSum(), 15);
  EXPECT_EQ(engine->counters().chunks_deferred, 3U) << "there is room again";
}

class GatheredTest : public DeferredTest {
 protected:
  GatheredTest() : DeferredTest(8, {.most_batches = 3, .rows_per_batch = 4}) {}
};

TEST_F(GatheredTest, ItIsMadeInBatchesOfItsOwnAndNeverHalf) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  for (uint64_t sequence = 1; sequence <= 6; ++sequence) {
    Submit(lane, MakeChunk(sequence, static_cast<float>(sequence)));
    if (sequence <= 2) gate.AwaitStarted(sequence);
  }
  gate.LetThrough();
  EXPECT_EQ(GradientSum(), 21);
  EXPECT_EQ(listener_->applied(), 6U);
  for (size_t i = 0; i < gate.kinds().size(); ++i) {
    EXPECT_LE(gate.batches()[i].size(), 4U);
  }
}

// On the CPU, where values can be looked at.
class DeferredValuesTest : public ::testing::Test {
 protected:
  static constexpr int64_t kVocab = 50;
  static constexpr int64_t kHidden = 16;
  static constexpr int64_t kTokens = 5;

  struct Server {
    std::unique_ptr<Engine> engine;
    std::shared_ptr<Head> head;
    std::shared_ptr<RecordingListener> listener = std::make_shared<RecordingListener>();
    LaneAttachment lane;
  };

  static Server Make(int64_t deferred_bytes) {
    Server server;
    EngineOptions options;
    options.regions.total_bytes = options.regions.client_bytes = 1 << 20;
    server.engine = *Engine::Create(options, *CreateCpuDevice(1 << 20));
    HeadConfig config{"h", kVocab, kHidden, kernels::DataType::kFloat32};
    config.deferred_bytes = deferred_bytes;
    server.head = *server.engine->CreateHead(config);
    Write(server, 1);
    const std::string session = server.engine->OpenSession("h", "c", 0, 1)->info.session_id;
    server.lane = *server.head->AttachLane(session, 0, server.listener);
    return server;
  }
  static void Write(Server& server, float scale) {
    const std::string write = *server.head->BeginWrite(RandomId(), Head::Replace::kNo, RandomId());
    std::string rows(kVocab * kHidden * 4, '\0');
    auto* values = reinterpret_cast<float*>(rows.data());
    for (int64_t i = 0; i < kVocab * kHidden; ++i) values[i] = scale * static_cast<float>(i % 7) / 7;
    ASSERT_TRUE((*server.head->FindWrite(write))->Write(0, kVocab, kernels::DataType::kFloat32, rows).ok());
    std::promise<void> published;
    server.head->CommitWrite(write, [&](const absl::StatusOr<uint64_t>&) { published.set_value(); });
    published.get_future().wait();
  }
  static Chunk MakeChunk(uint64_t sequence) {
    Chunk chunk;
    chunk.sequence = sequence;
    chunk.generation = 1;
    chunk.tokens = kTokens;
    chunk.gradient_scale = 0.5f;
    chunk.options.label_smoothing = sequence % 2 == 0 ? 0.1f : 0.0f;
    std::vector<int64_t> labels(kTokens);
    std::iota(labels.begin(), labels.end(), static_cast<int64_t>(sequence));
    labels[1] = -100;
    std::vector<float> weights(kTokens, 1.5f);
    std::vector<float> hidden(kTokens * kHidden);
    for (size_t i = 0; i < hidden.size(); ++i) hidden[i] = static_cast<float>((i * sequence) % 11) / 11;
    chunk.labels.assign(reinterpret_cast<const char*>(labels.data()), labels.size() * 8);
    chunk.token_weights.assign(reinterpret_cast<const char*>(weights.data()), weights.size() * 4);
    chunk.lse_gradients = chunk.token_weights;
    chunk.options.returns.log_sum_exp = true;
    chunk.hidden_states =
        Payload::Of(std::string(reinterpret_cast<const char*>(hidden.data()), hidden.size() * 4));
    return chunk;
  }
  static void Submit(Server& server, Chunk chunk) {
    const size_t answers = server.listener->answers();
    ASSERT_TRUE(server.head->Submit(server.lane, chunk, [] {}).ok());
    server.listener->AwaitAnswers(answers + 1);
  }
  static std::vector<float> Gradient(Server& server) {
    std::promise<absl::StatusOr<FlushInfo>> begun;
    server.head->BeginFlush(1, server.head->Info().window_marks, 1.0f,
                            [&](absl::StatusOr<FlushInfo> flush) { begun.set_value(std::move(flush)); });
    const absl::StatusOr<FlushInfo> flush = begun.get_future().get();
    EXPECT_TRUE(flush.ok()) << flush.status();
    std::vector<float> rows(kVocab * kHidden);
    std::promise<void> read;
    server.head->ReadGradient(flush->flush_id, 0, kVocab, kernels::DataType::kFloat32, {rows.data()},
                              [&](const absl::Status&) { read.set_value(); });
    read.get_future().wait();
    return rows;
  }
  static void ExpectSameAnswers(Server& a, Server& b) {
    const std::vector<ChunkAnswer> of_a = a.listener->AwaitAnswers(1);
    const std::vector<ChunkAnswer> of_b = b.listener->AwaitAnswers(1);
    ASSERT_EQ(of_a.size(), of_b.size());
    for (size_t i = 0; i < of_a.size(); ++i) {
      EXPECT_EQ(of_a[i].losses, of_b[i].losses);
      EXPECT_EQ(of_a[i].returns.log_sum_exp, of_b[i].returns.log_sum_exp);
      ASSERT_EQ(of_a[i].dx.size(), of_b[i].dx.size());
      EXPECT_EQ(std::memcmp(of_a[i].dx.data(), of_b[i].dx.data(), static_cast<size_t>(of_a[i].dx.size())), 0);
      EXPECT_EQ(of_a[i].weight_version, of_b[i].weight_version);
    }
  }
};

TEST_F(DeferredValuesTest, AnswersAndGradientAreThoseOfAHeadThatAddsAtOnceEvenIfWeightsAreWrittenBetween) {
  Server deferring = Make(1 << 20);
  Server eager = Make(0);
  for (Server* server : {&deferring, &eager}) {
    for (uint64_t sequence = 1; sequence <= 4; ++sequence) Submit(*server, MakeChunk(sequence));
    Write(*server, 3);
    for (uint64_t sequence = 5; sequence <= 6; ++sequence) Submit(*server, MakeChunk(sequence));
  }
  ExpectSameAnswers(deferring, eager);
  const std::vector<float> gradient = Gradient(deferring);
  EXPECT_EQ(gradient, Gradient(eager));
  EXPECT_NE(gradient[0], 0);
  EXPECT_EQ(deferring.engine->counters().chunks_deferred, 6U);
}

TEST_F(DeferredValuesTest, AClientMayOverwriteItsRegionOnceItHasTheAnswer) {
  Server deferring = Make(1 << 20);
  Server eager = Make(0);
  for (Server* server : {&deferring, &eager}) {
    const auto region = server->engine->regions().Create(RegionKind::kSystem, 1 << 16);
    ASSERT_TRUE(region.ok()) << region.status();
    ASSERT_TRUE(server->engine->regions().Attach((*region)->handle(), 1).ok());
    Chunk chunk = MakeChunk(1);
    std::byte* memory = (*region)->memory().data();
    Gather(chunk.hidden_states.parts(), memory);
    chunk.hidden_states = {};
    chunk.hidden_region = TensorRef{(*region)->handle(), 0};
    Submit(*server, std::move(chunk));
    std::memset(memory, 0x3C, 1 << 16);
  }
  ExpectSameAnswers(deferring, eager);
  EXPECT_EQ(Gradient(deferring), Gradient(eager));
}

}  // namespace
}  // namespace lossd::engine::deferred_test
