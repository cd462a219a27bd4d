// What all parts of a vocabulary make of a row for returns that need whole rows, against plain arithmetic.
#include "kernels/cuda/rows/row_parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/segment_tree.h"

namespace lossd::kernels::row_parts_test {
namespace {

using cuda::Key;
using cuda::kMostParts;
using cuda::RowPart;

// What a part finds of logits [first, end), as its kernel does.
RowPart Find(const std::vector<float>& logits, size_t first, size_t end, float of_label) {
  RowPart part;
  for (size_t v = first; v < end; ++v) {
    if (logits[v] > of_label) ++part.above;
    if (!(logits[v] > part.largest)) continue;
    part.largest = logits[v];
    part.token = static_cast<int32_t>(v);
  }
  for (size_t v = first; v < end; ++v) {
    const double below = static_cast<double>(logits[v]) - part.largest;
    part.sum += std::exp(below);
    part.moment += std::exp(below) * below;
  }
  return part;
}

RowPart Merged(const std::vector<float>& logits, const std::vector<size_t>& borders, float of_label) {
  RowPart parts[kMostParts];
  const size_t count = borders.size() - 1;
  for (size_t p = 0; p < count; ++p) parts[p] = Find(logits, borders[p], borders[p + 1], of_label);
  return cuda::MergeRowParts(parts, static_cast<int32_t>(count));
}

std::vector<float> RandomLogits(size_t count, float deviation, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> logits(count);
  for (float& logit : logits) logit = normal(engine);
  return logits;
}

const std::vector<size_t> kBorders[] = {
    {0, 100},         {0, 50, 100},        {0, 1, 100},
    {0, 30, 30, 100}, {0, 0, 40, 99, 100}, {0, 13, 25, 38, 50, 63, 75, 88, 100}};

TEST(RowParts, AreAddedInTheOrderOfSegments) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> numbers(-1.0, 1.0);
  for (int32_t count = 1; count <= kMostParts; ++count) {
    double parts[kMostParts] = {};
    PerSegment<double> segments = {};
    for (int32_t i = 0; i < count; ++i) parts[i] = segments[static_cast<size_t>(i)] = numbers(random);
    EXPECT_EQ(cuda::SumInTree(parts, count), SumOverSegments(count, segments)) << count;
  }
}

TEST(RowParts, MakeTheWholeRow) {
  for (const float deviation : {0.0f, 0.1f, 3.0f, 100.0f}) {
    const std::vector<float> logits = RandomLogits(100, deviation, 7);
    const RowPart whole = Find(logits, 0, 100, logits[17]);
    for (const std::vector<size_t>& borders : kBorders) {
      SCOPED_TRACE(std::to_string(borders.size() - 1) + " parts, deviation " + std::to_string(deviation));
      const RowPart merged = Merged(logits, borders, logits[17]);
      EXPECT_EQ(merged.largest, whole.largest);
      EXPECT_EQ(merged.token, whole.token);
      EXPECT_EQ(merged.above, whole.above);
      EXPECT_NEAR(merged.sum / whole.sum, 1.0, 1e-14);
      EXPECT_NEAR(cuda::EntropyOf(merged), cuda::EntropyOf(whole), 1e-12);
    }
  }
}

TEST(RowParts, OfOnePartAreThatPart) {
  const std::vector<float> logits = RandomLogits(100, 2.0f, 3);
  const RowPart whole = Find(logits, 0, 100, logits[5]);
  const RowPart merged = Merged(logits, {0, 100}, logits[5]);
  EXPECT_EQ(merged.sum, whole.sum);
  EXPECT_EQ(merged.moment, whole.moment);
}

TEST(RowParts, MayLieFarApart) {
  for (const float distance : {50.0f, 800.0f, 1e5f, 1e37f}) {
    std::vector<float> logits = RandomLogits(100, 1.0f, 11);
    for (size_t v = 0; v < 50; ++v) logits[v] -= distance;
    const RowPart upper = Find(logits, 50, 100, 0);
    const RowPart merged = Merged(logits, {0, 50, 100}, logits[3]);
    EXPECT_EQ(merged.largest, upper.largest);
    EXPECT_NEAR(cuda::EntropyOf(merged), cuda::EntropyOf(upper), 1e-12);
    EXPECT_GE(merged.above, 50);
  }
}

TEST(RowParts, GiveTiesToTheLowestToken) {
  std::vector<float> logits(100, 0.0f);
  logits[70] = logits[31] = logits[99] = 4.0f;
  for (const std::vector<size_t>& borders : kBorders) {
    EXPECT_EQ(Merged(logits, borders, 4.0f).token, 31);
    EXPECT_EQ(Merged(logits, borders, 4.0f).above, 0);
    EXPECT_EQ(Merged(logits, borders, 0.0f).above, 3);
  }
}

// Keys of logits that are small integers.
Key KeyOf(int logit, size_t token) {
  return static_cast<Key>(logit + 1) << 32 | (0xFFFFFFFFU - static_cast<uint32_t>(token));
}

// The best `count` keys of all, from lists of parts.
std::vector<Key> MergedKeys(const std::vector<int>& logits, const std::vector<size_t>& borders,
                            size_t count) {
  const size_t parts = borders.size() - 1;
  const size_t stride = count + 3;
  std::vector<Key> keys(parts * stride, 0);
  for (size_t p = 0; p < parts; ++p) {
    std::vector<Key> own;
    for (size_t v = borders[p]; v < borders[p + 1]; ++v) own.push_back(KeyOf(logits[v], v));
    std::sort(own.rbegin(), own.rend());
    own.resize(count, 0);
    std::copy(own.begin(), own.end(), keys.begin() + static_cast<int64_t>(p * stride));
  }
  std::vector<Key> merged(count, 0);
  for (size_t p = 0; p < parts; ++p) {
    for (size_t i = 0; i < count; ++i) {
      const Key key = keys[p * stride + i];
      if (key == 0) continue;
      const int32_t place =
          cuda::PlaceOfKey(keys.data(), static_cast<int64_t>(stride), static_cast<int32_t>(parts),
                           static_cast<int32_t>(count), static_cast<int32_t>(p), static_cast<int32_t>(i));
      if (place >= static_cast<int32_t>(count)) continue;
      EXPECT_EQ(merged[static_cast<size_t>(place)], 0U) << "two keys have place " << place;
      merged[static_cast<size_t>(place)] = key;
    }
  }
  return merged;
}

TEST(RowParts, GiveTheBestKeysInOrder) {
  std::mt19937 engine(5);
  std::vector<int> logits(100);
  for (int& logit : logits) logit = static_cast<int>(engine() % 12);  // full of ties
  std::vector<Key> ordered;
  for (size_t v = 0; v < 100; ++v) ordered.push_back(KeyOf(logits[v], v));
  std::sort(ordered.rbegin(), ordered.rend());
  for (const std::vector<size_t>& borders : kBorders) {
    for (const size_t count : {1, 2, 13, 64}) {
      const std::vector<Key> expected(ordered.begin(), ordered.begin() + static_cast<int64_t>(count));
      EXPECT_EQ(MergedKeys(logits, borders, count), expected) << borders.size() - 1 << " parts, " << count;
    }
  }
}

double SumOf(const std::vector<double>& numbers) {
  double values[kMostParts] = {};
  std::copy(numbers.begin(), numbers.end(), values);
  return cuda::SumInTree(values, static_cast<int32_t>(numbers.size()));
}

// 1e16 + 1 is 1e16: what is lost tells which sums were made first.
TEST(RowParts, AreAddedInATreeOfNeighbours) {
  EXPECT_EQ(SumOf({3}), 3);
  EXPECT_EQ(SumOf({1e16, 1, -1e16}), 0);                 // (0 + 1) + 2
  EXPECT_EQ(SumOf({1e16, -1e16, 1, 1}), 2);              // (0 + 1) + (2 + 3)
  EXPECT_EQ(SumOf({1e16, 1, -1e16, 1, 1}), 1);           // ((0 + 1) + (2 + 3)) + 4
  EXPECT_EQ(SumOf({1, 1e16, 1, -1e16, 1, 1, 1}), 3);     // ((0 + 1) + (2 + 3)) + ((4 + 5) + 6)
  EXPECT_EQ(SumOf({1e16, 1, 1, 1, -1e16, 1, 1, 1}), 4);  // ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
}

}  // namespace
}  // namespace lossd::kernels::row_parts_test
