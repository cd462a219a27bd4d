#include "server/rpc/connections/connection_guard.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "server/rpc/transport/file_descriptor.h"

namespace lossd::rpc::connection_guard_test {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class FakeCounts final : public CallCounts {
 public:
  int64_t Begun() override { return begun += 1'000; }
  std::vector<ConnectionCalls> ByConnection() override { return connections; }

  int64_t begun = 0;
  std::vector<ConnectionCalls> connections;
};

// A TCP connection over loopback.
struct Connection {
  FileDescriptor client;
  FileDescriptor server;
  TcpConnection ends;
  int64_t id = 0;  // gRPC's number of it

  ConnectionCalls Unfinished(int64_t calls) const {
    return {.id = id, .connection = ends, .unfinished = calls};
  }
  ConnectionCalls Reset(int64_t calls) const { return {.id = id, .connection = ends, .reset = calls}; }
  // Whether the server's side has cut it off.
  bool ended() const {
    char byte = 0;
    return recv(client.get(), &byte, 1, MSG_DONTWAIT) < 0 && errno == ECONNRESET;
  }
};

class ConnectionGuardTest : public ::testing::Test {
 protected:
  void SetUp() override {
    listener_ = FileDescriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address_);
    ASSERT_EQ(bind(listener_.get(), generic(), size), 0);
    ASSERT_EQ(listen(listener_.get(), 16), 0);
    ASSERT_EQ(getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address_), &size), 0);
  }

  Connection Connect() {
    Connection made;
    made.client = FileDescriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(made.client.get(), generic(), sizeof(address_)), 0);
    made.server = FileDescriptor(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    made.ends = ConnectionOf(made.server.get()).value_or(TcpConnection{});
    made.id = ++connections_;
    return made;
  }
  Connection ConnectWatched() {
    Connection made = Connect();
    guard_.Watch(made.server.get(), made.ends, now_);
    return made;
  }
  std::vector<TcpAddress> LookAfter(ConnectionGuard::Clock::duration time,
                                    std::vector<ConnectionCalls> calls) {
    now_ += time;
    counts_.connections = std::move(calls);
    return guard_.Look(now_);
  }

  const sockaddr* generic() const { return reinterpret_cast<const sockaddr*>(&address_); }

  FileDescriptor listener_;
  sockaddr_in address_{};
  int64_t connections_ = 0;
  FakeCounts counts_;
  ConnectionGuard guard_{&counts_};
  ConnectionGuard::Time now_ = ConnectionGuard::Clock::now();
};

constexpr int64_t kFew = ConnectionGuard::kMostUnfinished;
constexpr int64_t kMany = ConnectionGuard::kMostUnfinished + 1;

TEST_F(ConnectionGuardTest, EndsTheConnectionWithTooManyUnfinishedCallsAndNoOther) {
  const Connection good = ConnectWatched();
  const Connection flood = ConnectWatched();
  EXPECT_THAT(LookAfter(milliseconds(20), {good.Unfinished(kFew), flood.Unfinished(kMany)}),
              ElementsAre(flood.ends.peer));
  EXPECT_TRUE(flood.ended());
  EXPECT_FALSE(good.ended());
}

TEST_F(ConnectionGuardTest, WhatWasNotReadGoesWithTheConnection) {
  const Connection flood = ConnectWatched();
  ASSERT_EQ(send(flood.client.get(), "more calls", 10, 0), 10);
  LookAfter(milliseconds(20), {flood.Unfinished(kMany)});
  char byte = 0;
  EXPECT_LE(recv(flood.server.get(), &byte, 1, MSG_DONTWAIT), 0);
}

TEST_F(ConnectionGuardTest, EndsAConnectionWhoseCallsAreResetFasterThanAllowed) {
  const Connection flood = ConnectWatched();
  EXPECT_THAT(LookAfter(milliseconds(20), {flood.Reset(2'000)}), IsEmpty());
  EXPECT_THAT(LookAfter(milliseconds(20), {flood.Reset(2'100)}), ElementsAre(flood.ends.peer));
  EXPECT_TRUE(flood.ended());
}

TEST_F(ConnectionGuardTest, LeavesAConnectionThatHasResetManyCallsInALongTime) {
  const Connection slow = ConnectWatched();
  EXPECT_THAT(LookAfter(hours(24), {slow.Reset(1'000'000)}), IsEmpty());
  EXPECT_THAT(LookAfter(seconds(1), {slow.Reset(1'000'200)}), IsEmpty());
  EXPECT_FALSE(slow.ended());
}

TEST_F(ConnectionGuardTest, ASocketsNumberThatIsSomebodyElsesByNowIsLeftAlone) {
  const Connection gone = ConnectWatched();
  const Connection other = Connect();  // which the guard has not been told of
  ASSERT_EQ(dup2(other.server.get(), gone.server.get()), gone.server.get());
  EXPECT_THAT(LookAfter(milliseconds(20), {gone.Unfinished(kMany)}), ElementsAre(gone.ends.peer));
  EXPECT_FALSE(other.ended());
}

TEST_F(ConnectionGuardTest, AFloodCountsOnceAlsoIfItsClientHasHungUpBefore) {
  Connection flood = ConnectWatched();
  const std::string host = flood.ends.peer.host;
  flood.client = FileDescriptor();
  flood.server = FileDescriptor();
  EXPECT_THAT(LookAfter(milliseconds(20), {flood.Unfinished(kMany)}), ElementsAre(flood.ends.peer));
  EXPECT_THAT(LookAfter(milliseconds(20), {flood.Unfinished(kMany)}), IsEmpty());
  EXPECT_EQ(guard_.ServeAt(host, now_), now_ + ConnectionGuard::kShortestWait);
}

TEST_F(ConnectionGuardTest, WhatAClientSentBeforeItHungUpIsThrownAway) {
  Connection flood = ConnectWatched();
  ASSERT_EQ(send(flood.client.get(), "more calls", 10, 0), 10);
  const linger at_once{.l_onoff = 1, .l_linger = 0};
  ASSERT_EQ(setsockopt(flood.client.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once)), 0);
  flood.client = FileDescriptor();  // resets the connection, which leaves what has arrived to be read
  LookAfter(milliseconds(20), {flood.Unfinished(kMany)});
  char byte = 0;
  EXPECT_LE(recv(flood.server.get(), &byte, 1, MSG_DONTWAIT), 0);
}

TEST_F(ConnectionGuardTest, OnePortOfAClientMayHaveConnectionsToSeveralAddressesOfTheServer) {
  const Connection flood = ConnectWatched();
  const Connection good = Connect();
  guard_.Watch(good.server.get(), {.peer = flood.ends.peer, .local = {"\x0a\x01\x02\x03", 1}}, now_);
  EXPECT_THAT(LookAfter(milliseconds(20), {flood.Unfinished(kMany)}), ElementsAre(flood.ends.peer));
  EXPECT_TRUE(flood.ended());
  EXPECT_FALSE(good.ended());
}

TEST_F(ConnectionGuardTest, WhoHasTheSameAddressAfterAFloodIsNotCutOffForIt) {
  const Connection flood = ConnectWatched();
  LookAfter(milliseconds(20), {flood.Reset(1)});
  Connection next = Connect();
  next.ends = flood.ends;
  guard_.Watch(next.server.get(), next.ends, now_);
  EXPECT_THAT(LookAfter(milliseconds(20), {flood.Unfinished(kMany), next.Unfinished(1)}),
              ElementsAre(flood.ends.peer));
  EXPECT_FALSE(next.ended());
}

TEST_F(ConnectionGuardTest, WhoeverFloodedTheServerWaitsLongerEachTimeAndOthersDoNot) {
  const std::string other_host = "\x0a\x01\x02\x03";
  std::string host;
  for (int i = 0; i < 20; ++i) {
    const Connection flood = ConnectWatched();
    host = flood.ends.peer.host;
    LookAfter(milliseconds(20), {flood.Unfinished(kMany)});
    if (i == 0) {
      EXPECT_EQ(guard_.ServeAt(host, now_), now_ + ConnectionGuard::kShortestWait);
    }
  }
  now_ += seconds(30);
  EXPECT_EQ(guard_.ServeAt(host, now_), now_ + ConnectionGuard::kLongestWait);
  EXPECT_EQ(guard_.ServeAt(host, now_), now_ + 2 * ConnectionGuard::kLongestWait) << "each takes a place";
  EXPECT_EQ(guard_.ServeAt(other_host, now_), now_);
}

TEST_F(ConnectionGuardTest, AFloodIsForgiven) {
  const Connection flood = ConnectWatched();
  LookAfter(milliseconds(20), {flood.Unfinished(kMany)});
  now_ += ConnectionGuard::kForgiven + seconds(1);
  EXPECT_EQ(guard_.ServeAt(flood.ends.peer.host, now_), now_);
}

TEST(TcpAddress, ACallerByIpv4HasOneAddressWhicheverSocketTookIt) {
  const std::string mapped("\0\0\0\0\0\0\0\0\0\0\xff\xff\x7f\0\0\1", 16);
  EXPECT_EQ(PlainHost(mapped), std::string("\x7f\0\0\1", 4));
  EXPECT_EQ(HostText(*PlainHost(mapped)), "127.0.0.1");
  const std::string loopback("\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\1", 16);
  EXPECT_EQ(HostText(*PlainHost(loopback)), "::1");
  EXPECT_EQ(PlainHost("no address"), std::nullopt);
}

}  // namespace
}  // namespace lossd::rpc::connection_guard_test
