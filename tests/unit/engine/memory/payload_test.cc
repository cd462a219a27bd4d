// Payloads in pieces: the same checks and the same results as in one.
#include "server/engine/memory/payload.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "server/engine/chunk/chunk.h"
#include "server/engine/common/errors.h"
#include "server/engine/device/cpu/cpu_backend.h"
#include "server/engine/device/head_backend.h"

namespace lossd::engine::payload_test {
namespace {

constexpr int64_t kTokens = 6;
constexpr int64_t kHidden = 5;
constexpr int64_t kVocab = 7;
const HeadConfig kHead{"h", kVocab, kHidden, kernels::DataType::kFloat32};

// Pieces of `size` bytes, none of them beside another in memory.
Payload InPieces(const std::string& bytes, size_t size) {
  auto owner = std::make_shared<std::vector<std::string>>();
  for (size_t begin = 0; begin < bytes.size(); begin += size) owner->push_back(bytes.substr(begin, size));
  std::vector<ByteSpan> parts;
  parts.reserve(owner->size());
  for (const std::string& piece : *owner) parts.push_back(std::as_bytes(std::span(piece)));
  return {std::move(parts), owner, 1000};
}

std::string HiddenBytes() {
  std::vector<float> values;
  for (int64_t i = 0; i < kTokens * kHidden; ++i) values.push_back(static_cast<float>(i % 11) / 4 - 1);
  std::string bytes(values.size() * sizeof(float), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::string ToString(const Payload& payload) {
  std::string bytes(static_cast<size_t>(payload.size()), '\0');
  Gather(payload.parts(), reinterpret_cast<std::byte*>(bytes.data()));
  return bytes;
}

TEST(PayloadTest, GatheredIsOnePartThatKeepsNothingElse) {
  const Payload pieces = InPieces("0123456789", 3);
  EXPECT_EQ(pieces.size(), 10);
  EXPECT_EQ(pieces.kept_bytes(), 1000);
  const Payload gathered = pieces.Gathered();
  EXPECT_EQ(ToString(gathered), "0123456789");
  EXPECT_EQ(gathered.parts().size(), 1U);
  EXPECT_EQ(gathered.kept_bytes(), 10);
  EXPECT_TRUE(Payload::Of("").parts().empty());
  EXPECT_TRUE(Payload().Gathered().parts().empty());
}

TEST(PayloadTest, ThePartsLiveAsLongAsACopy) {
  Payload copy;
  std::weak_ptr<const std::string> memory;
  {
    const auto owner = std::make_shared<const std::string>("hidden");
    memory = owner;
    copy = Payload({std::as_bytes(std::span(*owner))}, owner, 6);
  }
  EXPECT_EQ(ToString(copy), "hidden");
  copy = {};
  EXPECT_TRUE(memory.expired());
}

class PiecesTest : public ::testing::TestWithParam<size_t> {
 protected:
  PiecesTest() {
    chunk_.tokens = kTokens;
    for (const int64_t label : labels_) {
      chunk_.labels.append(reinterpret_cast<const char*>(&label), sizeof(label));
    }
  }
  absl::Status Validate(const std::string& hidden) {
    chunk_.hidden_states = InPieces(hidden, GetParam());
    return ValidateContent(chunk_, kHead, ChunkLimits());
  }

  const std::vector<int64_t> labels_ = {0, 1, -100, -100, 2, 6};
  Chunk chunk_;
};

TEST_P(PiecesTest, EveryNonFiniteValueIsFoundWhereverItIsCut) {
  EXPECT_TRUE(Validate(HiddenBytes()).ok());
  for (int64_t element = 0; element < kTokens * kHidden; ++element) {
    std::string hidden = HiddenBytes();
    const float bad = std::numeric_limits<float>::infinity();
    std::memcpy(hidden.data() + element * 4, &bad, 4);
    const int64_t row = element / kHidden;
    const bool ignored = row == 2 || row == 3;
    EXPECT_EQ(Validate(hidden).ok(), ignored) << element;
  }
}

TEST_P(PiecesTest, LengthsAreThoseOfAllPieces) {
  EXPECT_EQ(ReasonOf(Validate(HiddenBytes() + "x")), RejectReason::kLength);
  EXPECT_EQ(ReasonOf(Validate(HiddenBytes().substr(1))), RejectReason::kLength);
}

// Loss and dX of the test's chunk on the CPU.
std::vector<float> ComputeOnCpu(ChunkRows rows) {
  const std::unique_ptr<Device> device = *CreateCpuDevice(1 << 20);
  const std::unique_ptr<HeadBackend> backend = *device->CreateHead(kHead);
  HostBuffer weights = *HostBuffer::Create(kHead.weight_bytes(), Commit::kNow);
  for (int64_t i = 0; i < kVocab * kHidden; ++i) {
    reinterpret_cast<float*>(weights.data())[i] = static_cast<float>(i % 5);
  }
  EXPECT_TRUE(backend->PublishWeights({std::move(weights)}).ok());
  std::vector<float> results(static_cast<size_t>(kTokens + kTokens * kHidden));
  rows.tokens = kTokens;
  rows.losses = results.data();
  rows.dx = results.data() + kTokens;
  backend->StartBatch(
      BatchKey(), std::span(&rows, 1),
      {[](size_t) {},
       [](const absl::StatusOr<BatchReport>& report) { EXPECT_TRUE(report.ok()) << report.status(); }});
  return results;
}

TEST_P(PiecesTest, TheCpuComputesTheSame) {
  const std::string hidden = HiddenBytes();
  ChunkRows rows;
  rows.labels = labels_.data();
  rows.hidden_states.data = hidden.data();
  const std::vector<float> expected = ComputeOnCpu(rows);
  const Payload pieces = InPieces(hidden, GetParam());
  rows.hidden_states.data = nullptr;
  rows.hidden_states.parts = pieces.parts();
  EXPECT_EQ(ComputeOnCpu(rows), expected);
  const std::string unaligned = "x" + hidden;
  rows.hidden_states.data = unaligned.data() + 1;
  rows.hidden_states.parts = {};
  EXPECT_EQ(ComputeOnCpu(rows), expected);
}

INSTANTIATE_TEST_SUITE_P(Sizes, PiecesTest, ::testing::Values(1, 2, 3, 4, 5, 7, 19, 20, 50));

TEST(Payload, AtAnotherRankHasASizeAndNoByteHere) {
  const auto owner = std::make_shared<int>(1);
  Payload payload = Payload::At({.rank = 2, .number = 5, .non_finite = 3}, 100, owner);
  EXPECT_EQ(payload.size(), 100);
  EXPECT_EQ(payload.kept_bytes(), 0);
  EXPECT_TRUE(payload.parts().empty());
  EXPECT_EQ(payload.place(), MemoryPlace::kRank);
  EXPECT_EQ(payload.at_rank().rank, 2);
  EXPECT_EQ(payload.at_rank().number, 5u);
  EXPECT_EQ(payload.at_rank().non_finite, 3);
  EXPECT_TRUE(PayloadReader(payload).Next(100).empty());
  EXPECT_EQ(owner.use_count(), 2);
  payload = {};
  EXPECT_EQ(owner.use_count(), 1);
}

}  // namespace
}  // namespace lossd::engine::payload_test
