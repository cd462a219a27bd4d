#include "server/rpc/transport/listener.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace lossd::rpc::listener_test {
namespace {

using Opened = absl::StatusOr<std::unique_ptr<Listener>>;

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

bool CanConnect(int port) {
  const FileDescriptor client(socket(AF_INET, SOCK_STREAM, 0));
  const sockaddr_in address = Loopback(port);
  return connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
}

int PortOf(const FileDescriptor& socket) {
  sockaddr_in6 address{};
  socklen_t size = sizeof(address);
  EXPECT_EQ(getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  return ntohs(address.sin6_port);
}

TEST(ListenerTest, AFreePortIsFoundAndConnectionsWaitAtIt) {
  const Opened opened = Listener::Open("127.0.0.1:0");
  ASSERT_TRUE(opened.ok()) << opened.status();
  ASSERT_EQ((*opened)->sockets().size(), 1U);
  EXPECT_GT((*opened)->port(), 0);
  EXPECT_TRUE(CanConnect((*opened)->port()));
}

TEST(ListenerTest, APortIsFreeAgainAfterwards) {
  int port = 0;
  {
    const Opened opened = Listener::Open("127.0.0.1:0");
    ASSERT_TRUE(opened.ok()) << opened.status();
    port = (*opened)->port();
    ASSERT_TRUE(CanConnect(port));
  }
  EXPECT_FALSE(CanConnect(port));
  EXPECT_TRUE(Listener::Open(absl::StrCat("127.0.0.1:", port)).ok());
}

// Whether a program that does not share ports could bind this one.
bool CanBind(int port) {
  const FileDescriptor other(socket(AF_INET, SOCK_STREAM, 0));
  const sockaddr_in address = Loopback(port);
  return bind(other.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
}

TEST(ListenerTest, APortThatIsHeldIsFreeForAListenerAlone) {
  const Opened held = Listener::Hold("127.0.0.1:0");
  ASSERT_TRUE(held.ok()) << held.status();
  const int port = (*held)->port();
  EXPECT_FALSE(CanConnect(port));
  EXPECT_FALSE(CanBind(port));
  for (int life = 0; life < 2; ++life) {
    const Opened opened = Listener::Open(absl::StrCat("127.0.0.1:", port));
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_TRUE(CanConnect(port));
  }
  EXPECT_FALSE(CanBind(port));
}

TEST(ListenerTest, NothingIsHeldOfAUnixSocket) {
  const Opened held = Listener::Hold("unix:/nowhere/at/all.sock");
  ASSERT_TRUE(held.ok()) << held.status();
  EXPECT_TRUE((*held)->sockets().empty());
}

TEST(ListenerTest, APortThatAnotherListensOnIsRefusedWithTheReason) {
  const Opened first = Listener::Open("127.0.0.1:0");
  ASSERT_TRUE(first.ok()) << first.status();
  for (const char* const host : {"127.0.0.1", "localhost", "0.0.0.0"}) {
    const Opened second = Listener::Open(absl::StrCat(host, ":", (*first)->port()));
    ASSERT_TRUE(absl::IsUnavailable(second.status())) << host << ": " << second.status();
    EXPECT_TRUE(absl::StrContains(second.status().message(), "Address already in use")) << second.status();
    EXPECT_TRUE(absl::StrContains(second.status().message(), "perhaps another lossd")) << second.status();
    EXPECT_TRUE(absl::StrContains(second.status().message(), absl::StrCat("(", host, ":0 takes a free one)")))
        << second.status();
  }
}

TEST(ListenerTest, APortThatAllHaveToKnowIsNotAdvisedToBeAFreeOne) {
  const Opened first = Listener::Open("127.0.0.1:0");
  ASSERT_TRUE(first.ok()) << first.status();
  const absl::Status taken =
      Listener::Open(absl::StrCat("127.0.0.1:", (*first)->port()), Listener::Port::kOfAll).status();
  EXPECT_TRUE(absl::StrContains(taken.message(), "the same to all that connect")) << taken;
  EXPECT_FALSE(absl::StrContains(taken.message(), ":0 takes")) << taken;
}

TEST(ListenerTest, AllAddressesOfAHostHaveOnePort) {
  const Opened opened = Listener::Open("localhost:0");
  ASSERT_TRUE(opened.ok()) << opened.status();
  for (const FileDescriptor& socket : (*opened)->sockets()) EXPECT_EQ(PortOf(socket), (*opened)->port());
  EXPECT_TRUE(CanConnect((*opened)->port()));
}

TEST(ListenerTest, EveryAddressIsAnIPv4OneToo) {
  for (const char* const every : {"0.0.0.0:0", "[::]:0"}) {
    const Opened opened = Listener::Open(every);
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_TRUE(CanConnect((*opened)->port())) << every;
  }
}

TEST(ListenerTest, WhatIsNoAddressOfThisMachineIsRefusedWithTheReason) {
  const Opened opened = Listener::Open("192.0.2.1:0");
  ASSERT_TRUE(absl::IsUnavailable(opened.status())) << opened.status();
  EXPECT_TRUE(absl::StrContains(opened.status().message(), "192.0.2.1:0")) << opened.status();
  EXPECT_TRUE(absl::StrContains(opened.status().message(), "Cannot assign requested address"))
      << opened.status();
}

class SocketFileTest : public ::testing::Test {
 protected:
  SocketFileTest() {
    std::string folder = (std::filesystem::temp_directory_path() / "lossd-listener-XXXXXX").string();
    if (mkdtemp(folder.data()) == nullptr) std::abort();
    folder_ = folder;
  }
  ~SocketFileTest() override { std::filesystem::remove_all(folder_); }

  std::string path() const { return folder_ + "/socket"; }
  std::string address() const { return "unix:" + path(); }

 private:
  std::string folder_;
};

TEST_F(SocketFileTest, ItIsForItsOwnerAndGroupAloneAndGoesInTheEnd) {
  for (const mode_t mask : {mode_t{0}, mode_t{0077}}) {
    const mode_t before = umask(mask);
    const Opened opened = Listener::Open(address());
    umask(before);
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_EQ((*opened)->port(), 0);
    struct stat status {};
    ASSERT_EQ(stat(path().c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777U, 0660U);
  }
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(SocketFileTest, OneThatAServerLeftIsReplacedAndOneThatAnswersIsNot) {
  {
    const FileDescriptor left(socket(AF_UNIX, SOCK_STREAM, 0));
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    ASSERT_LT(path().size(), sizeof(name.sun_path));
    std::memcpy(name.sun_path, path().data(), path().size());
    ASSERT_EQ(bind(left.get(), reinterpret_cast<const sockaddr*>(&name), sizeof(name)), 0);
  }
  const Opened opened = Listener::Open(address());
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_TRUE(absl::IsAlreadyExists(Listener::Open(address()).status()));
  EXPECT_TRUE(std::filesystem::exists(path()));
}

TEST_F(SocketFileTest, AFileThatIsNoSocketStays) {
  std::ofstream(path()) << "mine";
  EXPECT_TRUE(absl::IsAlreadyExists(Listener::Open(address()).status()));
  EXPECT_EQ(std::filesystem::file_size(path()), 4U);
}

TEST_F(SocketFileTest, WithoutItsFolderItIsRefusedWithTheReason) {
  const Opened opened = Listener::Open(address() + "/none");
  ASSERT_TRUE(absl::IsUnavailable(opened.status())) << opened.status();
  EXPECT_TRUE(absl::StrContains(opened.status().message(), "No such file or directory")) << opened.status();
}

}  // namespace
}  // namespace lossd::rpc::listener_test
