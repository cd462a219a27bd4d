// Steps over replicas, whatever carries them: as communicator_cases.cc.
#include <gtest/gtest.h>

#include <numeric>
#include <ostream>
#include <vector>

#include "kernels/collectives/slice_exchange.h"
#include "tests/unit/collectives/cases.h"

namespace lossd::kernels::collectives::slice_exchange_cases {
namespace {

using testing::Array;
using testing::BackendUnderTest;
using testing::Connected;
using testing::ExpectOk;
using testing::InOrder;
using testing::Parts;
using testing::Rank;
using testing::RunRanks;
using testing::SameBits;
using testing::Stream;

constexpr int64_t kColumns = 24;

struct Case {
  int replicas;
  int64_t rows;
  int32_t pieces;
};

// For the name of a test.
void PrintTo(const Case& of, std::ostream* out) {
  *out << of.replicas << " replicas, " << of.rows << " rows, " << of.pieces << " pieces";
}

class SliceExchangeTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const std::string missing = BackendUnderTest().Missing(GetParam().replicas);
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
  SliceLayout layout() const { return {GetParam().rows, GetParam().replicas}; }
};

std::vector<float> RowsOf(const std::vector<float>& matrix, const RowSpan& rows) {
  return {matrix.begin() + rows.first * kColumns, matrix.begin() + rows.end() * kColumns};
}

size_t Entries(const RowSpan& rows) { return static_cast<size_t>(rows.count * kColumns); }

TEST_P(SliceExchangeTest, ASliceIsSummedInTheOrderOfReplicas) {
  RunRanks(GetParam().replicas, [this](Rank& rank) {
    const auto ranks = Connected(rank);
    ASSERT_NE(ranks, nullptr);
    const int64_t entries = GetParam().rows * kColumns;
    std::vector<int> order(static_cast<size_t>(rank.size));
    std::iota(order.begin(), order.end(), 0);
    const std::vector<float> expected = InOrder(order, entries);

    Array<float> gradient(Parts(rank.rank, entries));
    const RowSpan own_rows = layout().Slice(rank.rank);
    Array<float> own(Entries(own_rows));
    SliceExchange exchange(layout(), kColumns, ranks.get());
    Array<char> scratch(
        static_cast<size_t>(SliceExchange::ScratchBytes(layout(), rank.rank, kColumns, GetParam().pieces)));
    for (int32_t piece = 0; piece < GetParam().pieces; ++piece) {
      ExpectOk(exchange.Sum(gradient.data(), piece, GetParam().pieces, own.data(), scratch.data(), Stream()));
    }
    ExpectOk(ranks->Wait(Stream()));
    EXPECT_TRUE(SameBits(own.values(), RowsOf(expected, own_rows))) << "replica " << rank.rank;
    EXPECT_TRUE(SameBits(gradient.values(), Parts(rank.rank, entries))) << "replica " << rank.rank;
  });
}

TEST_P(SliceExchangeTest, WeightsOfASliceBecomeThoseOfItsOwner) {
  RunRanks(GetParam().replicas, [this](Rank& rank) {
    const auto ranks = Connected(rank);
    ASSERT_NE(ranks, nullptr);
    // Weights of 16 bits: a replica has stepped its slice, and the others are old.
    constexpr uint16_t kOld = 7;
    const auto stepped = [](int64_t entry) { return static_cast<uint16_t>(1000 + entry); };
    std::vector<uint16_t> before(static_cast<size_t>(GetParam().rows * kColumns), kOld);
    std::vector<uint16_t> expected(before.size());
    for (int32_t slice = 0; slice < rank.size; ++slice) {
      const RowSpan rows = layout().Slice(slice);
      for (int64_t i = rows.first * kColumns; i < rows.end() * kColumns; ++i) {
        expected[static_cast<size_t>(i)] = stepped(i);
        if (slice == rank.rank) before[static_cast<size_t>(i)] = stepped(i);
      }
    }
    Array<uint16_t> weights(before);
    SliceExchange exchange(layout(), kColumns, ranks.get());
    for (int32_t piece = 0; piece < GetParam().pieces; ++piece) {
      ExpectOk(exchange.Gather(weights.data(), 2, piece, GetParam().pieces, Stream()));
    }
    ExpectOk(ranks->Wait(Stream()));
    EXPECT_TRUE(weights.values() == expected) << "replica " << rank.rank;
  });
}

INSTANTIATE_TEST_SUITE_P(Replicas, SliceExchangeTest,
                         ::testing::Values(Case{1, 10, 1}, Case{1, 10, 3}, Case{2, 11, 1}, Case{2, 64, 4},
                                           Case{3, 100, 3}, Case{3, 2, 2}, Case{4, 130, 5}, Case{4, 7, 3}));

}  // namespace
}  // namespace lossd::kernels::collectives::slice_exchange_cases
