#include "server/rpc/connection_guard.h"

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

#include "server/rpc/file_descriptor.h"

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
  PeerAddress peer;  // the client's address

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
    made.peer = PeerOf(made.server.get()).value_or(PeerAddress{});
    return made;
  }
  Connection ConnectWatched() {
    Connection made = Connect();
    guard_.Watch(made.server.get(), made.peer, now_);
    return made;
  }
  std::vector<PeerAddress> LookAfter(ConnectionGuard::Clock::duration time,
                                     std::vector<ConnectionCalls> calls) {
    now_ += time;
    counts_.connections = std::move(calls);
    return guard_.Look(now_);
  }

  const sockaddr* generic() const { return reinterpret_cast<const sockaddr*>(&address_); }

  FileDescriptor listener_;
  sockaddr_in address_{};
  FakeCounts counts_;
  ConnectionGuard guard_{&counts_};
  ConnectionGuard::Time now_ = ConnectionGuard::Clock::now();
};

constexpr int64_t kFew = ConnectionGuard::kMostUnfinished;
constexpr int64_t kMany = ConnectionGuard::kMostUnfinished + 1;

TEST_F(ConnectionGuardTest, EndsTheConnectionWithTooManyUnfinishedCallsAndNoOther) {
  const Connection good = ConnectWatched();
  const Connection flood = ConnectWatched();
  EXPECT_THAT(LookAfter(milliseconds(20),
                        {{.peer = good.peer, .unfinished = kFew}, {.peer = flood.peer, .unfinished = kMany}}),
              ElementsAre(flood.peer));
  EXPECT_TRUE(flood.ended());
  EXPECT_FALSE(good.ended());
}

TEST_F(ConnectionGuardTest, WhatWasNotReadGoesWithTheConnection) {
  const Connection flood = ConnectWatched();
  ASSERT_EQ(send(flood.client.get(), "more calls", 10, 0), 10);
  LookAfter(milliseconds(20), {{.peer = flood.peer, .unfinished = kMany}});
  char byte = 0;
  EXPECT_LE(recv(flood.server.get(), &byte, 1, MSG_DONTWAIT), 0);
}

TEST_F(ConnectionGuardTest, EndsAConnectionWhoseCallsAreResetFasterThanAllowed) {
  const Connection flood = ConnectWatched();
  EXPECT_THAT(LookAfter(milliseconds(20), {{.peer = flood.peer, .reset = 2'000}}), IsEmpty());
  EXPECT_THAT(LookAfter(milliseconds(20), {{.peer = flood.peer, .reset = 2'100}}), ElementsAre(flood.peer));
  EXPECT_TRUE(flood.ended());
}

TEST_F(ConnectionGuardTest, LeavesAConnectionThatHasResetManyCallsInALongTime) {
  const Connection slow = ConnectWatched();
  EXPECT_THAT(LookAfter(hours(24), {{.peer = slow.peer, .reset = 1'000'000}}), IsEmpty());
  EXPECT_THAT(LookAfter(seconds(1), {{.peer = slow.peer, .reset = 1'000'200}}), IsEmpty());
  EXPECT_FALSE(slow.ended());
}

TEST_F(ConnectionGuardTest, ASocketsNumberThatIsSomebodyElsesByNowIsLeftAlone) {
  const Connection gone = ConnectWatched();
  const Connection other = Connect();  // which the guard has not been told of
  const PeerAddress peer = gone.peer;
  ASSERT_EQ(dup2(other.server.get(), gone.server.get()), gone.server.get());
  EXPECT_THAT(LookAfter(milliseconds(20), {{.peer = peer, .unfinished = kMany}}), IsEmpty());
  EXPECT_FALSE(other.ended());
}

TEST_F(ConnectionGuardTest, WhoeverFloodedTheServerWaitsLongerEachTimeAndOthersDoNot) {
  const std::string other_host = "\x0a\x01\x02\x03";
  std::string host;
  for (int i = 0; i < 20; ++i) {
    const Connection flood = ConnectWatched();
    host = flood.peer.host;
    LookAfter(milliseconds(20), {{.peer = flood.peer, .unfinished = kMany}});
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
  LookAfter(milliseconds(20), {{.peer = flood.peer, .unfinished = kMany}});
  now_ += ConnectionGuard::kForgiven + seconds(1);
  EXPECT_EQ(guard_.ServeAt(flood.peer.host, now_), now_);
}

TEST(PeerAddress, ACallerByIpv4HasOneAddressWhicheverSocketTookIt) {
  const std::string mapped("\0\0\0\0\0\0\0\0\0\0\xff\xff\x7f\0\0\1", 16);
  EXPECT_EQ(PlainHost(mapped), std::string("\x7f\0\0\1", 4));
  EXPECT_EQ(HostText(*PlainHost(mapped)), "127.0.0.1");
  const std::string loopback("\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\1", 16);
  EXPECT_EQ(HostText(*PlainHost(loopback)), "::1");
  EXPECT_EQ(PlainHost("no address"), std::nullopt);
}

}  // namespace
}  // namespace lossd::rpc::connection_guard_test
