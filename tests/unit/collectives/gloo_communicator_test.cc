// What only Gloo's communicators do.
#include "kernels/collectives/gloo_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "kernels/collectives/nccl_communicator.h"
#include "tests/unit/collectives/cases.h"
#include "tests/unit/collectives/ranks.h"

namespace lossd::kernels::collectives::gloo_communicator_test {
namespace {

using ::testing::AllOf;
using testing::Connected;
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

// Ports that this process listens on at loopback.
std::vector<sockaddr_in> Listening() {
  std::vector<sockaddr_in> found;
  for (int file = 0; file < 1024; ++file) {
    int listens = 0;
    socklen_t size = sizeof(listens);
    if (getsockopt(file, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) continue;
    sockaddr_in address{};
    size = sizeof(address);
    if (getsockname(file, reinterpret_cast<sockaddr*>(&address), &size) == 0) found.push_back(address);
  }
  return found;
}

// Connects to all of them, and sends `bytes`. Lets go when the process ends.
void VisitAsAStranger(const std::string& bytes) {
  for (const sockaddr_in& address : Listening()) {
    const int file = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(connect(file, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    (void)!send(file, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
}

// Ranks meet, and a stranger comes before they have connected.
class VisitedRendezvous final : public Rendezvous {
 public:
  VisitedRendezvous(Rank& rank, std::string bytes) : rank_(rank), bytes_(std::move(bytes)) {}

  Result AllGather(std::string own, std::chrono::milliseconds timeout,
                   std::vector<std::string>* all) override {
    VisitAsAStranger(bytes_);
    return rank_.rendezvous.AllGather(std::move(own), timeout, all);
  }

 private:
  Rank& rank_;
  const std::string bytes_;
};

// It has the place of a rank then, since Gloo asks nobody who it is.
TEST(GlooCommunicatorTest, AStrangerBeforeRanksAreConnectedMakesTheStartFailAndTheNextOneWorks) {
  for (const std::string& bytes : {std::string(), std::string(1000, '\x17'), std::string(1000, '\0')}) {
    RunRanks(2, [&bytes](Rank& rank) {
      VisitedRendezvous visited(rank, bytes);
      std::unique_ptr<Communicator> ranks;
      const Result result = ConnectGloo(
          {.rank = rank.rank, .size = rank.size, .timeout = std::chrono::seconds(2)}, visited, &ranks);
      EXPECT_FALSE(result.ok());
      EXPECT_THAT(result.message(), HasSubstr("rank " + std::to_string(1 - rank.rank)));
      const auto again = Connected(rank);
      ASSERT_NE(again, nullptr);
      EXPECT_TRUE(again->Barrier(nullptr).ok());
    });
  }
}

// A stranger comes again and again, and resets its connections.
class ResetRendezvous final : public Rendezvous {
 public:
  explicit ResetRendezvous(Rank& rank) : rank_(rank) {}

  Result AllGather(std::string own, std::chrono::milliseconds timeout,
                   std::vector<std::string>* all) override {
    for (int i = 0; i < 50; ++i) {
      for (const sockaddr_in& address : Listening()) {
        const int file = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        // Gloo may listen no more by now.
        (void)!connect(file, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
        const linger at_once{.l_onoff = 1, .l_linger = 0};
        EXPECT_EQ(setsockopt(file, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once)), 0);
        close(file);
      }
    }
    return rank_.rendezvous.AllGather(std::move(own), timeout, all);
  }

 private:
  Rank& rank_;
};

TEST(GlooCommunicatorTest, AStrangerThatResetsItsConnectionsEndsNoProcess) {
  RunRanks(2, [](Rank& rank) {
    ResetRendezvous visited(rank);
    std::unique_ptr<Communicator> ranks;
    // It may have had the place of a rank, as above.
    (void)ConnectGloo({.rank = rank.rank, .size = rank.size, .timeout = std::chrono::seconds(2)}, visited,
                      &ranks);
    const auto again = Connected(rank);
    ASSERT_NE(again, nullptr);
    EXPECT_TRUE(again->Barrier(nullptr).ok());
  });
}

TEST(GlooCommunicatorTest, OnceRanksAreConnectedNoPortIsOpenToStrangers) {
  RunRanks(3, [](Rank& rank) {
    const auto ranks = Connected(rank);
    ASSERT_NE(ranks, nullptr);
    EXPECT_TRUE(Listening().empty());
    EXPECT_TRUE(ranks->Barrier(nullptr).ok());
  });
}

TEST(GlooCommunicatorTest, ConnectsOverIpv6) {
  const int file = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in6 loopback{};
  loopback.sin6_family = AF_INET6;
  loopback.sin6_addr = in6addr_loopback;
  const bool has_ipv6 = bind(file, reinterpret_cast<const sockaddr*>(&loopback), sizeof(loopback)) == 0;
  close(file);
  if (!has_ipv6) GTEST_SKIP() << "this machine has no IPv6";
  RunRanks(2, [](Rank& rank) {
    std::unique_ptr<Communicator> ranks;
    const Result result =
        ConnectGloo({.rank = rank.rank, .size = rank.size, .address = "::1"}, rank.rendezvous, &ranks);
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
