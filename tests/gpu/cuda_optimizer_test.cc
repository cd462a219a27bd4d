// The optimizer's kernels against the CPU's, bit for bit, and what they must not touch. How heads use them:
// tests/conformance. Names that begin with Small have shapes that compute-sanitizer gets through.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/optimizer/optimizer.h"
#include "kernels/optimizer.h"
#include "tests/unit/kernels/optimizer_reference.h"
#include "tests/unit/kernels/problem.h"

namespace lossd::kernels::cuda_optimizer_test {
namespace {

using cuda::DeviceBuffer;
using cuda::PaddedRows;
using cuda::StepTensor;
using testing::OptimizersUnderTest;
using testing::SameBits;

// What lies in padding, and before and behind a matrix: never read into a result, never written.
constexpr float kJunk = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kGuard = 64;

// A matrix in device memory, its padding and surroundings full of junk.
template <class T>
class Matrix {
 public:
  // `first`: elements from an aligned one to the matrix.
  Matrix(const PaddedRows& shape, const std::vector<T>& values, T junk, int64_t first = 0)
      : shape_(shape), junk_(junk), first_(kGuard + first) {
    host_.assign(static_cast<size_t>(first_ + shape.rows * shape.stride + kGuard), junk);
    for (int64_t row = 0; row < shape.rows; ++row) {
      for (int64_t column = 0; column < shape.columns; ++column) {
        host_[Place(row, column)] = values[static_cast<size_t>(row * shape.columns + column)];
      }
    }
    EXPECT_TRUE(DeviceBuffer::Create(Bytes(), &buffer_).ok());
    EXPECT_EQ(cudaMemcpy(buffer_.data(), host_.data(), static_cast<size_t>(Bytes()), cudaMemcpyHostToDevice),
              cudaSuccess);
  }

  T* data() const { return static_cast<T*>(buffer_.data()) + first_; }

  std::vector<T> Read() {
    EXPECT_EQ(cudaMemcpy(host_.data(), buffer_.data(), static_cast<size_t>(Bytes()), cudaMemcpyDeviceToHost),
              cudaSuccess);
    std::vector<T> values(static_cast<size_t>(shape_.rows * shape_.columns));
    for (int64_t row = 0; row < shape_.rows; ++row) {
      for (int64_t column = 0; column < shape_.columns; ++column) {
        T& value = host_[Place(row, column)];
        values[static_cast<size_t>(row * shape_.columns + column)] = value;
        value = junk_;
      }
    }
    const std::vector<T> junk(host_.size(), junk_);
    EXPECT_EQ(std::memcmp(host_.data(), junk.data(), host_.size() * sizeof(T)), 0)
        << "written beside the matrix";
    return values;
  }

 private:
  size_t Place(int64_t row, int64_t column) const {
    return static_cast<size_t>(first_ + row * shape_.stride + column);
  }
  int64_t Bytes() const { return static_cast<int64_t>(host_.size() * sizeof(T)); }

  const PaddedRows shape_;
  const T junk_;
  const int64_t first_;
  std::vector<T> host_;
  DeviceBuffer buffer_;
};

Matrix<float> FloatsOf(const PaddedRows& shape, const std::vector<float>& values, int64_t first = 0) {
  return {shape, values, kJunk, first};
}

// Cheap numbers of either sign, all different.
std::vector<float> Numbers(int64_t count, float scale, uint32_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  uint32_t state = seed * 2654435761U + 1;
  for (float& value : values) {
    state = state * 1664525U + 1013904223U;
    value = (static_cast<float>(state >> 8) * 0x1p-23f - 1.0f) * scale;
  }
  return values;
}

std::vector<uint16_t> Halves(DataType type, const std::vector<float>& values) {
  std::vector<uint16_t> halves(values.size());
  Convert(DataType::kFloat32, values.data(), type, halves.data(), static_cast<int64_t>(values.size()));
  return halves;
}

enum class Smoothed { kNo, kYes };

class CudaOptimizer : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no CUDA device";
    ASSERT_TRUE(DeviceBuffer::Create(cuda::TallyScratchBytes(), &scratch_).ok());
    ASSERT_TRUE(DeviceBuffer::Create(sizeof(GradientTally), &tally_).ok());
    ASSERT_TRUE(DeviceBuffer::Create(sizeof(float), &largest_).ok());
    // The padding inside is read with the rest, and written by nobody.
    ASSERT_EQ(cudaMemset(tally_.data(), 0, sizeof(GradientTally)), cudaSuccess);
  }

  GradientTally ReadTally() const {
    GradientTally tally;
    EXPECT_EQ(cudaMemcpy(&tally, tally_.data(), sizeof(tally), cudaMemcpyDeviceToHost), cudaSuccess);
    return tally;
  }

  static void ExpectTally(const GradientTally& tally, const GradientTally& expected) {
    EXPECT_NEAR(tally.squares, expected.squares, 1e-12 * expected.squares);
    EXPECT_EQ(tally.largest, expected.largest);
    EXPECT_EQ(tally.non_finite, expected.non_finite);
  }

  // fp32 weights: two steps here and on the CPU. `place`: of what is stepped, from an aligned element on.
  void ExpectSameSteps(const PaddedRows& shape, const OptimizerArguments& arguments, Smoothed smoothed,
                       int64_t place = 0) {
    const int64_t count = shape.rows * shape.columns;
    std::vector<float> gradient = Numbers(count, 0.5f, 1);
    std::vector<float> weight = Numbers(count, 1.0f, 2);
    std::vector<float> first(weight.size());
    std::vector<float> second(weight.size());
    Matrix<float> device_gradient = FloatsOf(shape, gradient, place);
    Matrix<float> device_weight = FloatsOf(shape, weight, place);
    Matrix<float> device_first = FloatsOf(shape, first, place);
    Matrix<float> device_second = FloatsOf(shape, second, place);
    const PaddedRows vector{1, shape.columns, shape.stride};
    const std::vector<float> uniform = Numbers(shape.columns, 0.1f, 3);
    const std::vector<float> weighted = Numbers(shape.columns, 0.1f, 4);
    const std::vector<float> classes = Numbers(shape.rows, 1.0f, 5);
    const Matrix<float> device_uniform = FloatsOf(vector, uniform);
    const Matrix<float> device_weighted = FloatsOf(vector, weighted);
    const Matrix<float> device_classes = FloatsOf({1, shape.rows, shape.rows}, classes);
    StepTensor tensor;
    tensor.shape = shape;
    tensor.gradient.values = device_gradient.data();
    if (smoothed == Smoothed::kYes) {
      tensor.gradient.uniform_smoothing = device_uniform.data();
      tensor.gradient.weighted_smoothing = device_weighted.data();
      tensor.gradient.class_weights = device_classes.data();
      for (size_t i = 0; i < gradient.size(); ++i) {
        const size_t row = i / static_cast<size_t>(shape.columns);
        const size_t column = i % static_cast<size_t>(shape.columns);
        gradient[i] -= uniform[column];
        gradient[i] -= classes[row] * weighted[column];
      }
    }
    tensor.weight = device_weight.data();
    tensor.first_moment = device_first.data();
    tensor.second_moment = device_second.data();
    tensor.largest_weight = static_cast<float*>(largest_.data());
    OptimizerArguments step = arguments;
    for (step.step = 1; step.step <= 2; ++step.step) {
      const OptimizerCoefficients coefficients = CoefficientsOf(step);
      const GradientTally expected = CpuApplyOptimizer({.count = count,
                                                        .gradient = gradient.data(),
                                                        .weight = weight.data(),
                                                        .first_moment = first.data(),
                                                        .second_moment = second.data()},
                                                       coefficients);
      Launch(tensor, coefficients);
      ExpectTally(ReadTally(), expected);
      auto* tally = static_cast<GradientTally*>(tally_.data());
      ASSERT_TRUE(
          cuda::TallyGradient(shape, tensor.gradient, coefficients.scale, scratch_.data(), tally, nullptr)
              .ok());
      ExpectTally(ReadTally(), expected);
    }
    EXPECT_TRUE(SameBits(device_weight.Read(), weight));
    EXPECT_TRUE(SameBits(device_first.Read(), first));
    EXPECT_TRUE(SameBits(device_second.Read(), second));
    if (smoothed == Smoothed::kYes) {
      ASSERT_TRUE(cuda::GatherGradient(shape, tensor.gradient, device_gradient.data(), nullptr).ok());
      EXPECT_TRUE(SameBits(device_gradient.Read(), gradient));
    }
    EXPECT_EQ(ReadLargest(), CpuTallyGradient(weight.data(), count, 1.0f).largest);
  }

  // Two gradients from `place` elements behind an aligned one on, whatever the pieces.
  void ExpectSameSum(const PaddedRows& shape, int32_t pieces, int64_t place = 0) {
    const int64_t count = shape.rows * shape.columns;
    std::vector<float> first = Numbers(count, 0.5f, 1);
    const std::vector<float> second = Numbers(count, 0.5f, 2);
    const Matrix<float> device_first = FloatsOf(shape, first, place);
    Matrix<float> device_sum = FloatsOf(shape, second, place);
    auto* const tally = static_cast<GradientTally*>(tally_.data());
    int64_t elements = 0;
    for (int32_t piece = 0; piece < pieces; ++piece) {
      const cuda::Parts parts{.first = piece, .end = piece + 1, .of = pieces};
      const cuda::ElementSpan part = cuda::ElementsOf(shape, parts);
      EXPECT_EQ(part.first, elements);
      elements += part.count;
      ASSERT_TRUE(cuda::AddAndTally(shape, parts, device_first.data(), 0.75f, device_sum.data(),
                                    scratch_.data(), tally, nullptr)
                      .ok());
    }
    EXPECT_EQ(elements, shape.rows * shape.stride);
    const GradientTally added = ReadTally();
    for (size_t i = 0; i < first.size(); ++i) first[i] = second[i] + first[i];
    EXPECT_TRUE(SameBits(device_sum.Read(), first));
    ASSERT_TRUE(
        cuda::TallyGradient(shape, {.values = device_sum.data()}, 0.75f, scratch_.data(), tally, nullptr)
            .ok());
    const GradientTally tallied = ReadTally();
    EXPECT_EQ(added.squares, tallied.squares);
    EXPECT_EQ(added.largest, tallied.largest);
    EXPECT_EQ(added.non_finite, tallied.non_finite);
    ExpectTally(added, CpuTallyGradient(first.data(), count, 0.75f));
  }

  void Launch(const StepTensor& tensor, const OptimizerCoefficients& coefficients) {
    const cuda::Result result = cuda::ApplyOptimizer(tensor, coefficients, scratch_.data(),
                                                     static_cast<GradientTally*>(tally_.data()), nullptr);
    ASSERT_TRUE(result.ok()) << result.message();
  }

  float ReadLargest() const {
    float largest = 0;
    EXPECT_EQ(cudaMemcpy(&largest, largest_.data(), sizeof(largest), cudaMemcpyDeviceToHost), cudaSuccess);
    return largest;
  }

  DeviceBuffer scratch_;
  DeviceBuffer tally_;
  DeviceBuffer largest_;
};

// Rows with and without padding, one row of any length, whole passes and not.
constexpr PaddedRows kShapes[] = {{1, 1, 1},       {1, 301, 301},    {1, 4096, 4096}, {3, 5, 8},
                                  {7, 123, 128},   {97, 1, 8},       {128, 64, 64},   {3, 2048, 2048},
                                  {5, 2047, 2048}, {300, 1028, 1032}};

TEST_F(CudaOptimizer, SmallTensorsHaveTheBitsOfTheCpu) {
  for (const PaddedRows& shape : kShapes) {
    for (const auto& [name, arguments] : OptimizersUnderTest()) {
      SCOPED_TRACE(name + ", " + std::to_string(shape.rows) + " x " + std::to_string(shape.columns));
      ExpectSameSteps(shape, arguments, Smoothed::kNo);
      if (shape.stride % 4 == 0) ExpectSameSteps(shape, arguments, Smoothed::kYes);
    }
  }
}

// A slice's begins where the one before ends.
TEST_F(CudaOptimizer, SmallBiasesMayBeginAtAnyElement) {
  for (const int64_t count : {1, 301, 4096}) {
    for (const int64_t place : {1, 2, 3}) {
      for (const auto& [name, arguments] : OptimizersUnderTest()) {
        SCOPED_TRACE(name + ", " + std::to_string(count) + " from " + std::to_string(place) + " on");
        ExpectSameSteps({1, count, count}, arguments, Smoothed::kNo, place);
      }
    }
  }
}

TEST_F(CudaOptimizer, SmallTensorsOf16BitsHaveTheBitsOfTheCpu) {
  const OptimizerArguments adamw{.rule = OptimizerRule::kAdamW, .learning_rate = 0.1, .weight_decay = 0.1};
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
    for (const PaddedRows& shape : {PaddedRows{7, 123, 128}, PaddedRows{128, 64, 64}}) {
      for (const bool kept : {false, true}) {
        SCOPED_TRACE(std::string(Name(type)) + (kept ? ", master" : ""));
        const int64_t count = shape.rows * shape.columns;
        const std::vector<float> gradient = Numbers(count, 0.5f, 1);
        std::vector<float> master = Numbers(count, 1.0f, 2);
        std::vector<uint16_t> weight = Halves(type, master);
        std::vector<float> first(master.size());
        std::vector<float> second(master.size());
        const Matrix<float> device_gradient = FloatsOf(shape, gradient);
        Matrix<uint16_t> device_weight(shape, weight, 0x7FFF);
        Matrix<float> device_master = FloatsOf(shape, master);
        Matrix<float> device_first = FloatsOf(shape, first);
        Matrix<float> device_second = FloatsOf(shape, second);
        const OptimizerCoefficients coefficients = CoefficientsOf(adamw);
        CpuApplyOptimizer({.count = count,
                           .gradient = gradient.data(),
                           .weight_type = type,
                           .weight = weight.data(),
                           .master = kept ? master.data() : nullptr,
                           .first_moment = first.data(),
                           .second_moment = second.data()},
                          coefficients);
        StepTensor tensor;
        tensor.shape = shape;
        tensor.gradient.values = device_gradient.data();
        tensor.weight_type = type;
        tensor.weight = device_weight.data();
        tensor.master = kept ? device_master.data() : nullptr;
        tensor.first_moment = device_first.data();
        tensor.second_moment = device_second.data();
        Launch(tensor, coefficients);
        EXPECT_TRUE(device_weight.Read() == weight);
        EXPECT_TRUE(SameBits(device_master.Read(), master));
        EXPECT_TRUE(SameBits(device_second.Read(), second));
      }
    }
  }
}

TEST_F(CudaOptimizer, SmallGradientsAreAddedAndMastersNarrowed) {
  for (const int64_t count : {1, 3, 4, 1023, 5000}) {
    SCOPED_TRACE(count);
    const PaddedRows shape{1, count, count};
    const std::vector<float> from = Numbers(count, 1.0f, 1);
    std::vector<float> to = Numbers(count, 1.0f, 2);
    const Matrix<float> device_from = FloatsOf(shape, from);
    Matrix<float> device_to = FloatsOf(shape, to);
    for (const WeightGradient store : {WeightGradient::kAccumulate, WeightGradient::kOverwrite}) {
      CpuAddGradient(from.data(), count, store, to.data());
      ASSERT_TRUE(cuda::AddGradient(device_from.data(), count, store, device_to.data(), nullptr).ok());
      EXPECT_TRUE(SameBits(device_to.Read(), to));
    }
    for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
      Matrix<uint16_t> narrow(shape, std::vector<uint16_t>(from.size()), 0x7FFF);
      ASSERT_TRUE(cuda::NarrowMaster(device_from.data(), type, narrow.data(), count, nullptr).ok());
      EXPECT_TRUE(narrow.Read() == Halves(type, from)) << Name(type);
    }
  }
}

TEST_F(CudaOptimizer, TwoGradientsAreTalliedAsTheyAreAddedUp) {
  for (const PaddedRows& shape : {PaddedRows{1, 1, 4}, PaddedRows{7, 123, 128}, PaddedRows{128, 64, 64},
                                  PaddedRows{20483, 2048, 2048}, PaddedRows{20484, 2045, 2048}}) {
    SCOPED_TRACE(std::to_string(shape.rows) + " x " + std::to_string(shape.columns));
    for (const int32_t pieces : {1, 2, 7, 40}) ExpectSameSum(shape, pieces);
  }
  ExpectSameSum({1, 4099, 4099}, 2, 3);
}

// Blocks take several passes, and the last of them fewer.
TEST_F(CudaOptimizer, TensorsOfMorePassesThanBlocksHaveTheBitsOfTheCpu) {
  const OptimizerArguments adamw{.rule = OptimizerRule::kAdamW, .learning_rate = 0.1, .weight_decay = 0.1};
  for (const PaddedRows& shape : {PaddedRows{20483, 2048, 2048}, PaddedRows{20483, 2045, 2048}}) {
    SCOPED_TRACE(shape.columns);
    ExpectSameSteps(shape, adamw, Smoothed::kNo);
  }
}

}  // namespace
}  // namespace lossd::kernels::cuda_optimizer_test
