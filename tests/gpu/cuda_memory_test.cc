// After a head is created nothing can run the device out of memory: everything works while not a byte of it
// is left.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/memory/owners.h"
#include "tests/conformance/head_under_test.h"

namespace lossd::engine::testing::cuda_memory_test {
namespace {

using kernels::cuda::DeviceBuffer;
using kernels::testing::Narrowed;
using kernels::testing::RandomProblem;
using kernels::testing::RandomTeacher;
using kernels::testing::RelativeError;
using kernels::testing::SetLogit;
using ::testing::HasSubstr;

struct DeviceMemory {
  int64_t free = 0;
  int64_t total = 0;
};

DeviceMemory ReadDeviceMemory() {
  size_t free = 0;
  size_t total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return {static_cast<int64_t>(free), static_cast<int64_t>(total)};
}

// Everything that cudaMalloc gives, down to its smallest piece.
std::vector<DeviceBuffer> TakeAllMemory() {
  constexpr int64_t kSmallest = 256;
  std::vector<DeviceBuffer> taken;
  for (int64_t bytes = ReadDeviceMemory().total; bytes >= kSmallest;) {
    DeviceBuffer buffer;
    if (DeviceBuffer::Create(bytes, &buffer).ok()) {
      taken.push_back(std::move(buffer));
    } else {
      (void)cudaGetLastError();
      bytes /= 2;
    }
  }
  return taken;
}

class CudaMemory : public HeadTest {
 protected:
  static constexpr int64_t kVocab = 5003;

  // A chunk of the most rows that one may have.
  Problem LargestChunk(int64_t hidden) const {
    return RandomProblem(
        {.shape = {kMaxChunkTokens, kVocab, hidden}, .type = type(), .logit_deviation = 2.0});
  }

  // With everything that steps and windows take.
  HeadConfig SteppingHead(int64_t hidden) const {
    HeadConfig config{"h", kVocab, hidden, type()};
    config.optimizer.kind = OptimizerKind::kAdamW;
    config.master_weights = type() != DataType::kFloat32;
    config.double_buffer = true;
    return config;
  }

  // After a batch that leaves a part of its gradient beside dW; the second gradient is taken with the head.
  static void UseSteps(HeadUnderTest& head, Gradient* second, const Problem& problem) {
    Problem smoothed = problem;
    smoothed.options.label_smoothing = 0.1f;
    HeadBackend& backend = head.backend();
    for (int64_t step = 1; step <= 2; ++step) {
      BatchKey kind = KindOf(smoothed);
      for (Gradient* to : {static_cast<Gradient*>(nullptr), second}) {
        kind.gradient = to;
        head.Run(kind, {RowsOf(smoothed, 0, 300)});
      }
      EXPECT_TRUE(backend.Fold(second, nullptr).ok());
      EXPECT_TRUE(backend.Summarize(nullptr, 0.5).ok());
      const StepArguments arguments{
          .learning_rate = 1e-3, .optimizer = head.config().optimizer, .step = step};
      EXPECT_TRUE(backend.ApplyStep(nullptr, arguments).ok());
      backend.ResetGradient();
      EXPECT_TRUE(backend.ApplyStep(nullptr, arguments).ok());
      EXPECT_TRUE(backend.RestoreState().ok());
      const std::vector<float> row(static_cast<size_t>(head.config().hidden_size));
      EXPECT_TRUE(backend.WriteGradient(nullptr, 0, 1, row.data(), nullptr).ok());
      backend.ResetGradient();
    }
  }

  void UseEverything(HeadUnderTest& head, const Problem& problem) const {
    for (int i = 0; i < 2; ++i) {
      head.Publish(problem.weight);
      RunBatches(head, problem);
      RunOptions(head, problem);
      RunSurprises(head, problem);
      if (device_->TakesTokenLists()) RunLists(head, problem.shape.hidden);
      for (const DataType to : kTypes) head.Weights(to, 0, kVocab);
      head.Gradient();
      head.Gradient(kVocab - 1, 1);
    }
  }

 private:
  // Every kind of batch, in sizes that take every tile of the products.
  static void RunBatches(HeadUnderTest& head, Problem problem) {
    const std::vector<float> x = problem.HiddenStates();
    for (const int64_t rows : {1, 64, 65, 128, 129, 300, 1024, 1025, 4097, 8192}) {
      for (const DataType hidden_type : kTypes) {
        problem.hidden_type = hidden_type;
        problem.hidden_states = Narrowed(hidden_type, x);
        ChunkInput chunk = RowsOf(problem, 0, rows);
        head.Run({.hidden_type = hidden_type, .mode = ComputeMode::kLossOnly}, {chunk});
        head.backend().ResetGradient();  // the first of these overwrites, the others add
        for (const DataType dx_type : kTypes) head.Run(KindOf(problem, dx_type), {chunk});
        chunk.accumulate = ChunkRows::Accumulate::kNo;
        head.Run(KindOf(problem), {chunk});
      }
    }
    ChunkInput repeat = RowsOf(problem, 100, 200);
    repeat.accumulate = ChunkRows::Accumulate::kNo;
    head.Run(KindOf(problem), {RowsOf(problem, 0, 100), repeat, RowsOf(problem, 300, 10)});
  }

  // Every kernel that options and returns take.
  static void RunOptions(HeadUnderTest& head, Problem problem) {
    for (const float smoothing : {0.0f, 0.1f}) {
      for (const float softcap : {0.0f, 5.0f}) {
        problem.options = {
            .logit_scale = 0.5f, .softcap = softcap, .label_smoothing = smoothing, .lse_square_scale = 0.01f};
        for (const DataType dx_type : kTypes) {
          for (const int64_t rows : {64, 128, 1025, 8192}) {
            head.backend().ResetGradient();
            BatchKey kind = KindOf(problem, dx_type);
            head.Run(kind, {RowsOf(problem, 0, rows)});
            kind.returns = {.entropy = true, .top_k = kernels::kMostTopK};
            head.Run(kind, {RowsOf(problem, 0, rows)});
          }
        }
      }
    }
  }

  // Short lists of kept tokens and, where so many can be, long ones.
  void RunLists(HeadUnderTest& head, int64_t hidden) const {
    Problem problem = RandomProblem({.shape = {200, kVocab, hidden}, .type = type(), .logit_deviation = 2.0});
    kernels::testing::KeepTokens(problem, {0.01, 0.5});
    for (const DataType dx_type : kTypes) {
      head.backend().ResetGradient();
      for (const int64_t rows : {1, 2, 200}) head.Run(KindOf(problem, dx_type), {RowsOf(problem, 0, rows)});
    }
  }

  // Rows whose log-sum-exp the first estimate misses by far.
  static void RunSurprises(HeadUnderTest& head, Problem problem) {
    for (int64_t row = 0; row < 20; ++row) SetLogit(problem, row, 4000 + row, 20000.0f);
    head.Publish(problem.weight);
    for (const int64_t rows : {20, 200, 2000}) head.Run(KindOf(problem), {RowsOf(problem, 0, rows)});
  }
};

INSTANTIATE_TEST_SUITE_P(All, CudaMemory, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

// This one comes first: code that is loaded too late is loaded here, where there is no room for it.
TEST_P(CudaMemory, IsNotWantedWhenNoneIsLeft) {
  for (const int64_t hidden : {120, 123}) {
    SCOPED_TRACE(hidden);
    const Problem problem = LargestChunk(hidden);
    HeadUnderTest head(device_.get(), kVocab, hidden, type());
    const std::vector<DeviceBuffer> everything = TakeAllMemory();
    const DeviceMemory filled = ReadDeviceMemory();
    UseEverything(head, problem);
    EXPECT_EQ(ReadDeviceMemory().free, filled.free);
  }
}

TEST_P(CudaMemory, IsNotTakenAfterAHeadIsCreated) {
  for (const int64_t hidden : {120, 123}) {
    SCOPED_TRACE(hidden);
    const Problem problem = LargestChunk(hidden);
    HeadUnderTest head(device_.get(), kVocab, hidden, type());
    const DeviceMemory created = ReadDeviceMemory();
    UseEverything(head, problem);
    EXPECT_EQ(ReadDeviceMemory().free, created.free);
  }
}

TEST_P(CudaMemory, IsNotTakenByStepsOfAnOptimizer) {
  for (const int64_t hidden : {120, 123}) {
    SCOPED_TRACE(hidden);
    Problem problem = LargestChunk(hidden);
    HeadUnderTest head(device_.get(), SteppingHead(hidden));
    const std::unique_ptr<Gradient> second = head.CreateGradient();
    const std::vector<float> weights(static_cast<size_t>(kVocab * hidden), 0.01f);
    head.Publish(Narrowed(head.config().master_type(), weights));
    const std::vector<DeviceBuffer> everything = TakeAllMemory();
    const DeviceMemory filled = ReadDeviceMemory();
    UseSteps(head, second.get(), problem);
    EXPECT_EQ(ReadDeviceMemory().free, filled.free);
  }
}

// What a library takes for a teacher's products it takes when the teacher is first named.
TEST_P(CudaMemory, IsNotTakenBySoftTargetsOnceTheirTeacherWasNamed) {
  for (const DataType teacher_type : kTypes) {
    SCOPED_TRACE(kernels::Name(teacher_type));
    Problem problem = LargestChunk(120);
    problem.teacher = RandomTeacher(problem.shape, {.hidden = 77, .type = teacher_type});
    HeadUnderTest teacher(device_.get(), TeacherConfigOf(problem));
    teacher.Publish(problem.teacher->weight);
    HeadUnderTest head(device_.get(), problem);
    BatchKey kind = KindOf(problem);
    kind.teacher = teacher.AsTeacher(problem, head);
    head.Gradient();
    const std::vector<DeviceBuffer> everything = TakeAllMemory();
    const DeviceMemory filled = ReadDeviceMemory();
    for (const float smoothing : {0.0f, 0.1f}) {
      kind.options.label_smoothing = smoothing;
      for (const int64_t rows : {1, 64, 129, 1025, 8192}) head.Run(kind, {RowsOf(problem, 0, rows)});
    }
    EXPECT_EQ(ReadDeviceMemory().free, filled.free);
  }
}

// What is reserved is what the device gives: to a piece of its allocator for each buffer, and never less.
TEST_P(CudaMemory, OfHeadsAndTheirGradientsIsWhatWasPlanned) {
  HeadConfig config{"planned", 50'000, 1024, type()};
  config.bias = true;
  config.class_weights = std::make_shared<std::vector<float>>(50'000, 1.0f);
  config.held_bytes = 300 << 20;
  const absl::StatusOr<MemoryPlan> plan = device_->PlanMemory(config);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const int64_t planned = TotalBytes(*plan) + TotalBytes(device_->PlanGradient(config));

  const DeviceMemory before = ReadDeviceMemory();
  absl::StatusOr<std::unique_ptr<HeadBackend>> head = device_->CreateHead(config);
  ASSERT_TRUE(head.ok()) << head.status();
  absl::StatusOr<std::unique_ptr<Gradient>> gradient = device_->CreateGradient(config);
  ASSERT_TRUE(gradient.ok()) << gradient.status();
  constexpr int64_t kPiece = 2 << 20;
  constexpr int64_t kMostBuffers = 16;
  const int64_t taken = before.free - ReadDeviceMemory().free;
  EXPECT_GE(taken, planned - kPiece) << "small buffers may share a piece that was there";
  EXPECT_LE(taken, planned + kMostBuffers * kPiece);

  const DeviceTotals totals = device_->Totals();
  EXPECT_EQ(totals.total_bytes, before.total);
  EXPECT_EQ(totals.free_bytes, before.free - taken);
}

TEST_P(CudaMemory, AHeadThatIsTooLargeIsRefusedWithSizesAndTheDeviceServesOn) {
  const DeviceMemory before = ReadDeviceMemory();
  constexpr int64_t kHidden = 4096;
  const HeadConfig config{"large", before.total / kHidden / 4, kHidden, type()};
  const absl::StatusOr<MemoryPlan> plan = device_->PlanMemory(config);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const absl::Status refused = device_->CreateHead(config).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr(absl::StrCat("needs ", TotalBytes(*plan), " bytes")));
  EXPECT_THAT(std::string(refused.message()), HasSubstr(absl::StrCat(before.free, " of ", before.total)));
  EXPECT_EQ(ReadDeviceMemory().free, before.free);
  const Problem problem = RandomProblem({.shape = {20, 300, 40}, .type = type()});
  HeadUnderTest head(device_.get(), problem);
  EXPECT_LT(RelativeError(head.Run(problem).losses, Expected(problem).losses), RowTolerance(1e-5));
}

}  // namespace
}  // namespace lossd::engine::testing::cuda_memory_test
