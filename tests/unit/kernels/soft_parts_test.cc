// What all parts of a vocabulary make of a row with soft targets, against plain arithmetic.
#include "kernels/cuda/losses/soft_parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace lossd::kernels::soft_parts_test {
namespace {

using cuda::kMostParts;
using cuda::RowStatistics;
using cuda::SoftPart;
using cuda::SoftTerms;

struct Row {
  std::vector<float> student;
  std::vector<float> teacher;
  size_t label = 0;
};

Row RandomRow(float deviation, size_t label) {
  std::mt19937 engine(9);
  std::normal_distribution<float> normal(0, deviation);
  Row row{std::vector<float>(100), std::vector<float>(100), label};
  for (float& logit : row.student) logit = normal(engine);
  for (float& logit : row.teacher) logit = normal(engine);
  return row;
}

// What a part finds of entries [first, end), as its kernel does: maxima with the label, sums without it.
SoftPart Find(const Row& row, size_t first, size_t end, double inverse) {
  SoftPart part;
  RowStatistics& sums = part.sums;
  for (size_t v = first; v < end; ++v) {
    sums.largest = std::max(sums.largest, row.student[v]);
    sums.teacher_largest = std::max(sums.teacher_largest, row.teacher[v]);
    sums.most = std::max(sums.most, row.student[v] - row.teacher[v]);
    sums.least = std::min(sums.least, row.student[v] - row.teacher[v]);
  }
  for (size_t v = first; v < end; ++v) {
    const double s = static_cast<double>(row.student[v]) - sums.largest;
    const double t = static_cast<double>(row.teacher[v]) - sums.teacher_largest;
    if (v == row.label) {
      part.logit = row.student[v];
      part.teacher_logit = row.teacher[v];
      part.slope = 0.5f;
      part.has_label = 1;
      continue;
    }
    sums.others += std::exp(s);
    sums.moment += std::exp(s) * s;
    sums.student += std::exp(s * inverse);
    sums.teacher += std::exp(t * inverse);
    sums.difference +=
        std::exp(s * inverse) * (static_cast<double>(row.student[v]) - static_cast<double>(row.teacher[v]));
  }
  return part;
}

SoftPart Merged(const Row& row, const std::vector<size_t>& borders, double inverse) {
  SoftPart parts[kMostParts];
  const size_t count = borders.size() - 1;
  for (size_t p = 0; p < count; ++p) parts[p] = Find(row, borders[p], borders[p + 1], inverse);
  return cuda::MergeSoftParts(parts, static_cast<int32_t>(count), inverse);
}

void ExpectNear(double actual, double expected, double scale) {
  EXPECT_NEAR(actual, expected, 1e-13 * std::max(std::fabs(scale), 1.0));
}

const std::vector<size_t> kBorders[] = {
    {0, 100},         {0, 50, 100},        {0, 1, 100},
    {0, 30, 30, 100}, {0, 0, 40, 99, 100}, {0, 13, 25, 38, 50, 63, 75, 88, 100}};

TEST(SoftParts, MakeTheWholeRow) {
  for (const float deviation : {0.1f, 3.0f, 100.0f}) {
    for (const double inverse : {1.0, 0.4, 3.0}) {
      for (const size_t label : {0, 57, 99}) {
        const Row row = RandomRow(deviation, label);
        const SoftPart whole = Find(row, 0, 100, inverse);
        for (const std::vector<size_t>& borders : kBorders) {
          SCOPED_TRACE(std::to_string(borders.size() - 1) + " parts, label " + std::to_string(label));
          const SoftPart merged = Merged(row, borders, inverse);
          EXPECT_EQ(merged.sums.largest, whole.sums.largest);
          EXPECT_EQ(merged.sums.teacher_largest, whole.sums.teacher_largest);
          EXPECT_EQ(merged.sums.spread(), whole.sums.spread());
          ExpectNear(merged.sums.others, whole.sums.others, whole.sums.others);
          ExpectNear(merged.sums.moment, whole.sums.moment, deviation * whole.sums.others);
          ExpectNear(merged.sums.student, whole.sums.student, whole.sums.student);
          ExpectNear(merged.sums.teacher, whole.sums.teacher, whole.sums.teacher);
          ExpectNear(merged.sums.difference, whole.sums.difference, deviation * whole.sums.student);
          EXPECT_EQ(merged.logit, row.student[label]);
          EXPECT_EQ(merged.teacher_logit, row.teacher[label]);
          EXPECT_EQ(merged.slope, 0.5f);
          EXPECT_EQ(merged.overflowed, 0);
        }
      }
    }
  }
}

// Sums of equal numbers are equal: a teacher that is the head itself must give a divergence of exactly 0.
TEST(SoftParts, GiveEqualHeadsEqualSums) {
  for (const double inverse : {1.0, 0.4}) {
    Row row = RandomRow(20.0f, 31);
    row.teacher = row.student;
    for (const std::vector<size_t>& borders : kBorders) {
      const SoftPart merged = Merged(row, borders, inverse);
      EXPECT_EQ(merged.sums.student, merged.sums.teacher);
      if (inverse == 1.0) {
        EXPECT_EQ(merged.sums.others, merged.sums.teacher);
      }
      EXPECT_EQ(merged.sums.spread(), 0.0f);
    }
  }
}

TEST(SoftParts, MayLieFarApartInOneHead) {
  for (const float distance : {800.0f, 1e5f, 1e37f}) {
    Row row = RandomRow(1.0f, 3);
    for (size_t v = 0; v < 50; ++v) row.student[v] -= distance;
    const SoftPart merged = Merged(row, {0, 50, 100}, 1.0);
    const SoftPart upper = Find(row, 50, 100, 1.0);
    EXPECT_EQ(merged.sums.others, upper.sums.others);
    EXPECT_EQ(merged.sums.moment, upper.sums.moment);
    EXPECT_EQ(merged.sums.difference, upper.sums.difference);
    EXPECT_GT(merged.sums.teacher, upper.sums.teacher);
    EXPECT_EQ(merged.logit, row.student[3]);
  }
}

TEST(SoftParts, OverflowIfOneDoes) {
  SoftPart parts[kMostParts];
  for (int p = 0; p < 3; ++p) parts[p] = Find(RandomRow(1.0f, 50), 30 * p, 30 * p + 30, 1.0);
  parts[2].overflowed = 1;
  EXPECT_EQ(cuda::MergeSoftParts(parts, 3, 1.0).overflowed, 1);
  EXPECT_EQ(cuda::MergeSoftParts(parts, 2, 1.0).overflowed, 0);
}

TEST(SoftTerms, AreAddedInATreeOfNeighbours) {
  SoftTerms terms[kMostParts];
  const double numbers[] = {1e16, 1, -1e16, 1, 1};
  for (int p = 0; p < 5; ++p) terms[p] = {{numbers[p], 2 * numbers[p]}, 4 * numbers[p], 0};
  SoftTerms row = cuda::MergeSoftTerms(terms, 5);
  EXPECT_EQ(row.parts[0], 1);  // ((0 + 1) + (2 + 3)) + 4
  EXPECT_EQ(row.parts[1], 2);
  EXPECT_EQ(row.smoothing, 4);
  EXPECT_EQ(row.bad, 0);
  terms[3].bad = 1;
  EXPECT_EQ(cuda::MergeSoftTerms(terms, 5).bad, 1);
  EXPECT_EQ(cuda::MergeSoftTerms(terms, 3).bad, 0);
}

}  // namespace
}  // namespace lossd::kernels::soft_parts_test
