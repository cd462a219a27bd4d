// What the CPU does with memory that a client shares and may change at any moment.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "server/engine/device/cpu/cpu_backend.h"
#include "server/engine/device/head_backend.h"

namespace lossd::engine::region_chunk_test {
namespace {

constexpr int64_t kVocab = 50;
constexpr int64_t kHidden = 16;
constexpr int64_t kTokens = 8;

class RegionChunkTest : public ::testing::Test {
 protected:
  RegionChunkTest()
      : device_(*CreateCpuDevice(1 << 20)), memory_(*device_->CreateRegionMemory(RegionKind::kSystem, 4096)) {
    Reset();
    for (int64_t i = 0; i < kTokens; ++i) labels_.push_back(i * 3);
    std::mt19937 generator(1);
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (int64_t i = 0; i < kTokens * kHidden; ++i) hidden()[i] = uniform(generator);
  }

  void Reset() {
    backend_ = *device_->CreateHead({"h", kVocab, kHidden, kernels::DataType::kFloat32});
    HostBuffer weights = *HostBuffer::Create(kVocab * kHidden * 4, Commit::kNow);
    for (int64_t i = 0; i < kVocab * kHidden; ++i) {
      reinterpret_cast<float*>(weights.data())[i] = static_cast<float>(i % 7) / 7;
    }
    ASSERT_TRUE(backend_->PublishWeights({std::move(weights)}).ok());
  }

  float* hidden() { return reinterpret_cast<float*>(memory_->data()); }
  float* dx() { return hidden() + kTokens * kHidden; }

  // The rows as they are now, past every check of the chunk.
  void Compute() {
    ChunkRows rows;
    rows.tokens = kTokens;
    rows.hidden_states.data = hidden();
    rows.labels = labels_.data();
    rows.losses = losses_.data();
    rows.dx = dx();
    absl::Status done = absl::UnknownError("not done");
    backend_->StartBatch({}, {&rows, 1},
                         {[](size_t) {}, [&done](const auto& report) { done = report.status(); }});
    ASSERT_TRUE(done.ok()) << done;
  }
  std::vector<float> Gradient() {
    std::vector<float> gradient(kVocab * kHidden);
    EXPECT_TRUE(backend_->ReadGradientRows(0, kVocab, gradient.data()).ok());
    return gradient;
  }

  std::unique_ptr<Device> device_;
  std::shared_ptr<RegionMemory> memory_;
  std::unique_ptr<HeadBackend> backend_;
  std::vector<int64_t> labels_;
  std::vector<float> losses_ = std::vector<float>(kTokens);
};

// A client that changes a row between the check and the product gets NaN for that row; nobody else does.
TEST_F(RegionChunkTest, ValuesThatAreNotFiniteAfterTheCheckNeverReachTheWindow) {
  labels_[3] = -100;  // as if the row were not there
  Compute();
  const std::vector<float> without = Gradient();
  const std::vector<float> dx_before(dx(), dx() + kTokens * kHidden);

  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::max()}) {
    Reset();
    labels_[3] = 9;
    hidden()[3 * kHidden + 5] = bad;
    Compute();
    EXPECT_TRUE(std::isnan(losses_[3]));
    EXPECT_TRUE(std::isnan(dx()[3 * kHidden]));
    EXPECT_EQ(Gradient(), without);
    for (int64_t i = 0; i < kTokens * kHidden; ++i) {
      if (i / kHidden != 3) {
        ASSERT_EQ(dx()[i], dx_before[static_cast<size_t>(i)]) << i;
      }
    }
  }
}

TEST_F(RegionChunkTest, SystemMemoryIsTheHostsAndZero) {
  const auto memory = device_->CreateRegionMemory(RegionKind::kSystem, 8192);
  ASSERT_TRUE(memory.ok());
  EXPECT_EQ((*memory)->place(), MemoryPlace::kHost);
  EXPECT_EQ((*memory)->size(), 8192);
  EXPECT_GE((*memory)->file(), 0);
  for (int64_t i = 0; i < 8192; ++i) ASSERT_EQ((*memory)->data()[i], std::byte{0});
}

}  // namespace
}  // namespace lossd::engine::region_chunk_test
