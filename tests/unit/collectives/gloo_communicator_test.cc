// What only Gloo's communicators do.
#include "kernels/collectives/gloo_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/collectives/nccl_communicator.h"
#include "tests/unit/collectives/ranks.h"

namespace lossd::kernels::collectives::gloo_communicator_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Rank;
using testing::RunRanks;

class NoRendezvous final : public Rendezvous {
 public:
  Result AllGather(std::string /*own*/, std::chrono::milliseconds /*timeout*/,
                   std::vector<std::string>* /*all*/) override {
    ADD_FAILURE() << "a group of one has nobody to meet";
    return {Code::kFailed, "nobody"};
  }
};

std::unique_ptr<Communicator> Connected(Rank& rank) {
  std::unique_ptr<Communicator> ranks;
  const Result result = ConnectGloo(
      {.rank = rank.rank, .size = rank.size, .timeout = std::chrono::seconds(100)}, rank.rendezvous, &ranks);
  EXPECT_TRUE(result.ok()) << result.message();
  return ranks;
}

TEST(GlooCommunicatorTest, AGroupOfOneNeedsNoNetworkAndNoRendezvous) {
  NoRendezvous nobody;
  std::unique_ptr<Communicator> alone;
  const Result result = ConnectGloo({.interface = "none-such"}, nobody, &alone);
  ASSERT_TRUE(result.ok()) << result.message();
  int64_t values[] = {3};
  EXPECT_TRUE(alone->AllReduce(Reduction::kSum, values, nullptr).ok());
  EXPECT_EQ(values[0], 3);
  EXPECT_TRUE(alone->Barrier(nullptr).ok());
}

TEST(GlooCommunicatorTest, NamesTheNetworkThatIsNotThere) {
  NoRendezvous nobody;
  std::unique_ptr<Communicator> none;
  const Result interface = ConnectGloo({.size = 2, .interface = "none-such"}, nobody, &none);
  EXPECT_EQ(interface.code(), Code::kUnavailable);
  EXPECT_THAT(interface.message(), HasSubstr("none-such"));
  const Result address = ConnectGloo({.size = 2, .address = "203.0.113.7"}, nobody, &none);
  EXPECT_EQ(address.code(), Code::kUnavailable);
  EXPECT_THAT(address.message(), HasSubstr("203.0.113.7"));
  EXPECT_EQ(ConnectGloo({.size = 2, .address = "a-name"}, nobody, &none).code(), Code::kInvalidArgument);
  EXPECT_EQ(ConnectGloo({.rank = 2, .size = 2}, nobody, &none).code(), Code::kInvalidArgument);
}

TEST(GlooCommunicatorTest, ConnectsOverANamedInterface) {
  RunRanks(2, [](Rank& rank) {
    std::unique_ptr<Communicator> ranks;
    const Result result =
        ConnectGloo({.rank = rank.rank, .size = rank.size, .interface = "lo"}, rank.rendezvous, &ranks);
    ASSERT_TRUE(result.ok()) << result.message();
    EXPECT_TRUE(ranks->Barrier(nullptr).ok());
  });
}

TEST(GlooCommunicatorTest, HasNoStreams) {
  RunRanks(2, [](Rank& rank) {
    const auto ranks = Connected(rank);
    ASSERT_NE(ranks, nullptr);
    int stream = 0;
    EXPECT_EQ(ranks->Barrier(&stream).code(), Code::kInvalidArgument);
    EXPECT_TRUE(ranks->Barrier(nullptr).ok());
  });
}

TEST(GlooCommunicatorTest, RanksInDifferentCallsSayWhich) {
  RunRanks(2, [](Rank& rank) {
    const auto ranks = Connected(rank);
    ASSERT_NE(ranks, nullptr);
    int64_t values[] = {1};
    const Result result =
        rank.rank == 0 ? ranks->Barrier(nullptr) : ranks->AllReduce(Reduction::kSum, values, nullptr);
    // The first to notice says so, and its closed connection may be all that the other one sees.
    EXPECT_TRUE(result.code() == Code::kMismatch || result.code() == Code::kPeerLost) << result.message();
    if (result.code() == Code::kMismatch) {
      EXPECT_THAT(result.message(), AllOf(HasSubstr("barrier"), HasSubstr("all-reduce")));
    }
  });
}

TEST(GlooCommunicatorTest, RanksThatDisagreeAboutSizesSaySo) {
  RunRanks(2, [](Rank& rank) {
    const auto ranks = Connected(rank);
    ASSERT_NE(ranks, nullptr);
    // Rank 1 gives more than rank 0 has room for.
    const int64_t bytes[] = {8, rank.rank == 0 ? 100 : 5000};
    std::vector<char> own(5000);
    std::vector<char> all(5008);
    const Result result = ranks->AllGatherV(own.data(), bytes, all.data(), nullptr);
    if (rank.rank == 0) {
      EXPECT_EQ(result.code(), Code::kMismatch) << result.message();
      EXPECT_THAT(result.message(), AllOf(HasSubstr("5000"), HasSubstr("100"), HasSubstr("rank 1")));
    } else {
      EXPECT_EQ(result.code(), Code::kPeerLost) << result.message();
    }
  });
}

TEST(NcclCommunicatorTest, SaysWhyItIsNotThere) {
  NoRendezvous nobody;
  std::unique_ptr<Communicator> none;
  const Result result = ConnectNccl({.size = 2, .library = "libnone-such.so"}, nobody, &none);
  EXPECT_EQ(result.code(), Code::kUnavailable);
  EXPECT_THAT(result.message(), ::testing::AnyOf(HasSubstr("without CUDA"), HasSubstr("libnone-such.so")));
}

}  // namespace
}  // namespace lossd::kernels::collectives::gloo_communicator_test
