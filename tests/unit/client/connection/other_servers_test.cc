// A client that has never reached lossd, and meets another server or a proxy that answers in HTTP.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "lossd/client.h"

namespace lossd::other_servers_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr size_t kFrameHeader = 9;
constexpr size_t kPreface = 24;

// Sends the same answer over each connection, one connection after the other.
class OtherServer {
 public:
  // With `http2` the answer is that status to every call; otherwise these bytes to the first ones.
  OtherServer(std::string answer, bool http2) : answer_(std::move(answer)), http2_(http2) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(listening_, any, size), 0);
    EXPECT_EQ(listen(listening_, 16), 0);
    EXPECT_EQ(getsockname(listening_, any, &size), 0);
    target_ = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
    thread_ = std::thread([this] { Serve(); });
  }
  ~OtherServer() {
    shutdown(listening_, SHUT_RDWR);
    thread_.join();
    close(listening_);
  }

  const std::string& target() const { return target_; }

 private:
  void Serve() {
    for (int peer = 0; (peer = accept(listening_, nullptr, nullptr)) >= 0; close(peer)) {
      if (http2_) {
        AnswerCalls(peer);
        continue;
      }
      char first = 0;
      if (recv(peer, &first, 1, 0) == 1) Send(peer, answer_);
      shutdown(peer, SHUT_WR);
      while (recv(peer, &first, 1, 0) == 1) {
      }
    }
  }

  void AnswerCalls(int peer) const {
    const std::string settings(kFrameHeader, '\0');
    Send(peer, settings.substr(0, 3) + "\x04" + settings.substr(4));
    Receive(peer, kPreface);
    for (std::string header; !(header = Receive(peer, kFrameHeader)).empty();) {
      const auto* const bytes = reinterpret_cast<const unsigned char*>(header.data());
      Receive(peer, static_cast<size_t>(bytes[0]) << 16 | static_cast<size_t>(bytes[1]) << 8 | bytes[2]);
      const bool is_headers = header[3] == 1;
      // HEADERS with END_STREAM and END_HEADERS: ":status" is entry 8 of HPACK's table.
      if (is_headers) {
        Send(peer, std::string("\0\0\x05\x01\x05", 5) + header.substr(5) + "\x08\x03" + answer_);
      }
    }
  }

  static void Send(int peer, const std::string& bytes) {
    send(peer, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }

  // Nothing where the connection ends.
  static std::string Receive(int peer, size_t size) {
    std::string bytes(size, '\0');
    return recv(peer, bytes.data(), size, MSG_WAITALL) == static_cast<ssize_t>(size) ? bytes : "";
  }

  const std::string answer_;
  const bool http2_;
  const int listening_ = socket(AF_INET, SOCK_STREAM, 0);
  std::string target_;
  std::thread thread_;
};

enum class By { kHttp1, kHttp2, kProxy };
struct Case {
  By by;
  const char* answer;
  bool is_final;
  const char* words;
};

constexpr Case kCases[] = {
    {By::kHttp1, "HTTP/1.1 400 Bad Request\r\n\r\n", true, "is not lossd"},
    {By::kHttp1, "HTTP/1.1 403 Forbidden\r\n\r\n", true, "answers in HTTP/1"},
    {By::kHttp1, "HTTP/1.0 505 HTTP Version Not Supported\r\n\r\n", true, "--listen"},
    {By::kHttp1, "HTTP/1.1 503 Service Unavailable\r\n\r\n", false, "answers in HTTP/1"},
    {By::kHttp1, "SSH-2.0-OpenSSH_9.2\r\n", true, "does not answer in gRPC"},
    {By::kHttp2, "301", true, "HTTP 301"},
    {By::kHttp2, "401", true, "HTTP 401"},
    {By::kHttp2, "403", true, "HTTP 403"},
    {By::kHttp2, "404", true, "HTTP 404"},
    {By::kHttp2, "408", false, "HTTP 408"},
    {By::kHttp2, "429", false, "HTTP 429"},
    {By::kHttp2, "500", false, "HTTP 500"},
    {By::kHttp2, "502", false, "HTTP 502"},
    {By::kHttp2, "503", false, "HTTP 503"},
    {By::kHttp2, "504", false, "HTTP 504"},
    {By::kProxy, "HTTP/1.1 403 Forbidden\r\n\r\n", true, "http_proxy names"},
    {By::kProxy, "HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", true, "response code 407"},
    {By::kProxy, "HTTP/1.1 502 Bad Gateway\r\n\r\n", false, "http_proxy names"},
    {By::kProxy, "HTTP/1.1 503 Service Unavailable\r\n\r\n", false, "response code 503"},
};

// A failure that waiting cannot mend must not wait for the end of the reconnect timeout, which would end the
// message with "gave up".
TEST(OtherServersTest, WaitingIsForStatusesThatMayPass) {
  for (const Case& given : kCases) {
    SCOPED_TRACE(given.answer);
    const OtherServer server(given.answer, given.by == By::kHttp2);
    if (given.by == By::kProxy) setenv("http_proxy", ("http://" + server.target()).c_str(), 1);
    const std::chrono::milliseconds patience(given.is_final ? 600'000 : 200);
    const absl::Status failed = Client::Connect(given.by == By::kProxy ? "h.invalid:1" : server.target(),
                                                {.reconnect_timeout = patience})
                                    .status();
    unsetenv("http_proxy");
    EXPECT_EQ(failed.code(), absl::StatusCode::kUnavailable) << failed;
    const std::string said(failed.message());
    EXPECT_THAT(said, HasSubstr(given.words));
    if (given.is_final) {
      EXPECT_THAT(said, Not(HasSubstr("gave up")));
    } else {
      EXPECT_THAT(said, HasSubstr("gave up"));
    }
  }
}

}  // namespace
}  // namespace lossd::other_servers_test
