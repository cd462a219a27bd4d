#include "server/engine/head/parts/batch_runner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/engine/common/errors.h"
#include "tests/unit/engine/fake_device.h"

namespace lossd::engine::batch_runner_test {
namespace {

using WeightGradient = ChunkItem::WeightGradient;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kHidden = 2;
constexpr int64_t kIgnoreIndex = -100;

// Keeps what it is told to compute until the test lets it answer or end it.
class ScriptedBackend : public HeadBackend {
 public:
  struct Batch {
    BatchKey kind;
    std::vector<ChunkRows> chunks;
    BatchCallbacks callbacks;
  };

  // All losses of a chunk are `loss`.
  static void Answer(Batch& batch, size_t chunk, float loss = 1) {
    const ChunkRows& rows = batch.chunks[chunk];
    if (rows.losses != nullptr) std::fill_n(rows.losses, rows.tokens, loss);
    if (rows.returns.z_loss != nullptr) std::fill_n(rows.returns.z_loss, rows.tokens, 0.5f);
    batch.callbacks.on_input_gradients(chunk);
  }
  // Answers what was not answered, and ends it.
  static void Finish(Batch& batch, size_t answered = 0) {
    for (size_t i = answered; i < batch.chunks.size(); ++i) Answer(batch, i);
    batch.callbacks.on_done(BatchReport{});
  }

  absl::Status PublishWeights(WeightBuffers /*staged*/) override { return absl::OkStatus(); }
  absl::Status ReadWeightRows(int64_t /*first_row*/, int64_t /*rows*/, kernels::DataType /*type*/,
                              void* /*out*/) override {
    return absl::OkStatus();
  }
  absl::Status ReadBias(int64_t /*first_row*/, int64_t /*rows*/, float* /*out*/) override {
    return absl::OkStatus();
  }
  int64_t RowsPerBatch(const BatchKey& /*kind*/) const override { return 1; }
  void StartBatch(const BatchKey& kind, std::span<const ChunkRows> chunks,
                  BatchCallbacks callbacks) override {
    batches.push_back({kind, {chunks.begin(), chunks.end()}, std::move(callbacks)});
  }
  absl::Status ReadGradient(const Gradient* /*gradient*/, int64_t /*first_row*/, int64_t /*rows*/,
                            float* /*out*/) override {
    return absl::OkStatus();
  }
  absl::Status ReadBiasGradient(const Gradient* /*gradient*/, int64_t /*first_row*/, int64_t /*rows*/,
                                float* /*out*/) override {
    return absl::OkStatus();
  }
  void Reset(Gradient* /*gradient*/) override {}
  MemoryPlan MemoryReport() const override { return {}; }

  std::deque<Batch> batches;  // in the order in which they were started; those that ended stay
};

// What owner, listeners and callers were told, in order.
using Events = std::vector<std::string>;

class Owner : public BatchOwner {
 public:
  explicit Owner(Events* events) : events_(events) {}
  void OnBatchEnded() override { events_->push_back("batch ended"); }
  void OnChunkAnswered(const ChunkItem& /*item*/) override {}
  void OnChunkDone(ChunkItem& item) override {
    events_->push_back(absl::StrCat("done ", item.chunk.sequence));
  }
  void OnDeviceFailure(const absl::Status& status) override {
    events_->push_back(absl::StrCat("failure: ", status.message()));
  }

 private:
  Events* const events_;
};

class Listener : public LaneListener {
 public:
  explicit Listener(Events* events) : events_(events) {}
  void OnAnswer(ChunkAnswer answer) override {
    events_->push_back(absl::StrCat("answer ", answer.sequence));
    answers.push_back(std::move(answer));
  }
  void OnApplied(uint64_t /*applied*/) override {}
  void OnEnd(absl::Status /*status*/) override {}

  std::vector<ChunkAnswer> answers;

 private:
  Events* const events_;
};

class BatchRunnerTest : public ::testing::Test {
 protected:
  BatchRunnerTest() {
    config_.hidden_size = kHidden;
    config_.vocab_size = 4;
  }

  // Two tokens, of which the second is ignored, whose dW goes with the batch.
  StartedChunk MakeChunk(uint64_t sequence) const {
    StartedChunk started;
    started.item = std::make_shared<ChunkItem>();
    ChunkItem& item = *started.item;
    item.weight_gradient = WeightGradient::kWithBatch;
    item.rows = 2;
    item.listener = listener_;
    item.chunk.sequence = sequence;
    item.chunk.tokens = 2;
    for (const int64_t label : {int64_t{1}, kIgnoreIndex}) {
      item.chunk.labels.append(reinterpret_cast<const char*>(&label), sizeof(label));
    }
    item.chunk.hidden_states = Payload::Of(std::string(2 * kHidden * 4, '\0'));
    started.answer.sequence = sequence;
    started.answer.tokens = 2;
    return started;
  }
  StartedChunk LossOnly(uint64_t sequence) const {
    StartedChunk started = MakeChunk(sequence);
    started.item->chunk.mode = started.item->batch_key.mode = ComputeMode::kLossOnly;
    started.item->weight_gradient = WeightGradient::kNone;
    return started;
  }
  StartedChunk Repeat(uint64_t sequence) const {
    StartedChunk started = MakeChunk(sequence);
    started.item->repeat = true;
    started.item->weight_gradient = WeightGradient::kNone;
    return started;
  }
  StartedChunk Rejected(uint64_t sequence) const {
    StartedChunk started = MakeChunk(sequence);
    started.item->Reject(Invalid(RejectReason::kLabel, "labels", absl::StrCat("chunk ", sequence)));
    return started;
  }
  static StartedChunk HeldBy(int32_t rank, StartedChunk chunk) {
    chunk.item->batch_key.holder = rank;
    return chunk;
  }
  // Rows of a tile of a deterministic session.
  StartedChunk MakePiece() const {
    StartedChunk started = MakeChunk(0);
    started.item->chunk.mode = started.item->batch_key.mode = ComputeMode::kWeightGradientOnly;
    return started;
  }

  template <typename... Chunks>
  static std::deque<StartedChunk> All(Chunks... chunks) {
    std::deque<StartedChunk> all;
    (all.push_back(std::move(chunks)), ...);
    return all;
  }
  void Run(const std::string& name, std::deque<StartedChunk> chunks,
           std::shared_ptr<TeacherLease> teacher = nullptr) {
    runner_.Run(owner_, std::move(chunks), std::move(teacher),
                [this, name] { events_.push_back("ended " + name); });
  }
  ScriptedBackend::Batch& Batch(size_t number) { return backend_.batches.at(number); }

  HeadConfig config_;
  ScriptedBackend backend_;
  FakeGate gate_;
  std::unique_ptr<Device> device_ = MakeFakeDevice(&gate_);
  Counters counters_;
  HeadCounters head_counters_;
  BatchRunner::DeviceDone device_done_ = std::make_shared<std::optional<absl::Time>>();
  Events events_;
  std::shared_ptr<Owner> owner_ = std::make_shared<Owner>(&events_);
  std::shared_ptr<Listener> listener_ = std::make_shared<Listener>(&events_);
  BatchRunner runner_{{.config = &config_,
                       .backend = &backend_,
                       .device = device_.get(),
                       .counters = &counters_,
                       .head_counters = &head_counters_,
                       .device_done = device_done_}};
};

TEST_F(BatchRunnerTest, OnlyChunksWhoseShareGoesWithTheBatchCountInTheGradient) {
  StartedChunk in_tiles = MakeChunk(3);
  in_tiles.item->weight_gradient = WeightGradient::kIntoTiles;
  Run("a", All(MakeChunk(1), Repeat(2), std::move(in_tiles), MakeChunk(4)));
  std::vector<bool> accumulated;
  for (const ChunkRows& rows : Batch(0).chunks) {
    accumulated.push_back(rows.accumulate == ChunkRows::Accumulate::kYes);
  }
  EXPECT_THAT(accumulated, ElementsAre(true, false, false, true));
}

TEST_F(BatchRunnerTest, TheDeviceGetsTheKindAndTheRowsOfChunksThatAreNotRejected) {
  StartedChunk chunk = MakeChunk(2);
  chunk.item->batch_key.options.label_smoothing = 0.1f;
  chunk.item->chunk.gradient_scale = 3;
  chunk.item->chunk.ignore_index = 7;
  const ChunkItem& item = *chunk.item;
  Run("a", All(Rejected(1), std::move(chunk), Rejected(3)));
  EXPECT_EQ(Batch(0).kind, item.batch_key);
  ASSERT_THAT(Batch(0).chunks, SizeIs(1));
  const ChunkRows& rows = Batch(0).chunks[0];
  EXPECT_EQ(rows.tokens, 2);
  EXPECT_EQ(rows.gradient_scale, 3);
  EXPECT_EQ(rows.ignore_index, 7);
  EXPECT_EQ(rows.labels, reinterpret_cast<const int64_t*>(item.chunk.labels.data()));
  EXPECT_EQ(rows.hidden_states.data, item.chunk.hidden_states.parts()[0].data());
}

TEST_F(BatchRunnerTest, InputGradientsGoIntoTheAnswerInTheirTypeOrWhereTheChunkWantsThem) {
  StartedChunk narrow = MakeChunk(1);
  narrow.item->chunk.dx_type = kernels::DataType::kBFloat16;
  StartedChunk elsewhere = MakeChunk(2);
  alignas(16) std::byte region[2 * kHidden * 4];
  elsewhere.item->chunk.dx = {region, MemoryPlace::kRegisteredHost, nullptr};
  Run("a", All(std::move(narrow), std::move(elsewhere), LossOnly(3)));
  std::vector<const void*> places;
  for (const ChunkRows& rows : Batch(0).chunks) places.push_back(rows.dx);
  ScriptedBackend::Finish(Batch(0));
  EXPECT_EQ(listener_->answers[0].dx.size(), 2 * kHidden * 2);
  EXPECT_EQ(listener_->answers[0].dx_type, kernels::DataType::kBFloat16);
  EXPECT_THAT(places, ElementsAre(listener_->answers[0].dx.data(), region, nullptr));
  EXPECT_EQ(listener_->answers[1].dx.size(), 0) << "it is in the region";
  EXPECT_EQ(listener_->answers[2].dx.size(), 0);
}

TEST_F(BatchRunnerTest, UpstreamGradientsAreLeftOutWhereTheLossAloneIsWanted) {
  const std::string gradients(2 * sizeof(float), '\0');
  StartedChunk trains = MakeChunk(1);
  StartedChunk evaluates = LossOnly(2);
  trains.item->chunk.lse_gradients = evaluates.item->chunk.lse_gradients = gradients;
  trains.item->chunk.entropy_gradients = evaluates.item->chunk.entropy_gradients = gradients;
  Run("a", All(std::move(trains), std::move(evaluates)));
  EXPECT_NE(Batch(0).chunks[0].lse_gradients, nullptr);
  EXPECT_EQ(Batch(0).chunks[1].lse_gradients, nullptr);
  EXPECT_NE(Batch(0).chunks[0].entropy_gradients, nullptr);
  EXPECT_EQ(Batch(0).chunks[1].entropy_gradients, nullptr);
}

TEST_F(BatchRunnerTest, ChunksAreAnsweredAsTheirResultsComeAndDoneWhenTheBatchIs) {
  Run("a", All(MakeChunk(1), MakeChunk(2)));
  EXPECT_THAT(events_, IsEmpty());
  ScriptedBackend::Answer(Batch(0), 0);
  EXPECT_THAT(events_, ElementsAre("answer 1"));
  ScriptedBackend::Answer(Batch(0), 1);
  EXPECT_THAT(events_, ElementsAre("answer 1", "answer 2"));
  Batch(0).callbacks.on_done(BatchReport{.rows_redone = 3});
  EXPECT_THAT(events_, ElementsAre("answer 1", "answer 2", "batch ended", "done 1", "done 2", "ended a"));
  EXPECT_EQ(counters_.rows_redone, 3U);
}

TEST_F(BatchRunnerTest, BatchesUnderWayTogetherEndInTheirOrderEachWithItsOwnChunks) {
  Run("a", All(MakeChunk(1)));
  Run("b", All(MakeChunk(2)));
  ScriptedBackend::Answer(Batch(0), 0);
  ScriptedBackend::Answer(Batch(1), 0);
  EXPECT_THAT(events_, ElementsAre("answer 1", "answer 2"));
  events_.clear();
  Batch(0).callbacks.on_done(BatchReport{});
  EXPECT_THAT(events_, ElementsAre("batch ended", "done 1", "ended a"));
  events_.clear();
  Run("c", All(Rejected(3)));
  EXPECT_THAT(events_, ElementsAre("answer 3")) << "it joins b, which is answered and not done";
  events_.clear();
  Batch(1).callbacks.on_done(BatchReport{});
  EXPECT_THAT(events_, ElementsAre("batch ended", "done 2", "done 3", "ended b", "ended c"));
}

TEST_F(BatchRunnerTest, ARejectedChunkGetsItsErrorInItsTurn) {
  Run("a", All(Rejected(1), MakeChunk(2), Rejected(3), MakeChunk(4), Rejected(5)));
  EXPECT_THAT(events_, ElementsAre("answer 1")) << "nothing is before it";
  ScriptedBackend::Answer(Batch(0), 0);
  EXPECT_THAT(events_, ElementsAre("answer 1", "answer 2", "answer 3"));
  ScriptedBackend::Answer(Batch(0), 1);
  EXPECT_THAT(events_, ElementsAre("answer 1", "answer 2", "answer 3", "answer 4", "answer 5"));
  for (const ChunkAnswer& answer : listener_->answers) {
    const bool rejected = answer.sequence % 2 == 1;
    EXPECT_EQ(answer.disposition, rejected ? Disposition::kRejected : Disposition::kAccumulated);
    EXPECT_EQ(answer.error.message(), rejected ? absl::StrCat("chunk ", answer.sequence) : "");
  }
  EXPECT_EQ(counters_.chunks_rejected, 3U);
  EXPECT_EQ(head_counters_.chunks_rejected, 3U);
  EXPECT_EQ(counters_.rejected[static_cast<size_t>(RejectReason::kLabel)], 3U);
}

TEST_F(BatchRunnerTest, RejectedChunksCostTheDeviceNothing) {
  Run("a", All(Rejected(1), Rejected(2)));
  EXPECT_THAT(backend_.batches, IsEmpty());
  EXPECT_THAT(events_, ElementsAre("answer 1", "answer 2", "batch ended", "done 1", "done 2", "ended a"));
}

TEST_F(BatchRunnerTest, RejectedChunksThatComeLaterWaitForTheLastBatchUnderWay) {
  Run("a", All(MakeChunk(1)));
  Run("b", All(MakeChunk(2)));
  Run("c", All(Rejected(3)));
  EXPECT_THAT(backend_.batches, SizeIs(2));
  ScriptedBackend::Answer(Batch(0), 0);
  EXPECT_THAT(events_, ElementsAre("answer 1"));
  ScriptedBackend::Answer(Batch(1), 0);
  EXPECT_THAT(events_, ElementsAre("answer 1", "answer 2", "answer 3"));
  Run("d", All(Rejected(4)));
  EXPECT_THAT(events_, ElementsAre("answer 1", "answer 2", "answer 3", "answer 4"))
      << "nothing is before it that was not answered";
  events_.clear();
  Batch(0).callbacks.on_done(BatchReport{});
  EXPECT_THAT(events_, ElementsAre("batch ended", "done 1", "ended a"));
  events_.clear();
  Batch(1).callbacks.on_done(BatchReport{});
  EXPECT_THAT(events_,
              ElementsAre("batch ended", "done 2", "done 3", "done 4", "ended b", "ended c", "ended d"));
}

// Batches of different holders are answered in any order, chunks of one lane in theirs.
TEST_F(BatchRunnerTest, ARejectedChunkWaitsForThoseOfItsHolderWhateverBatchItIsIn) {
  Run("a", All(HeldBy(1, MakeChunk(1))));
  Run("b", All(HeldBy(1, Rejected(2)), MakeChunk(3)));
  ScriptedBackend::Answer(Batch(1), 0);
  EXPECT_THAT(events_, ElementsAre("answer 3"));
  ScriptedBackend::Answer(Batch(0), 0);
  EXPECT_THAT(events_, ElementsAre("answer 3", "answer 1", "answer 2"));
  events_.clear();
  Batch(0).callbacks.on_done(BatchReport{});
  Batch(1).callbacks.on_done(BatchReport{});
  EXPECT_THAT(events_,
              ElementsAre("batch ended", "done 1", "ended a", "batch ended", "done 2", "done 3", "ended b"));
}

TEST_F(BatchRunnerTest, ARejectedChunkDoesNotWaitForAnotherHoldersChunks) {
  Run("a", All(MakeChunk(1)));
  Run("b", All(HeldBy(1, Rejected(2))));
  Run("c", All(HeldBy(1, MakeChunk(3))));
  EXPECT_THAT(events_, ElementsAre("answer 2"));
  ScriptedBackend::Answer(Batch(1), 0);
  EXPECT_THAT(events_, ElementsAre("answer 2", "answer 3"));
}

TEST_F(BatchRunnerTest, ChunksOfABatchThatFailsAreNotInTheWayOfThoseBehindIt) {
  Run("a", All(HeldBy(1, MakeChunk(1))));
  Run("b", All(HeldBy(1, MakeChunk(2)), HeldBy(2, Rejected(3))));
  events_.clear();
  Batch(0).callbacks.on_done(absl::InternalError("it burns"));
  events_.clear();
  ScriptedBackend::Finish(Batch(1));
  EXPECT_THAT(events_, ElementsAre("answer 2", "batch ended", "done 2", "done 3", "ended b"));
}

TEST_F(BatchRunnerTest, ABatchThatFailsEndsWithoutAChunkThatIsDone) {
  Run("a", All(MakeChunk(1), MakeChunk(2), Rejected(3)));
  Run("b", All(Rejected(4)));
  ScriptedBackend::Answer(Batch(0), 0);
  events_.clear();
  Batch(0).callbacks.on_done(absl::InternalError("it burns"));
  EXPECT_THAT(events_, ElementsAre("batch ended", "failure: it burns", "ended a", "ended b"))
      << "chunks 2, 3 and 4 have no results: their streams end";
  EXPECT_EQ(counters_.chunks_accumulated, 1U) << "chunk 1 was answered";
  Run("c", All(MakeChunk(5)));
  events_.clear();
  ScriptedBackend::Finish(Batch(1));
  EXPECT_THAT(events_, ElementsAre("answer 5", "batch ended", "done 5", "ended c"))
      << "what comes later is not mixed up with it";
}

TEST_F(BatchRunnerTest, ATeacherIsInUseFromTheStartOfABatchToItsEndHoweverItEnds) {
  const auto teacher = std::make_shared<TeacherLease>();
  Run("a", All(MakeChunk(1)), teacher);
  Run("b", All(MakeChunk(2)), teacher);
  Run("c", All(MakeChunk(3)));
  bool released = false;
  teacher->WhenUnused([&released] { released = true; });
  ScriptedBackend::Finish(Batch(0));
  EXPECT_FALSE(released) << "batch b computes with it";
  Batch(1).callbacks.on_done(absl::InternalError("it burns"));
  EXPECT_TRUE(released);
}

TEST_F(BatchRunnerTest, AnOwnerAndATeacherStayUntilTheBatchHasEnded) {
  auto teacher = std::make_shared<TeacherLease>();
  const std::weak_ptr<TeacherLease> weak_teacher = teacher;
  const std::weak_ptr<Owner> weak_owner = owner_;
  bool owner_was_there = false;
  runner_.Run(std::exchange(owner_, nullptr), All(MakeChunk(1)), std::exchange(teacher, nullptr),
              [&] { owner_was_there = !weak_owner.expired(); });
  EXPECT_FALSE(weak_owner.expired());
  EXPECT_FALSE(weak_teacher.expired());
  ScriptedBackend::Finish(Batch(0));
  EXPECT_TRUE(owner_was_there);
  Batch(0).callbacks = {};
  EXPECT_TRUE(weak_owner.expired());
  EXPECT_TRUE(weak_teacher.expired());
}

TEST_F(BatchRunnerTest, ARepeatIsAnsweredAsOneAndCountsNowhere) {
  Run("a", All(Repeat(1)));
  ScriptedBackend::Finish(Batch(0));
  ASSERT_THAT(listener_->answers, SizeIs(1));
  EXPECT_EQ(listener_->answers[0].disposition, Disposition::kRepeated);
  EXPECT_EQ(listener_->answers[0].loss_sum, 1);
  EXPECT_EQ(counters_.chunks_repeated, 1U);
  EXPECT_EQ(counters_.chunks_accumulated + counters_.chunks_input_gradient, 0U);
  EXPECT_EQ(counters_.tokens_valid + counters_.tokens_ignored, 0U);
  EXPECT_EQ(head_counters_.tokens, 0U);
  EXPECT_EQ(head_counters_.loss_tokens, 0U);
}

TEST_F(BatchRunnerTest, EveryOtherChunkIsCountedOnceByItsMode) {
  StartedChunk in_tiles = MakeChunk(2);
  in_tiles.item->weight_gradient = WeightGradient::kIntoTiles;
  StartedChunk frozen = MakeChunk(4);
  frozen.item->weight_gradient = WeightGradient::kNone;
  Run("a", All(MakeChunk(1), std::move(in_tiles), LossOnly(3), std::move(frozen)));
  ScriptedBackend::Finish(Batch(0));
  EXPECT_EQ(counters_.chunks_accumulated, 2U);
  EXPECT_EQ(counters_.chunks_loss_only, 1U);
  EXPECT_EQ(counters_.chunks_input_gradient, 1U);
  EXPECT_EQ(counters_.chunks_repeated + counters_.chunks_rejected, 0U);
  EXPECT_EQ(counters_.tokens_valid, 4U);
  EXPECT_EQ(counters_.tokens_ignored, 4U);
}

TEST_F(BatchRunnerTest, APieceOfATileCountsInTheGradientAndIsNotAnswered) {
  Run("a", All(MakePiece()));
  const ChunkRows& rows = Batch(0).chunks.at(0);
  EXPECT_EQ(rows.accumulate, ChunkRows::Accumulate::kYes);
  EXPECT_EQ(rows.losses, nullptr);
  EXPECT_EQ(rows.dx, nullptr);
  ScriptedBackend::Finish(Batch(0));
  EXPECT_THAT(events_, ElementsAre("batch ended", "done 0", "ended a"));
  EXPECT_EQ(counters_.chunks_accumulated, 0U) << "its chunks were counted when they were answered";
  EXPECT_EQ(counters_.tokens_valid, 0U);
}

TEST_F(BatchRunnerTest, LossesOfTrainingAndOfEvaluationAreSummedApart) {
  StartedChunk weighted = MakeChunk(3);
  weighted.item->chunk.token_weights = std::string(2 * sizeof(float), '\0');
  Run("a", All(MakeChunk(1), LossOnly(2), std::move(weighted), MakeChunk(4)));
  ScriptedBackend::Answer(Batch(0), 0, 3);
  ScriptedBackend::Answer(Batch(0), 1, 5);
  ScriptedBackend::Answer(Batch(0), 2, 100);
  ScriptedBackend::Answer(Batch(0), 3, 4);
  Batch(0).callbacks.on_done(BatchReport{});
  EXPECT_EQ(head_counters_.tokens, 4U);
  EXPECT_EQ(head_counters_.loss_tokens, 2U);
  EXPECT_EQ(head_counters_.loss_nats, 7);
  EXPECT_EQ(head_counters_.evaluation_tokens, 1U);
  EXPECT_EQ(head_counters_.evaluation_nats, 5);
  EXPECT_EQ(head_counters_.loss, 3.5) << "the mean of the batch, without what is weighted";
}

TEST_F(BatchRunnerTest, ALossThatIsNotFiniteStaysOutOfTheSums) {
  Run("a", All(MakeChunk(1), MakeChunk(2)));
  ScriptedBackend::Answer(Batch(0), 0, std::numeric_limits<float>::infinity());
  ScriptedBackend::Answer(Batch(0), 1, 2);
  EXPECT_EQ(counters_.non_finite_losses, 1U);
  EXPECT_EQ(head_counters_.loss_tokens, 1U);
  EXPECT_EQ(head_counters_.loss_nats, 2);
  EXPECT_EQ(listener_->answers[0].non_finite_losses, 1);
}

TEST_F(BatchRunnerTest, WhatIsComputedForItsSumAloneIsNotReturned) {
  StartedChunk sum_only = MakeChunk(1);
  sum_only.item->batch_key.returns.z_loss = true;
  StartedChunk wanted = MakeChunk(2);
  wanted.item->batch_key.returns.z_loss = wanted.item->chunk.options.returns.z_loss = true;
  Run("a", All(std::move(sum_only), std::move(wanted)));
  ScriptedBackend::Finish(Batch(0));
  EXPECT_THAT(listener_->answers[0].returns.z_losses, IsEmpty());
  EXPECT_THAT(listener_->answers[1].returns.z_losses, SizeIs(2 * sizeof(float)));
  EXPECT_EQ(listener_->answers[0].z_loss_sum, 0.5);
  EXPECT_EQ(listener_->answers[1].z_loss_sum, 0.5);
}

TEST_F(BatchRunnerTest, OnlyAChunkThatAsksIsToldItsTimesAndTheyDoNotGoBack) {
  StartedChunk asks = MakeChunk(1);
  asks.item->chunk.timing = Timing::kReport;
  Run("a", All(std::move(asks), MakeChunk(2)));
  Run("b", All(MakeChunk(3)));
  EXPECT_FALSE(Batch(1).callbacks.on_times) << "nobody asks";
  const absl::Time input_ready = absl::Now();
  const absl::Time computed = input_ready + absl::Microseconds(5);
  *device_done_ = input_ready + absl::Microseconds(2);
  Batch(0).callbacks.on_times({.input_ready = input_ready, .computed = computed});
  ScriptedBackend::Finish(Batch(0));
  EXPECT_FALSE(listener_->answers[1].times.has_value());
  ASSERT_TRUE(listener_->answers[0].times.has_value());
  const ChunkTimes& times = *listener_->answers[0].times;
  EXPECT_EQ(times.input_ready, input_ready);
  EXPECT_EQ(times.compute_started, input_ready + absl::Microseconds(2))
      << "when the device was done with what was before";
  EXPECT_EQ(times.computed, computed);
  EXPECT_LE(times.started, times.input_ready);
  EXPECT_GT(**device_done_, input_ready + absl::Microseconds(2)) << "now it is done with this one";
}

}  // namespace
}  // namespace lossd::engine::batch_runner_test
