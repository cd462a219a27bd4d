// A device that fails under the engine. One test and a process of its own: nothing can use the device
// afterwards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <set>

#include "tests/gpu/cuda_engine.h"
#include "tests/gpu/trap.h"
#include "tests/support/wait.h"

namespace lossd::engine::cuda_failure_test {
namespace {

using kernels::DataType;
using kernels::testing::Problem;
using kernels::testing::RandomProblem;

constexpr uint64_t kBefore = 20;
constexpr uint64_t kBehind = 20;

TEST(CudaFailure, EndsEveryStreamOnceAndLeavesNothingHanging) {
  std::atomic<int> failures = 0;
  std::promise<absl::Status> failed;
  EngineOptions options;
  options.on_device_failure = [&](const absl::Status& status) {
    if (++failures == 1) failed.set_value(status);
  };
  const Problem problem = RandomProblem({.shape = {200, 20000, 512}, .type = DataType::kBFloat16});
  std::unique_ptr<CudaEngine> cuda = CudaEngine::Create(problem, options);
  if (cuda == nullptr) GTEST_SKIP() << "there is no GPU";
  const Stream streams[] = {cuda->Open("first"), cuda->Open("second")};
  for (const Stream& stream : streams) cuda->Submit(stream, cuda->Cut(1, 0, 200));
  for (const Stream& stream : streams) stream.listener->AwaitAnswers(1);

  // Some are under way when it happens, some queued, some come later.
  for (uint64_t sequence = 2; sequence <= kBefore; ++sequence) {
    for (const Stream& stream : streams) cuda->Submit(stream, cuda->Cut(sequence, 0, 200));
  }
  testing::BreakDevice();
  for (uint64_t sequence = kBefore + 1; sequence <= kBefore + kBehind; ++sequence) {
    for (const Stream& stream : streams) {
      Chunk chunk = cuda->Cut(sequence, 0, 200);
      (void)cuda->head->Submit(stream.lane, chunk, [] {});  // refused once the head has ended
    }
  }
  // Whoever waits for a flush is told.
  std::promise<absl::StatusOr<FlushInfo>> begun;
  const HeadInfo info = cuda->head->Info();
  cuda->head->BeginFlush(info.generation, info.window_marks, 1.0f,
                         [&](absl::StatusOr<FlushInfo> flush) { begun.set_value(std::move(flush)); });
  EXPECT_FALSE(lossd::testing::Await("the flush to begin", begun).ok());

  EXPECT_EQ(lossd::testing::Await("the failure", failed).code(), absl::StatusCode::kInternal);
  cuda->engine->WaitIdle();
  for (const Stream& stream : streams) {
    ASSERT_TRUE(stream.listener->ended().has_value());
    EXPECT_EQ(stream.listener->ended()->code(), absl::StatusCode::kInternal);
    std::set<uint64_t> answered;
    for (const ChunkAnswer& answer : stream.listener->AwaitAnswers(1)) {
      EXPECT_TRUE(answered.insert(answer.sequence).second) << answer.sequence << " was answered twice";
    }
    EXPECT_LE(stream.listener->applied(), answered.size());
  }
  EXPECT_EQ(cuda->engine->counters().queued_chunks, 0);
  EXPECT_EQ(cuda->engine->OpenSession("h", {"late", 0, 1}).status().code(), absl::StatusCode::kInternal);
  cuda = nullptr;
  EXPECT_EQ(failures, 1);
}

}  // namespace
}  // namespace lossd::engine::cuda_failure_test
