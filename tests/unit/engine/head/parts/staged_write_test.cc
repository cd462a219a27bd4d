#include "server/engine/head/parts/staged_write.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <latch>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "server/engine/memory/host_buffer.h"

namespace lossd::engine::staged_write_test {
namespace {

using kernels::DataType;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kVocab = 4;
constexpr int64_t kHidden = 2;
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();

HeadConfig Config(DataType type = DataType::kFloat32) {
  HeadConfig config;
  config.name = "h";
  config.vocab_size = kVocab;
  config.hidden_size = kHidden;
  config.weight_type = type;
  return config;
}

HeadConfig WithBias() {
  HeadConfig config = Config();
  config.bias = true;
  return config;
}

StagedWrite Begin(const HeadConfig& config) {
  return {"w", "key", config,
          WeightBuffers{*HostBuffer::Create(config.staged_bytes(), Commit::kNow),
                        *HostBuffer::Create(config.bias_bytes(), Commit::kNow)}};
}

template <typename Value>
std::string Bytes(const std::vector<Value>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value)};
}

// Rows all of whose weights are `value`.
std::string Rows(int64_t rows, float value, int64_t hidden = kHidden) {
  return Bytes(std::vector<float>(static_cast<size_t>(rows * hidden), value));
}

template <typename Value>
std::vector<Value> Values(const HostBuffer& buffer) {
  std::vector<Value> values(static_cast<size_t>(buffer.size()) / sizeof(Value));
  std::memcpy(values.data(), buffer.data(), values.size() * sizeof(Value));
  return values;
}

TEST(StagedWrite, RowsComeInAnyOrderAndEachLiesAtItsPlace) {
  StagedWrite write = Begin(Config());
  ASSERT_TRUE(write.Write(2, 2, DataType::kFloat32, Bytes<float>({5, 6, 7, 8})).ok());
  ASSERT_TRUE(write.Write(0, 1, DataType::kFloat32, Bytes<float>({1, 2})).ok());
  ASSERT_TRUE(write.Write(1, 1, DataType::kFloat32, Bytes<float>({3, 4})).ok());
  EXPECT_TRUE(write.CheckComplete().ok());
  EXPECT_THAT(Values<float>(write.Take().weights), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
}

TEST(StagedWrite, ARowThatComesAgainIsOverwrittenAndCountsOnce) {
  StagedWrite write = Begin(Config());
  ASSERT_TRUE(write.Write(0, 3, DataType::kFloat32, Rows(3, 1)).ok());
  ASSERT_TRUE(write.Write(1, 2, DataType::kFloat32, Rows(2, 2)).ok());
  EXPECT_EQ(write.rows(), 3);
  EXPECT_FALSE(write.CheckComplete().ok());
  ASSERT_TRUE(write.Write(3, 1, DataType::kFloat32, Rows(1, 3)).ok());
  EXPECT_EQ(write.rows(), 4);
  EXPECT_TRUE(write.CheckComplete().ok());
  EXPECT_THAT(Values<float>(write.Take().weights), ElementsAre(1, 1, 2, 2, 2, 2, 3, 3));
}

TEST(StagedWrite, WhatIsMissingIsCountedAndItsFirstRowNamed) {
  StagedWrite write = Begin(Config());
  const absl::Status nothing = write.CheckComplete();
  EXPECT_TRUE(absl::IsFailedPrecondition(nothing));
  EXPECT_EQ(FieldOf(nothing), "write_id");
  EXPECT_THAT(nothing.message(), HasSubstr("write w lacks 4 of 4 rows, the first is row 0"));
  ASSERT_TRUE(write.Write(0, 1, DataType::kFloat32, Rows(1, 1)).ok());
  ASSERT_TRUE(write.Write(2, 1, DataType::kFloat32, Rows(1, 1)).ok());
  EXPECT_THAT(write.CheckComplete().message(), HasSubstr("lacks 2 of 4 rows, the first is row 1"));
}

TEST(StagedWrite, ARangeOutsideTheHeadIsRefusedHoweverLarge) {
  struct Case {
    int64_t first_row = 0;
    int64_t rows = 0;
    std::string field;
  };
  StagedWrite write = Begin(Config());
  for (const Case& bad : {Case{-1, 1, "first_row"}, Case{kLeast, 1, "first_row"},
                          Case{kVocab, 1, "first_row"}, Case{kMost, 1, "first_row"}, Case{0, 0, "rows"},
                          Case{0, -1, "rows"}, Case{0, kLeast, "rows"}, Case{0, kVocab + 1, "rows"},
                          Case{3, 2, "rows"}, Case{3, kMost, "rows"}, Case{1, kMost / 4 + 1, "rows"}}) {
    SCOPED_TRACE(::testing::Message() << bad.rows << " rows from " << bad.first_row << " on");
    const absl::Status status = write.Write(bad.first_row, bad.rows, DataType::kFloat32, Rows(1, 1));
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_EQ(ReasonOf(status), RejectReason::kShape);
    EXPECT_EQ(FieldOf(status), bad.field);
  }
  EXPECT_EQ(write.rows(), 0);
}

TEST(StagedWrite, BytesThatAreNotThoseOfTheRowsInTheirTypeAreRefusedWhole) {
  struct Case {
    DataType type = DataType::kFloat32;
    size_t bytes = 0;
    std::string message;
  };
  StagedWrite write = Begin(Config());
  ASSERT_TRUE(write.Write(0, 1, DataType::kFloat32, Rows(1, 9)).ok());
  for (const Case& bad : {Case{DataType::kFloat32, 15, "weights holds 15 bytes; [2, 2] of float32 are 16"},
                          Case{DataType::kFloat32, 17, "17 bytes"}, Case{DataType::kFloat32, 0, "0 bytes"},
                          Case{DataType::kFloat32, 8, "8 bytes; [2, 2] of float32 are 16"},
                          Case{DataType::kBFloat16, 16, "16 bytes; [2, 2] of bfloat16 are 8"},
                          Case{DataType::kFloat16, 4, "4 bytes; [2, 2] of float16 are 8"}}) {
    const absl::Status status = write.Write(0, 2, bad.type, std::string(bad.bytes, '\0'));
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_EQ(ReasonOf(status), RejectReason::kLength);
    EXPECT_EQ(FieldOf(status), "weights");
    EXPECT_THAT(status.message(), HasSubstr(bad.message));
  }
  EXPECT_EQ(write.rows(), 1);
  EXPECT_THAT(Values<float>(write.Take().weights), ElementsAre(9, 9, 0, 0, 0, 0, 0, 0));
}

TEST(StagedWrite, TheBiasComesWithItsRows) {
  StagedWrite write = Begin(WithBias());
  ASSERT_TRUE(write.Write(2, 2, DataType::kFloat32, Rows(2, 1), Bytes<float>({3, 4})).ok());
  ASSERT_TRUE(write.Write(0, 3, DataType::kFloat32, Rows(3, 1), Bytes<float>({1, 2, 5})).ok());
  EXPECT_THAT(Values<float>(write.Take().bias), ElementsAre(1, 2, 5, 4));
}

TEST(StagedWrite, ABiasThatDoesNotFitRefusesItsRowsToo) {
  struct Case {
    std::vector<float> bias;
    std::string message;
  };
  StagedWrite write = Begin(WithBias());
  for (const Case& bad : {Case{{}, "bias holds 0 bytes; 2 fp32 values are 8"},
                          Case{{1, 2, 3}, "bias holds 12 bytes; 2 fp32 values are 8"},
                          Case{{1, NAN}, "bias[2] is nan"}, Case{{-HUGE_VALF, 1}, "bias[1] is -inf"}}) {
    const absl::Status status = write.Write(1, 2, DataType::kFloat32, Rows(2, 1), Bytes(bad.bias));
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_EQ(FieldOf(status), "bias");
    EXPECT_THAT(status.message(), HasSubstr(bad.message));
  }
  EXPECT_EQ(write.rows(), 0);
  EXPECT_THAT(Values<float>(write.Take().weights), Each(0));
}

TEST(StagedWrite, AHeadWithoutABiasTakesNone) {
  StagedWrite write = Begin(Config());
  const absl::Status status = write.Write(0, 1, DataType::kFloat32, Rows(1, 1), Bytes<float>({1}));
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_EQ(FieldOf(status), "bias");
  EXPECT_THAT(status.message(), HasSubstr("without a bias"));
  EXPECT_EQ(write.rows(), 0);
}

TEST(StagedWrite, WeightsAreRoundedToTheTypeOfTheHead) {
  StagedWrite write = Begin(Config(DataType::kBFloat16));
  // 1 + 2^-8 lies halfway between two values of bfloat16 and goes to the even one, 1; 1 + 3·2^-8 likewise
  // to 1 + 2^-6.
  const float low = 1.00390625f;
  const float high = 1.01171875f;
  ASSERT_TRUE(write.Write(0, 1, DataType::kFloat32, Bytes<float>({low, high})).ok());
  ASSERT_TRUE(write.Write(1, 1, DataType::kBFloat16, Bytes<uint16_t>({0x3f81, 0xff7f})).ok());
  // 1.5 and 65504 in float16: the second is 65536 in bfloat16.
  ASSERT_TRUE(write.Write(2, 1, DataType::kFloat16, Bytes<uint16_t>({0x3e00, 0x7bff})).ok());
  EXPECT_THAT(Values<uint16_t>(write.Take().weights),
              ElementsAre(0x3f80, 0x3f82, 0x3f81, 0xff7f, 0x3fc0, 0x4780, 0, 0));
}

TEST(StagedWrite, WeightsOfAHeadWithAMasterStayInItsType) {
  HeadConfig config = Config(DataType::kBFloat16);
  config.master_weights = true;
  StagedWrite write = Begin(config);
  ASSERT_TRUE(write.Write(0, 3, DataType::kFloat32, Rows(3, 1.00390625f)).ok());
  ASSERT_TRUE(write.Write(3, 1, DataType::kBFloat16, Bytes<uint16_t>({0x3f81, 0x4000})).ok());
  const float from_bfloat = 1.0078125f;
  EXPECT_THAT(Values<float>(write.Take().weights),
              ElementsAre(1.00390625f, 1.00390625f, 1.00390625f, 1.00390625f, 1.00390625f, 1.00390625f,
                          from_bfloat, 2));
}

TEST(StagedWrite, WeightsThatAreNotFiniteInTheTypeOfTheHeadAreRefused) {
  struct Case {
    DataType head;
    DataType type;
    std::string row;
    std::string message;
  };
  const auto floats = [](float first, float second) { return Bytes<float>({first, second}); };
  const auto halves = [](uint16_t first, uint16_t second) { return Bytes<uint16_t>({first, second}); };
  const Case cases[] = {
      {DataType::kFloat32, DataType::kFloat32, floats(1, NAN), "weights[2, 1] is nan"},
      {DataType::kFloat32, DataType::kFloat32, floats(-HUGE_VALF, 1), "weights[2, 0] is -inf"},
      {DataType::kFloat32, DataType::kBFloat16, halves(0x3f80, 0x7f80), "weights[2, 1] is inf"},
      {DataType::kBFloat16, DataType::kFloat16, halves(0x7e00, 0), "weights[2, 0] is nan"},
      {DataType::kBFloat16, DataType::kFloat32, floats(1, std::numeric_limits<float>::max()),
       "weights[2, 1] is 3.40282e+38; it must be finite in bfloat16"},
      {DataType::kBFloat16, DataType::kBFloat16, halves(0x3f80, 0x7f80),
       "weights[2, 1] is inf; it must be finite in bfloat16: give the head a type with a larger range, "
       "float32"},
      {DataType::kFloat16, DataType::kFloat32, floats(65520, 1),
       "weights[2, 0] is 65520; it must be finite in float16: give the head"},
      {DataType::kFloat16, DataType::kFloat16, halves(0x3c00, 0xfc00),
       "weights[2, 1] is -inf; it must be finite in float16: give the head"},
  };
  for (const Case& bad : cases) {
    for (const bool master : {false, true}) {
      SCOPED_TRACE(absl::StrCat(bad.message, master));
      HeadConfig config = WithBias();
      config.weight_type = bad.head;
      config.master_weights = master && bad.head != DataType::kFloat32;
      StagedWrite write = Begin(config);
      ASSERT_TRUE(write.Write(1, 2, DataType::kFloat32, Rows(2, 65504), Bytes<float>({1, 2})).ok());
      const std::string zeros(bad.row.size(), '\0');
      const absl::Status status = write.Write(1, 2, bad.type, zeros + bad.row, Bytes<float>({3, 4}));
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
      EXPECT_EQ(FieldOf(status), "weights");
      EXPECT_THAT(status.message(), HasSubstr(bad.message));
      EXPECT_EQ(write.rows(), 1) << "a commit must not publish the row";
      const WeightBuffers taken = write.Take();
      EXPECT_EQ(Values<float>(taken.bias)[1], 3) << "the row before it has come with its bias";
    }
  }
}

TEST(StagedWrite, OnceItIsTakenItTakesNoRows) {
  StagedWrite write = Begin(Config());
  ASSERT_TRUE(write.Write(0, kVocab, DataType::kFloat32, Rows(kVocab, 1)).ok());
  const WeightBuffers taken = write.Take();
  const absl::Status status = write.Write(0, kVocab, DataType::kFloat32, Rows(kVocab, 2));
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_EQ(ReasonOf(status), RejectReason::kWeightWrite);
  EXPECT_THAT(status.message(), HasSubstr("write w was committed, replaced, or undone"));
  EXPECT_THAT(Values<float>(taken.weights), Each(1));
}

TEST(StagedWrite, WritersOfDifferentRowsDoNotDisturbEachOther) {
  constexpr int64_t kRows = 100'000;
  constexpr int64_t kWriters = 4;
  HeadConfig config = Config();
  config.vocab_size = kRows;
  config.hidden_size = 1;
  StagedWrite write = Begin(config);
  std::latch begin(kWriters);
  // Neighbours are written by different threads.
  const auto write_every_fourth = [&](int64_t first) {
    begin.arrive_and_wait();
    for (int64_t row = first; row < kRows; row += kWriters) {
      EXPECT_TRUE(write.Write(row, 1, DataType::kFloat32, Rows(1, static_cast<float>(row), 1)).ok());
    }
  };
  std::vector<std::thread> writers;
  for (int64_t i = 0; i < kWriters; ++i) writers.emplace_back(write_every_fourth, i);
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(write.rows(), kRows);
  EXPECT_TRUE(write.CheckComplete().ok());
  std::vector<float> expected;
  for (int64_t row = 0; row < kRows; ++row) expected.push_back(static_cast<float>(row));
  EXPECT_EQ(Values<float>(write.Take().weights), expected);
}

}  // namespace
}  // namespace lossd::engine::staged_write_test
