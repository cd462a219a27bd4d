// Batches in two phases on a GPU whose head holds what the first has computed: the same bits as of a head
// that does not, whatever became of what was held.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>

#include "server/engine/device/cuda/cuda_device.h"
#include "tests/gpu/cuda_engine.h"

namespace lossd::engine::cuda_holds_test {
namespace {

using kernels::DataType;
using kernels::testing::Problem;
using kernels::testing::RandomProblem;
using kernels::testing::SameBits;

constexpr int64_t kTokens = 600;
constexpr int64_t kVocab = 2000;
constexpr int64_t kRoom = int64_t{8} << 20;  // for some 2000 rows of 16 bits

std::string Bytes(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

struct Phases {
  std::vector<std::vector<float>> losses;
  std::vector<std::vector<float>> dx;
  std::vector<float> dw;
};

class CudaHolds : public ::testing::TestWithParam<DataType> {
 protected:
  void Start(int64_t held_bytes) {
    problem_ = RandomProblem({.shape = {kTokens, kVocab, 136}, .type = GetParam(), .logit_deviation = 2.0});
    for (size_t i = 0; i < kTokens; i += 7) problem_.labels[i] = -100;
    cuda_ = nullptr;
    EngineOptions options;
    options.batching_window = absl::ZeroDuration();
    cuda_ = CudaEngine::Create(problem_, options, 0, held_bytes);
    sequence_ = 0;
  }

  Chunk Cut(int64_t first, int64_t tokens, uint64_t number) {
    Chunk chunk = cuda_->Cut(++sequence_, first, tokens);
    const auto before = problem_.labels.begin() + first;
    chunk.hold = {number, first - std::count(problem_.labels.begin(), before, -100)};
    return chunk;
  }
  // Losses alone of these tokens, with their entropies.
  void Look(const Stream& stream, int64_t first, int64_t tokens, uint64_t number) {
    Chunk chunk = Cut(first, tokens, number);
    chunk.mode = ComputeMode::kLossOnly;
    chunk.options.returns.entropy = true;
    cuda_->Submit(stream, std::move(chunk));
    cuda_->engine->WaitIdle();
  }
  // Their gradients; every third token has none.
  void Learn(const Stream& stream, int64_t first, int64_t tokens, uint64_t number, bool entropies = true) {
    Chunk chunk = Cut(first, tokens, number);
    std::vector<float> factors(static_cast<size_t>(tokens), 0.5f);
    for (size_t i = 0; i < factors.size(); i += 3) factors[i] = 0;
    chunk.token_weights = Bytes(factors);
    if (entropies) chunk.entropy_gradients = Bytes(factors);
    cuda_->Submit(stream, std::move(chunk));
    cuda_->engine->WaitIdle();  // a batch of its own
  }
  Phases Finish(const Stream& stream) {
    Phases phases;
    phases.dw = cuda_->TakeGradient();
    for (const ChunkAnswer& answer : stream.listener->AwaitAnswers(sequence_)) {
      EXPECT_TRUE(answer.error.ok()) << answer.error;
      phases.losses.push_back(LossesOf(answer));
      if (answer.dx.size() > 0) phases.dx.push_back(InputGradientsOf(answer));
    }
    return phases;
  }
  // Two phases that are cut differently.
  Phases TwoPhases(bool entropies) {
    const Stream stream = cuda_->Open("client");
    Look(stream, 0, 350, 9);
    Look(stream, 350, 250, 9);
    Learn(stream, 0, 200, 9, entropies);
    Learn(stream, 200, 400, 9, entropies);
    return Finish(stream);
  }
  const Counters& counters() const { return cuda_->engine->counters(); }
  bool CanHold() const {
    for (const MemoryItem& item : cuda_->head->Info().memory) {
      if (item.purpose == "held") return item.bytes == kRoom;
    }
    return false;
  }

  Problem problem_;
  std::unique_ptr<CudaEngine> cuda_;
  uint64_t sequence_ = 0;
};

void ExpectSame(const Phases& one, const Phases& other) {
  ASSERT_EQ(one.losses.size(), other.losses.size());
  for (size_t i = 0; i < one.losses.size(); ++i) EXPECT_TRUE(SameBits(one.losses[i], other.losses[i])) << i;
  ASSERT_EQ(one.dx.size(), other.dx.size());
  for (size_t i = 0; i < one.dx.size(); ++i) EXPECT_TRUE(SameBits(one.dx[i], other.dx[i])) << i;
  EXPECT_TRUE(SameBits(one.dw, other.dw));
}

TEST_P(CudaHolds, TwoPhasesHaveTheBitsOfAHeadThatHoldsNothing) {
  for (const bool entropies : {false, true}) {
    Start(0);
    if (cuda_ == nullptr) GTEST_SKIP() << "there is no GPU";
    const Phases plain = TwoPhases(entropies);
    EXPECT_EQ(counters().rows_held, 0U);
    Start(kRoom);
    const Phases held = TwoPhases(entropies);
    ExpectSame(held, plain);
    if (!CanHold()) continue;
    EXPECT_EQ(counters().rows_held, 514U);
    EXPECT_EQ(counters().rows_taken, 342U) << "of tokens that have a factor";
    EXPECT_EQ(counters().rows_recomputed, 0U);
  }
}

TEST_P(CudaHolds, WhatIsGoneIsComputedAgain) {
  Start(0);
  if (cuda_ == nullptr) GTEST_SKIP() << "there is no GPU";
  const auto phases = [this](const std::function<void(const Stream&)>& between) {
    const Stream stream = cuda_->Open("client");
    Look(stream, 0, 300, 1);
    between(stream);
    Learn(stream, 0, 300, 1);
    return Finish(stream);
  };
  const Phases plain = phases([](const Stream&) {});
  const auto expect_recomputed = [&](const char* what, const std::function<void(const Stream&)>& between) {
    SCOPED_TRACE(what);
    Start(kRoom);
    Phases held = phases(between);
    held.losses.erase(held.losses.begin() + 1, held.losses.end() - 1);
    ExpectSame(held, plain);
    if (CanHold()) {
      EXPECT_EQ(counters().rows_taken, 0U);
      EXPECT_EQ(counters().rows_recomputed, 172U);
    }
  };
  expect_recomputed("other weights", [this](const Stream&) { cuda_->WriteWeights(); });
  expect_recomputed("more than there is room for", [this](const Stream& stream) {
    for (uint64_t batch = 2; batch < 8; ++batch) Look(stream, 0, kTokens, batch);
  });
  Start(kRoom);
  const Stream stream = cuda_->Open("client");
  const Stream other = cuda_->Open("another client");
  Look(stream, 0, 300, 1);
  sequence_ = 0;
  Learn(other, 0, 300, 1);
  EXPECT_TRUE(SameBits(Finish(other).dw, plain.dw)) << "what another session has named so";
  if (CanHold()) {
    EXPECT_EQ(counters().rows_taken, 0U);
  }
}

// Such a batch makes no gradient, and has no business in the hold.
TEST_P(CudaHolds, ARepeatWithoutInputGradientsLeavesWhatIsHeldAlone) {
  Start(kRoom);
  if (cuda_ == nullptr) GTEST_SKIP() << "there is no GPU";
  const Stream stream = cuda_->Open("client");
  Look(stream, 0, 300, 1);
  Look(stream, 300, 300, 2);
  Chunk chunk = Cut(300, 200, 2);
  chunk.mode = ComputeMode::kLossAndWeightGradient;
  for (int i = 0; i < 2; ++i) {
    cuda_->Submit(stream, chunk);
    cuda_->engine->WaitIdle();
  }
  Learn(stream, 0, 300, 1);
  Learn(stream, 500, 100, 2);
  cuda_->engine->WaitIdle();
  for (const ChunkAnswer& answer : stream.listener->AwaitAnswers(sequence_ + 1)) {
    for (const float loss : LossesOf(answer)) ASSERT_TRUE(std::isfinite(loss));
  }
  for (const float value : cuda_->TakeGradient()) ASSERT_TRUE(std::isfinite(value));
}

INSTANTIATE_TEST_SUITE_P(All, CudaHolds,
                         ::testing::Values(DataType::kBFloat16, DataType::kFloat16, DataType::kFloat32),
                         [](const auto& test) { return std::string(kernels::Name(test.param)); });

}  // namespace
}  // namespace lossd::engine::cuda_holds_test
