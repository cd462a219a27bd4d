// What each fault does to the bytes of a connection, seen from both of its ends.
#include "tests/proxy/fault_proxy.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lossd::testing::fault_proxy_test {
namespace {

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// A socket, closed in the end.
class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() { close(fd_); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  void Send(const std::string& text) const {
    EXPECT_EQ(send(fd_, text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
  }
  std::string Receive(size_t size) const {
    std::string text(size, '\0');
    const ssize_t received = recv(fd_, text.data(), size, MSG_WAITALL);
    text.resize(received < 0 ? 0 : static_cast<size_t>(received));
    return text;
  }
  // What the end of the connection looks like: 0 for one in order, otherwise an error.
  int End() const {
    std::array<char, 64> rest;
    for (;;) {
      const ssize_t received = recv(fd_, rest.data(), rest.size(), 0);
      if (received <= 0) return received == 0 ? 0 : errno;
    }
  }
  int fd() const { return fd_; }

 private:
  const int fd_;
};

// A server's end and a client's with a proxy between them.
class FaultProxyTest : public ::testing::Test {
 protected:
  FaultProxyTest() : listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = Loopback(0);
    socklen_t size = sizeof address;
    EXPECT_EQ(bind(listener_.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(listen(listener_.fd(), 4), 0);
    EXPECT_EQ(getsockname(listener_.fd(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    backend_ = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  }

  void Connect(std::vector<Fault> plan, FaultProxy::Watch watch = {}) {
    proxy_ = std::make_unique<FaultProxy>(
        backend_, [plan = std::move(plan)](int /*connection*/) { return plan; }, std::move(watch));
    client_ = std::make_unique<Socket>(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_in address = Loopback(proxy_->port());
    ASSERT_EQ(connect(client_->fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    server_ = std::make_unique<Socket>(accept(listener_.fd(), nullptr, nullptr));
  }

  const Socket listener_;
  std::string backend_;
  std::unique_ptr<FaultProxy> proxy_;
  std::unique_ptr<Socket> client_;
  std::unique_ptr<Socket> server_;
};

TEST_F(FaultProxyTest, ACutIsAResetBehindSoManyBytesOfBothDirections) {
  Connect(CutAfter(5));
  server_->Send("ab");
  EXPECT_EQ(client_->Receive(2), "ab");
  client_->Send("cdefgh");
  EXPECT_EQ(server_->Receive(6), "cde");
  EXPECT_EQ(client_->End(), ECONNRESET);
  EXPECT_EQ(proxy_->faults(), 1);
}

TEST_F(FaultProxyTest, StallsAndDelaysLoseNothing) {
  Connect({{.kind = FaultKind::kStall, .after_bytes = 2, .time = std::chrono::milliseconds(30)},
           {.kind = FaultKind::kDelay, .after_bytes = 1, .time = std::chrono::milliseconds(30)}});
  client_->Send("abcdef");
  EXPECT_EQ(server_->Receive(6), "abcdef");
  EXPECT_EQ(proxy_->faults(), 2);
}

TEST_F(FaultProxyTest, AMirrorSendsBackWhatComesAndARepeatTwice) {
  Connect({{.kind = FaultKind::kRepeat, .after_bytes = 2}, {.kind = FaultKind::kMirror, .after_bytes = 2}});
  client_->Send("abcd");
  EXPECT_EQ(server_->Receive(6), "abcdcd");
  server_->Send("ef");
  EXPECT_EQ(server_->Receive(2), "ef");
}

TEST_F(FaultProxyTest, AHalfClosedConnectionStillCarriesTheOtherDirection) {
  Connect({{.kind = FaultKind::kHalfClose, .after_bytes = 2}});
  client_->Send("abcd");
  EXPECT_EQ(server_->Receive(4), "ab");
  server_->Send("ef");
  EXPECT_EQ(client_->Receive(2), "ef");
}

TEST_F(FaultProxyTest, AFaultThatWouldHitNobodyWaitsOrIsLeftOut) {
  std::atomic<bool> somebody = false;
  Connect({{.kind = FaultKind::kMirror, .if_nobody = IfNobody::kSkip}, {.kind = FaultKind::kCut}},
          {.would_hit = [&somebody] { return somebody.load(); }, .happens = nullptr});
  client_->Send("ab");
  EXPECT_EQ(server_->Receive(2), "ab");
  EXPECT_EQ(proxy_->faults(), 0);
  somebody = true;
  client_->Send("c");
  EXPECT_EQ(client_->End(), ECONNRESET);
  EXPECT_EQ(proxy_->faults(), 1);
}

}  // namespace
}  // namespace lossd::testing::fault_proxy_test
