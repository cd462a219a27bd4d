// Logits that come from several ranks are those of the whole vocabulary.
#include "server/engine/device/logit_parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

namespace lossd::engine::logit_parts_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAreArray;
using ::testing::IsNan;

constexpr int64_t kRows = 3;
constexpr int64_t kVocab = 21;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Few values, so that many are equal.
std::vector<float> MakeLogits() {
  std::vector<float> logits(kRows * kVocab);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i * 7 % 5) - 2.0f;
  return logits;
}

// What one device answers for entries [first, first + entries) of a row.
struct Largest {
  std::vector<int32_t> tokens;
  std::vector<float> logits;
  float log_sum_exp = 0;
};
Largest LargestOf(const float* row, int64_t entries, int32_t k) {
  Largest largest{std::vector<int32_t>(static_cast<size_t>(k), -1),
                  std::vector<float>(static_cast<size_t>(k), NAN), NAN};
  double sum = 0;
  for (int64_t i = 0; i < entries; ++i) sum += std::exp(static_cast<double>(row[i]));
  if (!std::isfinite(sum)) return largest;
  std::vector<int32_t> order(static_cast<size_t>(entries));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [row](int32_t a, int32_t b) { return row[a] > row[b]; });
  order.resize(static_cast<size_t>(k));
  largest.tokens = order;
  std::transform(order.begin(), order.end(), largest.logits.begin(), [row](int32_t i) { return row[i]; });
  largest.log_sum_exp = static_cast<float>(std::log(sum));
  return largest;
}

// All ranks' parts as they arrive.
std::vector<std::byte> PartsOf(const LogitRows& wanted, const kernels::ShardLayout& layout,
                               const std::vector<float>& logits) {
  std::vector<std::byte> all;
  for (int32_t rank = 0; rank < layout.ranks(); ++rank) {
    const LogitPart part(wanted, layout, rank);
    std::vector<std::byte> own(static_cast<size_t>(part.bytes()));
    const kernels::LogitOutputs out = part.In(own.data());
    for (int64_t row = 0; row < wanted.rows; ++row) {
      const float* from = logits.data() + row * kVocab + layout.first(rank);
      if (out.logits != nullptr) {
        std::copy_n(from, part.entries(), static_cast<float*>(out.logits) + row * part.entries());
        continue;
      }
      const Largest largest = LargestOf(from, part.entries(), out.top_k);
      std::copy(largest.tokens.begin(), largest.tokens.end(), out.top_tokens + row * out.top_k);
      std::copy(largest.logits.begin(), largest.logits.end(), out.top_logits + row * out.top_k);
      out.log_sum_exp[row] = largest.log_sum_exp;
    }
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

class LogitPartsTest : public ::testing::TestWithParam<int32_t> {
 protected:
  const kernels::ShardLayout layout_{kVocab, GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Ranks, LogitPartsTest, ::testing::Values(1, 2, 3, 8));

TEST_P(LogitPartsTest, AllLogitsAreInTheOrderOfTokens) {
  const std::vector<float> logits = MakeLogits();
  std::vector<float> out(logits.size());
  const LogitRows wanted{.rows = kRows, .outputs = {.logits = out.data()}};
  std::vector<std::byte> parts = PartsOf(wanted, layout_, logits);
  MergeLogits(wanted, layout_, parts.data());
  EXPECT_THAT(out, ElementsAreArray(logits));
}

struct TopOutputs {
  explicit TopOutputs(int32_t k)
      : tokens(static_cast<size_t>(kRows * k)),
        logits(tokens.size()),
        sums(kRows),
        wanted{.rows = kRows,
               .outputs = {.top_k = k,
                           .top_tokens = tokens.data(),
                           .top_logits = logits.data(),
                           .log_sum_exp = sums.data()}} {}
  std::vector<int32_t> tokens;
  std::vector<float> logits;
  std::vector<float> sums;
  LogitRows wanted;
};

TEST_P(LogitPartsTest, TheLargestAreThoseOfOneDeviceAndEqualOnesInTheOrderOfTokens) {
  const std::vector<float> logits = MakeLogits();
  for (const int32_t k : {1, 2, 5, 21}) {
    SCOPED_TRACE(k);
    TopOutputs out(k);
    std::vector<std::byte> parts = PartsOf(out.wanted, layout_, logits);
    MergeLogits(out.wanted, layout_, parts.data());
    for (int64_t row = 0; row < kRows; ++row) {
      const Largest whole = LargestOf(logits.data() + row * kVocab, kVocab, k);
      const auto at = static_cast<std::ptrdiff_t>(row * k);
      EXPECT_THAT(std::vector(out.tokens.begin() + at, out.tokens.begin() + at + k),
                  ElementsAreArray(whole.tokens));
      EXPECT_THAT(std::vector(out.logits.begin() + at, out.logits.begin() + at + k),
                  ElementsAreArray(whole.logits));
      EXPECT_NEAR(out.sums[static_cast<size_t>(row)], whole.log_sum_exp, 1e-6);
    }
  }
}

TEST_P(LogitPartsTest, ARowThatOverflowsInOnePartHasNoLargest) {
  constexpr int32_t k = 2;
  std::vector<float> logits = MakeLogits();
  logits[kVocab + 4] = kInfinity;
  TopOutputs out(k);
  std::vector<std::byte> parts = PartsOf(out.wanted, layout_, logits);
  MergeLogits(out.wanted, layout_, parts.data());
  EXPECT_THAT(std::vector(out.tokens.begin() + k, out.tokens.begin() + 2 * k), Each(-1));
  EXPECT_THAT(std::vector(out.logits.begin() + k, out.logits.begin() + 2 * k), Each(IsNan()));
  EXPECT_TRUE(std::isnan(out.sums[1]));
  EXPECT_FALSE(std::isnan(out.sums[0]));
  EXPECT_FALSE(std::isnan(out.sums[2]));
}

}  // namespace
}  // namespace lossd::engine::logit_parts_test
