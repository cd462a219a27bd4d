// The device loop on a GPU: what batches chunks come in, and what is under way beside them, changes no
// answer.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/engine/device/cuda/cuda_device.h"
#include "tests/gpu/cuda_engine.h"
#include "tests/unit/kernels/cpu_results.h"

namespace lossd::engine::cuda_backend_test {
namespace {

using kernels::DataType;
using kernels::testing::CpuResultsInFloat32;
using kernels::testing::Problem;
using kernels::testing::RandomProblem;
using kernels::testing::RelativeError;
using kernels::testing::SameBits;

constexpr int64_t kTokens = 1300;
constexpr int64_t kVocab = 3000;
constexpr int64_t kHidden = 264;
constexpr int kSessions = 4;

std::vector<double> Widened(const std::vector<float>& values) { return {values.begin(), values.end()}; }

// What one chunk alone gives.
struct Whole {
  std::vector<float> losses;
  std::vector<float> dx;
  std::vector<float> dw;
};

Whole RunWhole(const CudaEngine& cuda) {
  const Stream stream = cuda.Open("whole");
  cuda.Submit(stream, cuda.Cut(1, 0, kTokens));
  const ChunkAnswer answer = stream.listener->AwaitAnswers(1)[0];
  return {LossesOf(answer), InputGradientsOf(answer), cuda.TakeGradient()};
}

void ExpectRows(const ChunkAnswer& answer, const Whole& whole) {
  const auto slice = [&](const std::vector<float>& values, int64_t width) {
    const auto begin = values.begin() + answer.first_token * width;
    return std::vector<float>(begin, begin + answer.tokens * width);
  };
  EXPECT_TRUE(SameBits(LossesOf(answer), slice(whole.losses, 1))) << "from token " << answer.first_token;
  if (answer.dx.size() == 0) return;
  EXPECT_TRUE(SameBits(InputGradientsOf(answer), slice(whole.dx, kHidden)))
      << "from token " << answer.first_token;
}

EngineOptions WithWindow(absl::Duration window) {
  EngineOptions options;
  options.batching_window = window;
  return options;
}

class CudaLoop : public ::testing::TestWithParam<DataType> {
 protected:
  void Start(absl::Duration window) {
    problem_ =
        RandomProblem({.shape = {kTokens, kVocab, kHidden}, .type = GetParam(), .logit_deviation = 3.0});
    for (size_t i = 0; i < kTokens; i += 7) problem_.labels[i] = -100;
    cuda_ = nullptr;
    cuda_ = CudaEngine::Create(problem_, WithWindow(window));
  }
  // As in cuda_step_test.
  double Tolerance() const {
    return GetParam() == DataType::kFloat32 ? 1e-5 : GetParam() == DataType::kBFloat16 ? 4e-3 : 1e-3;
  }

  Problem problem_;
  std::unique_ptr<CudaEngine> cuda_;
};

// Cuts the problem into small chunks and submits each session's share from a thread of its own. Returns how
// many chunks each has.
std::vector<size_t> SubmitInPieces(const CudaEngine& cuda, const std::vector<Stream>& streams) {
  std::vector<std::vector<Chunk>> shares(streams.size());
  std::mt19937 random(1);
  size_t next = 0;
  for (int64_t first = 0; first < kTokens; ++next) {
    const int64_t tokens = std::min<int64_t>(1 + static_cast<int64_t>(random() % 40), kTokens - first);
    std::vector<Chunk>& share = shares[next % streams.size()];
    share.push_back(cuda.Cut(share.size() + 1, first, tokens));
    first += tokens;
  }
  std::vector<size_t> counts;
  std::vector<std::thread> clients;
  for (size_t i = 0; i < streams.size(); ++i) {
    counts.push_back(shares[i].size());
    clients.emplace_back([&cuda, &stream = streams[i], &share = shares[i]] {
      for (Chunk& chunk : share) cuda.Submit(stream, std::move(chunk));
    });
  }
  for (std::thread& client : clients) client.join();
  return counts;
}

// A region of its own for hidden states and dX, which has the same type.
struct Shared {
  std::shared_ptr<RegionMemory> memory;
  int64_t dx_offset = 0;
  int64_t dx_bytes = 0;
};

// What the chunk holds goes to a region, and its dX is to go there too, behind it.
Shared Share(const CudaEngine& cuda, RegionKind kind, Chunk* chunk) {
  const Payload hidden_states = chunk->hidden_states.Gathered();
  const ByteSpan bytes = hidden_states.parts().front();
  Shared shared;
  shared.dx_bytes = chunk->tokens * kHidden * kernels::SizeOf(chunk->dx_type);
  shared.dx_offset = hidden_states.size();
  shared.memory = *cuda.device->CreateRegionMemory(
      kind, cuda.device->RegionBytes(kind, shared.dx_offset + shared.dx_bytes));
  std::byte* data = shared.memory->data();
  EXPECT_EQ(cudaMemcpy(data, bytes.data(), bytes.size(), cudaMemcpyDefault), cudaSuccess);
  chunk->hidden_states = Payload::In({data, bytes.size()}, shared.memory->place(), shared.memory);
  chunk->dx = {data + shared.dx_offset, shared.memory->place(), shared.memory};
  return shared;
}

ResultBytes Fetch(const Shared& shared) {
  ResultBytes dx(shared.dx_bytes);
  EXPECT_EQ(cudaMemcpy(dx.data(), shared.memory->data() + shared.dx_offset,
                       static_cast<size_t>(shared.dx_bytes), cudaMemcpyDefault),
            cudaSuccess);
  return dx;
}

TEST_P(CudaLoop, ManySmallChunksOfSeveralSessionsGiveWhatOneChunkGives) {
  // Without a window batches form by themselves; with one that does not end, everything waits for the flush
  // and is one batch.
  for (const absl::Duration window : {absl::ZeroDuration(), absl::Hours(1)}) {
    SCOPED_TRACE(absl::FormatDuration(window));
    Start(absl::ZeroDuration());
    if (cuda_ == nullptr) GTEST_SKIP() << "there is no GPU";
    const Whole whole = RunWhole(*cuda_);
    EXPECT_LT(RelativeError(whole.dw, CpuResultsInFloat32(problem_).dw),
              Tolerance() + kernels::testing::kFloat32Error);
    Start(window);
    std::vector<Stream> streams;
    for (int i = 0; i < kSessions; ++i) streams.push_back(cuda_->Open("client " + std::to_string(i)));
    const std::vector<size_t> counts = SubmitInPieces(*cuda_, streams);
    const std::vector<float> dw = cuda_->TakeGradient();
    size_t chunks = 0;
    for (size_t i = 0; i < streams.size(); ++i) {
      chunks += counts[i];
      for (const ChunkAnswer& answer : streams[i].listener->AwaitAnswers(counts[i])) {
        ExpectRows(answer, whole);
      }
      EXPECT_EQ(streams[i].listener->applied(), counts[i]);
    }
    EXPECT_LT(RelativeError(dw, Widened(whole.dw)), 1e-5) << "sums in another order";
    const SizeHistogram& gathered = cuda_->engine->counters().batch_chunks;
    EXPECT_EQ(gathered.sum(), static_cast<double>(chunks));
    if (window > absl::ZeroDuration()) {
      EXPECT_EQ(gathered.bucket(0), 0U) << "all in one batch";
    }
  }
}

// Chunks of 300 tokens are large enough for memory that the device knows, those of 60 are not, and where
// the pool has no room left they go the common way.
TEST_P(CudaLoop, WhereTheDeviceCopiesFromAndToChangesNothing) {
  constexpr int64_t kSizes[] = {300, 60, 60, 300, 20, 300, 260};
  Start(absl::ZeroDuration());
  if (cuda_ == nullptr) GTEST_SKIP() << "there is no GPU";
  const Whole whole = RunWhole(*cuda_);
  for (const int64_t pinned_bytes : {int64_t{0}, int64_t{256} << 10, int64_t{64} << 20}) {
    SCOPED_TRACE(pinned_bytes);
    cuda_ = nullptr;
    cuda_ = CudaEngine::Create(problem_, WithWindow(absl::Hours(1)), pinned_bytes);
    const Stream stream = cuda_->Open("client");
    int64_t first = 0;
    uint64_t sequence = 0;
    for (const int64_t tokens : kSizes) {
      cuda_->Submit(stream, cuda_->Cut(++sequence, first, tokens));
      first += tokens;
    }
    EXPECT_LT(RelativeError(cuda_->TakeGradient(), Widened(whole.dw)), 1e-5);
    int64_t registered = 0;
    for (const ChunkAnswer& answer : stream.listener->AwaitAnswers(std::size(kSizes))) {
      ExpectRows(answer, whole);
      registered += answer.dx.place() == MemoryPlace::kRegisteredHost ? 1 : 0;
    }
    if (pinned_bytes == 0) {
      EXPECT_EQ(registered, 0);
    } else if (pinned_bytes > int64_t{1} << 20) {
      EXPECT_EQ(registered, 4);
    }
  }
}

// Hidden states from, and dX to, memory of the device and registered memory that clients share.
TEST_P(CudaLoop, ARegionGivesWhatAPayloadGives) {
  Start(absl::ZeroDuration());
  if (cuda_ == nullptr) GTEST_SKIP() << "there is no GPU";
  const Whole whole = RunWhole(*cuda_);
  for (const RegionKind kind : {RegionKind::kSystem, RegionKind::kDevice}) {
    SCOPED_TRACE(Name(kind));
    cuda_ = nullptr;
    cuda_ = CudaEngine::Create(problem_, WithWindow(absl::Hours(1)));
    const Stream stream = cuda_->Open("client");
    std::vector<Shared> shared;
    int64_t first = 0;
    for (const int64_t tokens : {300, 7, 993}) {
      Chunk chunk = cuda_->Cut(shared.size() + 1, first, tokens);
      shared.push_back(Share(*cuda_, kind, &chunk));
      cuda_->Submit(stream, std::move(chunk));
      first += tokens;
    }
    EXPECT_LT(RelativeError(cuda_->TakeGradient(), Widened(whole.dw)), 1e-5);
    std::vector<ChunkAnswer> answers = stream.listener->AwaitAnswers(shared.size());
    for (size_t i = 0; i < answers.size(); ++i) {
      EXPECT_EQ(answers[i].dx.size(), 0);
      answers[i].dx = Fetch(shared[i]);
      ExpectRows(answers[i], whole);
    }
  }
}

TEST_P(CudaLoop, ARepeatInTheSameBatchGetsTheSameBitsAndAddsNothing) {
  Start(absl::Hours(1));
  if (cuda_ == nullptr) GTEST_SKIP() << "there is no GPU";
  const Stream once = cuda_->Open("once");
  cuda_->Submit(once, cuda_->Cut(1, 0, 300));
  cuda_->Submit(once, cuda_->Cut(2, 300, 200));
  const std::vector<float> expected = cuda_->TakeGradient();
  const Stream twice = cuda_->Open("twice");
  cuda_->Submit(twice, cuda_->Cut(1, 0, 300));
  cuda_->Submit(twice, cuda_->Cut(1, 0, 300));
  cuda_->Submit(twice, cuda_->Cut(2, 300, 200));
  cuda_->Submit(twice, cuda_->Cut(2, 300, 200));
  const std::vector<float> dw = cuda_->TakeGradient();
  EXPECT_LT(RelativeError(dw, Widened(expected)), 1e-6);
  const std::vector<ChunkAnswer> answers = twice.listener->AwaitAnswers(4);
  EXPECT_EQ(answers[1].disposition, Disposition::kRepeated);
  EXPECT_EQ(answers[3].disposition, Disposition::kRepeated);
  EXPECT_TRUE(SameBits(InputGradientsOf(answers[1]), InputGradientsOf(answers[0])));
  EXPECT_EQ(answers[3].losses, answers[2].losses);
  EXPECT_EQ(answers[0].losses, once.listener->AwaitAnswers(1)[0].losses);
}

TEST_P(CudaLoop, KindsTakeTurnsAndEveryChunkGetsItsOwn) {
  Start(absl::ZeroDuration());
  if (cuda_ == nullptr) GTEST_SKIP() << "there is no GPU";
  const Whole whole = RunWhole(*cuda_);
  const Stream stream = cuda_->Open("all kinds");
  uint64_t sequence = 0;
  for (int64_t first = 0; first + 20 <= kTokens; first += 20) {
    Chunk chunk = cuda_->Cut(++sequence, first, 20);
    if (sequence % 3 == 0) chunk.mode = ComputeMode::kLossOnly;
    if (sequence % 3 == 1) chunk.dx_type = DataType::kBFloat16;
    cuda_->Submit(stream, std::move(chunk));
  }
  Chunk ignored = cuda_->Cut(++sequence, 0, 20);
  const std::vector<int64_t> labels(20, -100);
  std::memcpy(ignored.labels.data(), labels.data(), ignored.labels.size());
  cuda_->Submit(stream, std::move(ignored));
  const std::vector<ChunkAnswer> answers = stream.listener->AwaitAnswers(sequence);
  for (size_t i = 0; i + 1 < answers.size(); ++i) {
    EXPECT_EQ(answers[i].sequence, i + 1);
    if (answers[i].dx_type == DataType::kFloat32) ExpectRows(answers[i], whole);
  }
  EXPECT_EQ(LossesOf(answers.back()), std::vector<float>(20, 0.0f));
  EXPECT_EQ(InputGradientsOf(answers.back()), std::vector<float>(20 * kHidden, 0.0f));
}

INSTANTIATE_TEST_SUITE_P(All, CudaLoop,
                         ::testing::Values(DataType::kBFloat16, DataType::kFloat16, DataType::kFloat32),
                         [](const auto& test) { return std::string(kernels::Name(test.param)); });

// One batch of a head that is large enough for dW to take a while.
struct LargeBatch {
  static constexpr int64_t kRows = 1536;  // one tile
  static constexpr int64_t kWidth = 512;
  static constexpr int64_t kEntries = 400000;

  ChunkRows Describe() {
    for (int64_t i = 0; i < kRows; ++i) labels[static_cast<size_t>(i)] = i * 61;
    ChunkRows rows;
    rows.tokens = kRows;
    rows.hidden_states.data = hidden_states.data();
    rows.labels = labels.data();
    rows.losses = losses.data();
    rows.dx = dx.data();
    return rows;
  }

  std::vector<uint16_t> hidden_states = std::vector<uint16_t>(kRows * kWidth, 0x3c00);  // 2^-7 in bf16
  std::vector<int64_t> labels = std::vector<int64_t>(kRows);
  std::vector<float> losses = std::vector<float>(kRows);
  std::vector<uint16_t> dx = std::vector<uint16_t>(kRows * kWidth);
  int answered_at = -1;  // the call of Poll
  int done_at = -1;
};

TEST(CudaPipeline, HasThreeBatchesUnderWayAndAnswersBeforeTheGradientIsComplete) {
  absl::StatusOr<std::unique_ptr<Device>> device = CreateCudaDevice(0, {});
  if (!device.ok()) GTEST_SKIP() << device.status();
  const HeadConfig config{"h", LargeBatch::kEntries, LargeBatch::kWidth, DataType::kBFloat16};
  const std::unique_ptr<HeadBackend> head = *(*device)->CreateHead(config);
  ASSERT_TRUE(head->PublishWeights({*HostBuffer::Create(config.weight_bytes(), Commit::kNow)}).ok());
  const BatchKey kind{DataType::kBFloat16, DataType::kBFloat16, ComputeMode::kLossAndGradients};
  int polls = 0;
  std::vector<LargeBatch> batches(6);
  size_t started = 0;
  size_t done = 0;
  while (done < batches.size()) {
    while (started < batches.size() && (*device)->BatchesUnderWay() < (*device)->MostBatches()) {
      LargeBatch& batch = batches[started++];
      const ChunkRows rows = batch.Describe();
      BatchCallbacks callbacks;
      callbacks.on_input_gradients = [&](size_t /*chunk*/) { batch.answered_at = polls; };
      callbacks.on_done = [&](const absl::StatusOr<BatchReport>& report) {
        EXPECT_TRUE(report.ok()) << report.status();
        EXPECT_EQ(&batch, &batches[done]) << "in the order in which they were started";
        batch.done_at = polls;
        ++done;
      };
      head->StartBatch(kind, {&rows, 1}, std::move(callbacks));
    }
    if (polls == 0) {
      EXPECT_EQ((*device)->BatchesUnderWay(), 3);
    }
    ++polls;
    (*device)->Poll();
  }
  int early = 0;
  for (const LargeBatch& batch : batches) {
    EXPECT_LE(batch.answered_at, batch.done_at);
    early += batch.answered_at < batch.done_at ? 1 : 0;
    EXPECT_NEAR(batch.losses[0], std::log(static_cast<double>(LargeBatch::kEntries)), 1e-3);
  }
  EXPECT_GT(early, 0) << "adding to dW takes longer than one call of Poll";
}

// What is copied beside batches is what there was, though steps and writes are asked for at once.
TEST(CudaState, ACopyIsOfTheMomentThatItWasBegunAt) {
  absl::StatusOr<std::unique_ptr<Device>> device = CreateCudaDevice(0, {});
  if (!device.ok()) GTEST_SKIP() << device.status();
  HeadConfig config{"h", 1 << 16, 1000, DataType::kBFloat16};  // rows are padded
  config.bias = true;
  config.optimizer.kind = OptimizerKind::kAdamW;
  config.optimizer.weight_decay = 0.1;
  const std::unique_ptr<HeadBackend> head = *(*device)->CreateHead(config);
  const auto publish = [&](int value) {
    HostBuffer weights = *HostBuffer::Create(config.weight_bytes(), Commit::kNow);
    std::memset(weights.data(), value, static_cast<size_t>(weights.size()));
    HostBuffer bias = *HostBuffer::Create(config.bias_bytes(), Commit::kNow);
    ASSERT_TRUE(head->PublishWeights({std::move(weights), std::move(bias)}).ok());
  };
  publish(0x3c);
  const StepArguments step{.learning_rate = 0.1, .optimizer = config.optimizer};
  ASSERT_TRUE(head->ApplyStep(nullptr, step).ok());
  std::vector<std::string> before;
  std::vector<std::shared_ptr<RegionMemory>> memory;
  std::vector<StateCopy> copies;
  for (const StateTensor& tensor : head->StateTensors()) {
    const int64_t bytes = tensor.rows * tensor.columns * kernels::SizeOf(tensor.type);
    before.emplace_back(static_cast<size_t>(bytes), '\0');
    ASSERT_TRUE(head->ReadState(tensor.name, 0, tensor.rows, before.back().data()).ok());
    memory.push_back(*(*device)->CreateRegionMemory(RegionKind::kSystem, WholePages(bytes)));
    copies.push_back({tensor, memory.back()->data()});
  }
  for (const auto& change : std::vector<std::function<void()>>{
           [&] { ASSERT_TRUE(head->ApplyStep(nullptr, step).ok()); }, [&] { publish(0x3d); }}) {
    for (size_t i = 0; i < copies.size(); ++i) {
      ASSERT_TRUE(head->ReadState(copies[i].tensor.name, 0, copies[i].tensor.rows, before[i].data()).ok());
    }
    const absl::StatusOr<HeadBackend::CopyDone> done = head->CopyState(copies);
    ASSERT_TRUE(done.ok()) << done.status();
    change();
    ASSERT_TRUE((*done)().ok());
    for (size_t i = 0; i < copies.size(); ++i) {
      EXPECT_EQ(std::memcmp(copies[i].out, before[i].data(), before[i].size()), 0) << copies[i].tensor.name;
    }
  }
}

TEST(CudaDevice, AHeadThatDoesNotFitIsRefusedAndHarmsNothing) {
  absl::StatusOr<std::unique_ptr<Device>> device = CreateCudaDevice(0, {});
  if (!device.ok()) GTEST_SKIP() << device.status();
  const HeadConfig huge{"huge", int64_t{1} << 25, 4096, DataType::kBFloat16};  // 768 GiB
  EXPECT_EQ((*device)->CreateHead(huge).status().code(), absl::StatusCode::kResourceExhausted);
  const HeadConfig small{"small", 64, 8, DataType::kBFloat16};
  const std::unique_ptr<HeadBackend> head = *(*device)->CreateHead(small);
  ASSERT_TRUE(head->PublishWeights({*HostBuffer::Create(small.weight_bytes(), Commit::kNow)}).ok());
  const std::vector<float> hidden(8, 1.0f);
  const int64_t label = 3;
  float loss = 0;
  std::vector<float> dx(8);
  ChunkRows rows;
  rows.tokens = 1;
  rows.hidden_states.data = hidden.data();
  rows.labels = &label;
  rows.losses = &loss;
  rows.dx = dx.data();
  bool done = false;
  head->StartBatch({}, {&rows, 1},
                   {[](size_t) {}, [&](const absl::StatusOr<BatchReport>& report) { done = report.ok(); }});
  while ((*device)->BatchesUnderWay() > 0) (*device)->Poll();
  EXPECT_TRUE(done);
  EXPECT_NEAR(loss, std::log(64.0), 1e-5);
}

}  // namespace
}  // namespace lossd::engine::cuda_backend_test
