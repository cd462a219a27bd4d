// What every communicator does, whatever carries it. Gloo's program runs it, and NCCL's on GPUs (tests/gpu).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>

#include "tests/unit/collectives/backend.h"
#include "tests/unit/collectives/cases.h"
#include "tests/unit/collectives/ranks.h"

namespace lossd::kernels::collectives::communicator_cases {
namespace {

using testing::Array;
using testing::BackendUnderTest;
using testing::Connected;
using testing::ExpectOk;
using ::testing::HasSubstr;
using testing::InOrder;
using testing::kLong;
using testing::Parts;
using testing::Rank;
using testing::RunRanks;
using testing::SameBits;
using testing::Stream;

// What rank `from` gives rank `to`, entry by entry.
std::vector<uint32_t> Values(int from, int to, int64_t count, int round = 0) {
  std::vector<uint32_t> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] =
        static_cast<uint32_t>(from * 100000007 + to * 1000003 + round * 7919) + static_cast<uint32_t>(i);
  }
  return values;
}

void Append(const std::vector<uint32_t>& more, std::vector<uint32_t>* all) {
  all->insert(all->end(), more.begin(), more.end());
}

std::vector<int64_t> Bytes(const std::vector<int64_t>& counts) {
  std::vector<int64_t> bytes;
  for (const int64_t count : counts) bytes.push_back(count * 4);
  return bytes;
}

void AllGather(Communicator& ranks, const std::vector<int64_t>& counts, int round = 0) {
  std::vector<uint32_t> expected;
  for (int from = 0; from < ranks.size(); ++from) {
    Append(Values(from, 0, counts[static_cast<size_t>(from)], round), &expected);
  }
  Array<uint32_t> own(Values(ranks.rank(), 0, counts[static_cast<size_t>(ranks.rank())], round));
  Array<uint32_t> all(expected.size());
  ExpectOk(ranks.AllGatherV(own.data(), Bytes(counts), all.data(), Stream()));
  ExpectOk(ranks.Wait(Stream()));
  EXPECT_TRUE(all.values() == expected) << "round " << round;
}

// count(from, to) is what goes from one rank to another.
template <class Count>
void AllToAll(Communicator& ranks, Count count, int round = 0) {
  std::vector<uint32_t> given;
  std::vector<uint32_t> expected;
  std::vector<int64_t> send_counts;
  std::vector<int64_t> receive_counts;
  for (int peer = 0; peer < ranks.size(); ++peer) {
    send_counts.push_back(count(ranks.rank(), peer));
    receive_counts.push_back(count(peer, ranks.rank()));
    Append(Values(ranks.rank(), peer, send_counts.back(), round), &given);
    Append(Values(peer, ranks.rank(), receive_counts.back(), round), &expected);
  }
  Array<uint32_t> send(given);
  Array<uint32_t> received(expected.size());
  ExpectOk(
      ranks.AllToAllV(send.data(), Bytes(send_counts), received.data(), Bytes(receive_counts), Stream()));
  ExpectOk(ranks.Wait(Stream()));
  EXPECT_TRUE(received.values() == expected) << "round " << round;
}

enum class Place { kOwn, kApart };

void ReduceScatter(Communicator& ranks, const std::vector<int64_t>& counts, Place place) {
  const auto self = static_cast<size_t>(ranks.rank());
  const int64_t all = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  const int64_t first = std::accumulate(counts.begin(), counts.begin() + ranks.rank(), int64_t{0});
  std::vector<int> order(static_cast<size_t>(ranks.size()));
  std::iota(order.begin(), order.end(), 0);
  const std::vector<float> sums = InOrder(order, all);
  const std::vector<float> expected(sums.begin() + first, sums.begin() + first + counts[self]);

  Array<float> parts(Parts(ranks.rank(), all));
  Array<float> apart(static_cast<size_t>(counts[self]));
  Array<char> scratch(static_cast<size_t>(ranks.ReduceScatterScratchBytes(counts)));
  float* const sum = place == Place::kApart ? apart.data() : parts.data() + first;
  std::vector<const float*> places;
  const float* next = parts.data();
  for (const int64_t count : counts) {
    places.push_back(next);
    next += count;
  }
  ExpectOk(ranks.ReduceScatterV(places, counts, sum, scratch.data(), Stream()));
  ExpectOk(ranks.Wait(Stream()));
  std::vector<float> got = apart.values();
  if (place == Place::kOwn) {
    const std::vector<float> whole = parts.values();
    got.assign(whole.begin() + first, whole.begin() + first + counts[self]);
  }
  EXPECT_TRUE(SameBits(got, expected)) << "rank " << ranks.rank();
}

// A failure of `operation` at `rank`.
void ExpectFailure(const Result& result, Code code, const std::string& operation, const Rank& rank) {
  EXPECT_EQ(result.code(), code) << result.message();
  EXPECT_THAT(result.message(), HasSubstr(operation));
  EXPECT_THAT(result.message(), HasSubstr("rank " + std::to_string(rank.rank) + " of"));
}

// What a rank's calls may take after another is lost: if they end before kLong, they ended because that was
// noticed.
std::chrono::milliseconds FaultTimeout() {
  return BackendUnderTest().NoticesLostPeers() ? kLong : BackendUnderTest().ShortTimeout();
}

// A failure of `operation` at `rank` because another rank is lost.
void ExpectLost(const Result& result, const std::string& operation, const Rank& rank) {
  if (BackendUnderTest().NoticesLostPeers()) {
    ExpectFailure(result, Code::kPeerLost, operation, rank);
  } else {
    ExpectFailure(result, result.ok() ? Code::kPeerLost : result.code(), operation, rank);
  }
}

class CommunicatorTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    const std::string missing = BackendUnderTest().Missing(GetParam());
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
};

TEST_P(CommunicatorTest, AllGatherTakesUnevenAndEmptyParts) {
  RunRanks(GetParam(), [](Rank& rank) {
    const auto ranks = Connected(rank);
    ASSERT_NE(ranks, nullptr);
    EXPECT_EQ(ranks->rank(), rank.rank);
    EXPECT_EQ(ranks->size(), rank.size);
    const std::vector<int64_t> all_counts[] = {{5, 0, 1000, 3}, {0, 7, 1, 0}, {0, 0, 0, 0}, {64, 64, 64, 64}};
    for (const std::vector<int64_t>& counts : all_counts) {
      AllGather(*ranks, {counts.begin(), counts.begin() + rank.size});
    }
  });
}

TEST_P(CommunicatorTest, AllGatherMayReadFromItsOwnPlace) {
  RunRanks(GetParam(), [](Rank& rank) {
    const auto ranks = Connected(rank);
    ASSERT_NE(ranks, nullptr);
    std::vector<uint32_t> expected;
    std::vector<int64_t> counts;
    size_t first = 0;
    for (int from = 0; from < rank.size; ++from) {
      if (from == rank.rank) first = expected.size();
      counts.push_back(10 + from);
      Append(Values(from, 0, counts.back()), &expected);
    }
    std::vector<uint32_t> given(expected.size());
    const auto self = static_cast<size_t>(counts[static_cast<size_t>(rank.rank)]);
    std::copy_n(expected.begin() + static_cast<ptrdiff_t>(first), self,
                given.begin() + static_cast<ptrdiff_t>(first));
    Array<uint32_t> all(given);
    ExpectOk(ranks->AllGatherV(all.data() + first, Bytes(counts), all.data(), Stream()));
    ExpectOk(ranks->Wait(Stream()));
    EXPECT_TRUE(all.values() == expected);
  });
}

TEST_P(CommunicatorTest, AllToAllTakesACountForEachPair) {
  RunRanks(GetParam(), [](Rank& rank) {
    const auto ranks = Connected(rank);
    ASSERT_NE(ranks, nullptr);
    AllToAll(*ranks, [](int from, int to) -> int64_t { return from * 10 + to + 1; });
    AllToAll(*ranks, [](int from, int to) -> int64_t { return (from + to) % 2 == 0 ? 0 : 100 * from + 1; });
    AllToAll(*ranks, [](int from, int to) -> int64_t { return from == to ? 33 : 0; });
    AllToAll(*ranks, [](int from, int /*to*/) -> int64_t { return from == 0 ? 17 : 0; });
    AllToAll(*ranks, [](int /*from*/, int /*to*/) -> int64_t { return 0; });
  });
}

TEST_P(CommunicatorTest, AnExchangeTakesWhatLiesAnywhere) {
  RunRanks(GetParam(), [](Rank& rank) {
    const auto ranks = Connected(rank);
    ASSERT_NE(ranks, nullptr);
    // Rank r sends rank s s + 1 numbers, which lie at 10 s, and finds what it gets at 10 (size - s).
    Array<uint32_t> send(size_t{10} * static_cast<size_t>(rank.size));
    std::vector<uint32_t> given(size_t{10} * static_cast<size_t>(rank.size));
    std::vector<uint32_t> expected(given.size() + 10);
    std::vector<Communicator::Transfer> transfers;
    Array<uint32_t> received(expected);
    for (int peer = 0; peer < rank.size; ++peer) {
      const auto to = Values(rank.rank, peer, peer + 1);
      std::copy(to.begin(), to.end(), given.begin() + 10 * peer);
      const auto from = Values(peer, rank.rank, rank.rank + 1);
      std::copy(from.begin(), from.end(), expected.begin() + 10 * (rank.size - peer));
      transfers.push_back({send.data() + 10 * peer, int64_t{4} * (peer + 1),
                           received.data() + 10 * (rank.size - peer), int64_t{4} * (rank.rank + 1)});
    }
    send.Set(given);
    ExpectOk(ranks->Exchange(transfers, Stream()));
    ExpectOk(ranks->Wait(Stream()));
    EXPECT_TRUE(received.values() == expected);
    transfers.pop_back();
    EXPECT_EQ(ranks->Exchange(transfers, Stream()).code(), Code::kInvalidArgument);
    ExpectOk(ranks->Barrier(Stream()));
  });
}

TEST_P(CommunicatorTest, ReduceScatterAddsInTheOrderOfTheRanks) {
  // If any order gave these bits, the test below would show nothing.
  if (GetParam() > 2) {
    std::vector<int> order(static_cast<size_t>(GetParam()));
    std::iota(order.begin(), order.end(), 0);
    const std::vector<int> backwards(order.rbegin(), order.rend());
    ASSERT_FALSE(SameBits(InOrder(order, 1000), InOrder(backwards, 1000)));
  }
  RunRanks(GetParam(), [](Rank& rank) {
    const auto ranks = Connected(rank);
    ASSERT_NE(ranks, nullptr);
    const std::vector<int64_t> all_counts[] = {{1000, 64, 4, 2052}, {5001, 3, 0, 7}, {0, 0, 1, 0}};
    for (const std::vector<int64_t>& counts : all_counts) {
      const std::vector<int64_t> own(counts.begin(), counts.begin() + rank.size);
      ReduceScatter(*ranks, own, Place::kApart);
      ReduceScatter(*ranks, own, Place::kOwn);
    }
  });
}

TEST_P(CommunicatorTest, AllReduceCombinesInTheOrderOfTheRanks) {
  RunRanks(GetParam(), [](Rank& rank) {
    const auto ranks = Connected(rank);
    ASSERT_NE(ranks, nullptr);
    // 1e16 + 1 + 1 is 1e16 in doubles, 1 + 1 + 1e16 is not.
    const auto given = [](int of, int entry) { return of == entry ? 1e16 : 1.0 + of; };
    std::vector<double> sums(3);
    std::vector<double> expected(3);
    for (int entry = 0; entry < 3; ++entry) {
      sums[static_cast<size_t>(entry)] = given(rank.rank, entry);
      for (int of = 0; of < rank.size; ++of) {
        double& total = expected[static_cast<size_t>(entry)];
        total = of == 0 ? given(0, entry) : total + given(of, entry);
      }
    }
    ExpectOk(ranks->AllReduce(Reduction::kSum, sums, Stream()));
    EXPECT_EQ(sums, expected);

    std::vector<double> smallest = {-1.5 * rank.rank, 2.0,
                                    rank.rank == 0 ? std::numeric_limits<double>::quiet_NaN() : 1.0};
    ExpectOk(ranks->AllReduce(Reduction::kMin, smallest, Stream()));
    EXPECT_EQ(smallest[0], -1.5 * (rank.size - 1));
    EXPECT_EQ(smallest[1], 2.0);
    EXPECT_TRUE(std::isnan(smallest[2]));

    std::vector<int64_t> values = {rank.rank, int64_t{1} << 60};
    ExpectOk(ranks->AllReduce(Reduction::kMax, values, Stream()));
    EXPECT_EQ(values, (std::vector<int64_t>{rank.size - 1, int64_t{1} << 60}));
    ExpectOk(ranks->AllReduce(Reduction::kSum, values, Stream()));
    EXPECT_EQ(values, (std::vector<int64_t>{rank.size * (rank.size - 1), rank.size * (int64_t{1} << 60)}));

    std::vector<int64_t> most(static_cast<size_t>(Communicator::kMostValues), rank.rank + 1);
    ExpectOk(ranks->AllReduce(Reduction::kMin, most, Stream()));
    EXPECT_EQ(most, std::vector<int64_t>(most.size(), 1));
  });
}

TEST_P(CommunicatorTest, NobodyLeavesABarrierBeforeEverybodyHasCome) {
  RunRanks(GetParam(), [](Rank& rank) {
    const auto ranks = Connected(rank);
    ASSERT_NE(ranks, nullptr);
    for (int round = 0; round < 5; ++round) {
      // Whoever leaves the barrier finds what every rank said before it came.
      if (rank.rank == round % rank.size) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      rank.rendezvous.Say(round);
      ExpectOk(ranks->Barrier(Stream()));
      for (int of = 0; of < rank.size; ++of) EXPECT_TRUE(rank.rendezvous.HasSaid(of, round)) << of;
    }
  });
}

TEST_P(CommunicatorTest, ManyCallsKeepTheirOrder) {
  RunRanks(GetParam(), [](Rank& rank) {
    const auto ranks = Connected(rank);
    ASSERT_NE(ranks, nullptr);
    for (int round = 0; round < 200; ++round) {
      std::vector<int64_t> counts;
      for (int from = 0; from < rank.size; ++from) counts.push_back((round * 7 + from * 3) % 11);
      AllGather(*ranks, counts, round);
      AllToAll(
          *ranks, [&](int from, int to) -> int64_t { return (round + from * 5 + to) % 6; }, round);
      std::vector<int64_t> sum = {round};
      ExpectOk(ranks->AllReduce(Reduction::kSum, sum, Stream()));
      EXPECT_EQ(sum[0], int64_t{round} * rank.size);
    }
  });
}

TEST_P(CommunicatorTest, MessagesOfManyMegabytesArriveWhole) {
  RunRanks(GetParam(), [](Rank& rank) {
    const auto ranks = Connected(rank);
    ASSERT_NE(ranks, nullptr);
    const std::vector<int64_t> counts = {(int64_t{3} << 20) + 1, 5, int64_t{2} << 20, 1 << 18};
    AllGather(*ranks, {counts.begin(), counts.begin() + rank.size});
    AllToAll(*ranks, [](int from, int to) -> int64_t { return (int64_t{1} << 20) + from * 4 + to; });
    ReduceScatter(*ranks, {counts.begin(), counts.begin() + rank.size}, Place::kOwn);
  });
}

TEST_P(CommunicatorTest, WhatCannotBeIsRefusedAndChangesNothing) {
  RunRanks(GetParam(), [](Rank& rank) {
    const auto ranks = Connected(rank);
    ASSERT_NE(ranks, nullptr);
    const auto size = static_cast<size_t>(rank.size);
    Array<char> memory(size_t{64});
    ExpectFailure(
        ranks->AllGatherV(memory.data(), std::vector<int64_t>(size + 1, 1), memory.data(), Stream()),
        Code::kInvalidArgument, "all-gather-v", rank);
    const std::vector<const float*> nowhere(size);
    ExpectFailure(ranks->ReduceScatterV(nowhere, std::vector<int64_t>(size, -1), nullptr, nullptr, Stream()),
                  Code::kInvalidArgument, "reduce-scatter-v", rank);
    ExpectFailure(ranks->ReduceScatterV({}, std::vector<int64_t>(size, 0), nullptr, nullptr, Stream()),
                  Code::kInvalidArgument, "reduce-scatter-v", rank);
    std::vector<int64_t> unequal(size, 1);
    unequal[static_cast<size_t>(rank.rank)] = 2;
    ExpectFailure(
        ranks->AllToAllV(memory.data(), unequal, memory.data(), std::vector<int64_t>(size, 1), Stream()),
        Code::kInvalidArgument, "all-to-all-v", rank);
    std::vector<double> many(static_cast<size_t>(Communicator::kMostValues) + 1);
    ExpectFailure(ranks->AllReduce(Reduction::kSum, many, Stream()), Code::kInvalidArgument, "all-reduce",
                  rank);
    ExpectOk(ranks->Barrier(Stream()));
  });
}

TEST_P(CommunicatorTest, WhatItKeepsEndsWithIt) {
  RunRanks(GetParam(), [](Rank& rank) {
    std::unique_ptr<Communicator> ranks = Connected(rank);
    auto kept = std::make_shared<int>(0);
    const std::weak_ptr<int> seen = kept;
    ranks->Keep(std::move(kept));
    ExpectOk(ranks->Barrier(Stream()));
    EXPECT_FALSE(seen.expired());
    ranks.reset();
    EXPECT_TRUE(seen.expired());
  });
}

TEST_P(CommunicatorTest, AbortEndsEveryLaterCall) {
  RunRanks(GetParam(), [](Rank& rank) {
    const auto ranks = Connected(rank);
    ASSERT_NE(ranks, nullptr);
    ExpectOk(ranks->Barrier(Stream()));
    rank.rendezvous.Meet();
    ranks->Abort();
    ranks->Abort();
    ExpectFailure(ranks->Barrier(Stream()), Code::kAborted, "barrier", rank);
    ExpectFailure(ranks->Wait(Stream()), Code::kAborted, "waiting", rank);
    rank.rendezvous.Meet();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CommunicatorTest, ::testing::Values(1, 2, 3, 4),
                         ::testing::PrintToStringParamName());

// Faults, which a group of one does not know.
using CommunicatorFaultTest = CommunicatorTest;

TEST_P(CommunicatorFaultTest, ARankThatDiesBetweenCallsEndsTheCallsOfTheOthers) {
  const int dying = GetParam() - 1;
  RunRanks(GetParam(),
           [&](Rank& rank) {
             const auto ranks = Connected(rank, FaultTimeout());
             ASSERT_NE(ranks, nullptr);
             for (int round = 0; round < 3; ++round) {
               AllGather(*ranks, std::vector<int64_t>(static_cast<size_t>(rank.size), 100), round);
             }
             if (rank.rank == dying) testing::Die();
             std::vector<double> values = {1.0};
             const Result lost = ranks->AllReduce(Reduction::kSum, values, Stream());
             ExpectLost(lost, "all-reduce", rank);
             const Result later = ranks->Barrier(Stream());
             ExpectFailure(later, lost.code(), "barrier", rank);
             EXPECT_THAT(later.message(), HasSubstr(lost.message()));
           },
           {dying});
}

TEST_P(CommunicatorFaultTest, ARankThatDiesWhileDataMovesEndsTheCallsOfTheOthers) {
  const int dying = 0;
  RunRanks(GetParam(),
           [&](Rank& rank) {
             const auto ranks = Connected(rank, FaultTimeout());
             ASSERT_NE(ranks, nullptr);
             constexpr int64_t kBytes = int64_t{16} << 20;
             const std::vector<int64_t> bytes(static_cast<size_t>(rank.size), kBytes);
             Array<char> given(static_cast<size_t>(kBytes * rank.size));
             Array<char> received(static_cast<size_t>(kBytes * rank.size));
             rank.rendezvous.Meet();
             std::thread killer;
             if (rank.rank == dying) {
               killer = std::thread([] {
                 std::this_thread::sleep_for(std::chrono::milliseconds(50));
                 testing::Die();
               });
             }
             Result result;
             while (result.ok()) {
               result = ranks->AllToAllV(given.data(), bytes, received.data(), bytes, Stream());
               if (result.ok()) result = ranks->Wait(Stream());
             }
             if (killer.joinable()) killer.join();
             ExpectLost(result, "", rank);
           },
           {dying});
}

TEST_P(CommunicatorFaultTest, AbortEndsACallThatWaits) {
  RunRanks(GetParam(), [](Rank& rank) {
    const auto ranks = Connected(rank, FaultTimeout());
    ASSERT_NE(ranks, nullptr);
    ExpectOk(ranks->Barrier(Stream()));
    if (rank.rank == 0) {
      std::thread other([&] {
        std::this_thread::sleep_for(
            std::chrono::milliseconds(30));  // most of the time the call waits by then
        ranks->Abort();
        ranks->Abort();
      });
      ExpectFailure(ranks->Barrier(Stream()), Code::kAborted, "barrier", rank);
      other.join();
      ExpectFailure(ranks->Barrier(Stream()), Code::kAborted, "barrier", rank);
      rank.rendezvous.Meet();
    } else {
      // The others are not in the call that was aborted; the next one tells them.
      rank.rendezvous.Meet();
      Result result = ranks->Barrier(Stream());
      // With NCCL rank 0 may have done its part of that one before it was aborted.
      if (result.ok() && !BackendUnderTest().NoticesLostPeers()) result = ranks->Barrier(Stream());
      ExpectLost(result, "barrier", rank);
    }
  });
}

// Replicas outlive the loss of one of them: the ranks go on in the same processes, with another communicator.
TEST_P(CommunicatorFaultTest, AnotherOneGoesOnInTheProcessesOfOneThatWasAborted) {
  RunRanks(GetParam(), [](Rank& rank) {
    const std::vector<int64_t> counts(static_cast<size_t>(rank.size), 1000);
    for (int round = 0; round < 4; ++round) {
      auto ranks = Connected(rank, FaultTimeout());
      ASSERT_NE(ranks, nullptr);
      AllGather(*ranks, counts, round);
      const int leaving = round % rank.size;
      if (rank.rank == leaving) {
        ranks->Abort();
      } else {
        // Where a call does not notice it, somebody else has to: in a server heartbeats do.
        std::thread noticing;
        if (!BackendUnderTest().NoticesLostPeers()) {
          noticing = std::thread([&ranks] {
            std::this_thread::sleep_for(std::chrono::milliseconds(300));
            ranks->Abort();
          });
        }
        // The data is on its way when it is lost.
        Array<char> given(size_t{1} << 20);
        Array<char> all(static_cast<size_t>(rank.size) << 20);
        const std::vector<int64_t> bytes(static_cast<size_t>(rank.size), int64_t{1} << 20);
        Result lost = ranks->AllGatherV(given.data(), bytes, all.data(), Stream());
        if (lost.ok()) lost = ranks->Wait(Stream());
        ExpectLost(lost, "", rank);
        if (noticing.joinable()) noticing.join();
        ranks->Abort();
      }
      ranks = nullptr;
    }
    const auto ranks = Connected(rank);
    ASSERT_NE(ranks, nullptr);
    AllGather(*ranks, counts);
  });
}

TEST_P(CommunicatorFaultTest, ARankThatStaysAwayIsNamedWhenTheTimeIsOver) {
  RunRanks(GetParam(), [](Rank& rank) {
    const int away = rank.size - 1;
    const auto ranks = Connected(rank, rank.rank == 0 ? BackendUnderTest().ShortTimeout() : FaultTimeout());
    ASSERT_NE(ranks, nullptr);
    if (rank.rank == away) {
      rank.rendezvous.Meet();
      return;
    }
    const Result result = ranks->Barrier(Stream());
    if (rank.rank == 0) {
      ExpectFailure(result, Code::kTimeout, "barrier", rank);
    } else {
      // Rank 0 has given up, and that is noticed although the one that stays away comes first or last.
      ExpectLost(result, "barrier", rank);
    }
    rank.rendezvous.Meet();
  });
}

TEST_P(CommunicatorFaultTest, ARankThatDoesNotComeToTheRendezvousIsNamed) {
  RunRanks(GetParam(), [](Rank& rank) {
    if (rank.rank == rank.size - 1) return;
    std::unique_ptr<Communicator> communicator;
    const Result result = BackendUnderTest().Connect(rank, std::chrono::milliseconds(300), &communicator);
    ExpectFailure(result, Code::kTimeout, "connecting ranks", rank);
    EXPECT_THAT(result.message(), HasSubstr("rank " + std::to_string(rank.size - 1) + " did not come"));
    EXPECT_EQ(communicator, nullptr);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CommunicatorFaultTest, ::testing::Values(2, 3, 4),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace lossd::kernels::collectives::communicator_cases
