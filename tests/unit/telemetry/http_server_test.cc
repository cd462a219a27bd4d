#include "server/telemetry/http/http_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "absl/strings/str_cat.h"
#include "server/rpc/transport/listener.h"
#include "tests/support/wait.h"

namespace lossd::telemetry::http_server_test {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class Connection {
 public:
  explicit Connection(int port) : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  ~Connection() { close(socket_); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void Send(const std::string& text) const {
    size_t sent = 0;
    while (sent < text.size()) {
      const ssize_t now = send(socket_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
      if (now <= 0) return;  // hung up on
      sent += static_cast<size_t>(now);
    }
  }
  // Until the server hangs up.
  std::string ReadAll() const {
    std::string text;
    std::array<char, 4096> buffer{};
    for (;;) {
      const ssize_t got = recv(socket_, buffer.data(), buffer.size(), 0);
      if (got <= 0) return text;
      text.append(buffer.data(), static_cast<size_t>(got));
    }
  }
  bool HungUpOn() const {
    pollfd look{socket_, POLLIN, 0};
    return poll(&look, 1, 0) > 0;
  }

 private:
  const int socket_;
};

class HttpServerTest : public ::testing::Test {
 protected:
  HttpServerTest() {
    HttpServer::Pages pages;
    pages["/page"] = [this] {
      ++made_;
      return HttpPage{"text/plain", "content", {{"X-More", "said"}}};
    };
    pages["/large"] = [] { return HttpPage{"text/plain", std::string(16 << 20, 'x')}; };
    pages["/broken"] = []() -> HttpPage { throw std::runtime_error("cannot be made"); };
    pages["/odd"] = []() -> HttpPage { throw 1; };
    auto listener = rpc::Listener::Open("127.0.0.1:0");
    EXPECT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
    auto hosts = HttpHosts::Parse("127.0.0.1", "metrics.example.com");
    EXPECT_TRUE(hosts.ok()) << hosts.status();
    auto started =
        HttpServer::Start({listener_->sockets().front().get()}, *std::move(hosts), std::move(pages));
    EXPECT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
  }

  int port() const { return listener_->port(); }

  std::string Ask(const std::string& request) const {
    const Connection connection(port());
    connection.Send(request);
    return connection.ReadAll();
  }

  std::atomic<int> made_ = 0;
  std::unique_ptr<rpc::Listener> listener_;
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, AnswersAPageAndHangsUp) {
  const std::string answer = Ask("GET /page HTTP/1.1\r\nHost: here\r\n\r\n");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answer, HasSubstr("\r\nContent-Type: text/plain\r\n"));
  EXPECT_THAT(answer, HasSubstr("\r\nContent-Length: 7\r\n"));
  EXPECT_THAT(answer, HasSubstr("\r\nX-Content-Type-Options: nosniff\r\n"));
  EXPECT_THAT(answer, HasSubstr("\r\nX-More: said\r\n"));
  EXPECT_THAT(answer, EndsWith("\r\n\r\ncontent"));
}

TEST_F(HttpServerTest, ArgumentsOfAPageAreIgnored) {
  EXPECT_THAT(Ask("GET /page?a=b HTTP/1.0\r\n\r\n"), StartsWith("HTTP/1.1 200 "));
}

TEST_F(HttpServerTest, HeadGetsNoBody) {
  const std::string answer = Ask("HEAD /page HTTP/1.1\r\nHost: here\r\n\r\n");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answer, HasSubstr("Content-Length: 7\r\n"));
  EXPECT_THAT(answer, EndsWith("\r\n\r\n"));
}

TEST_F(HttpServerTest, OtherPathsAreNotFoundWhateverTheyLookLike) {
  for (const char* path :
       {"/", "/pag", "/page/", "/page/x", "/../page/..", "/%2e%2e/etc/passwd", "//etc/passwd"}) {
    const std::string answer = Ask(absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: here\r\n\r\n"));
    EXPECT_THAT(answer, ::testing::AnyOf(StartsWith("HTTP/1.1 404 "), StartsWith("HTTP/1.1 400 "))) << path;
    EXPECT_THAT(answer, Not(HasSubstr("root:"))) << path;
  }
  EXPECT_THAT(Ask("GET /nothing HTTP/1.1\r\nHost: here\r\n\r\n"), HasSubstr("/page\n"));
  EXPECT_EQ(made_, 0);
}

TEST_F(HttpServerTest, APageThatThrowsIsAnsweredAndTheServerLives) {
  for (const char* path : {"/broken", "/odd"}) {
    EXPECT_THAT(Ask(absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: here\r\n\r\n")),
                StartsWith("HTTP/1.1 500 "))
        << path;
  }
  EXPECT_THAT(Ask("GET /page HTTP/1.1\r\nHost: here\r\n\r\n"), StartsWith("HTTP/1.1 200 "));
}

TEST_F(HttpServerTest, OnlyGetAndHeadAreAnswered) {
  for (const char* method : {"POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE"}) {
    const std::string answer =
        Ask(absl::StrCat(method, " /page HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n\r\n"));
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 4")) << method;
    EXPECT_THAT(answer, Not(HasSubstr("content\n"))) << method;
  }
  EXPECT_THAT(Ask("POST /page HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n\r\n"),
              HasSubstr("Allow: GET, HEAD\r\n"));
  EXPECT_EQ(made_, 0);
}

TEST_F(HttpServerTest, ARequestThatIsTooLongIsRefused) {
  const std::string longer(HttpServer::kMostRequestBytes + 1, 'a');
  for (const std::string& request :
       {absl::StrCat("GET /page HTTP/1.1\r\nHost: here\r\nX: ", longer, "\r\n\r\n"),
        absl::StrCat("GET /", longer, " HTTP/1.1\r\nHost: here\r\n\r\n"), longer}) {
    EXPECT_THAT(Ask(request), Not(HasSubstr(" 200 OK")));
  }
  EXPECT_EQ(made_, 0);
  EXPECT_THAT(Ask("GET /page HTTP/1.1\r\nHost: here\r\n\r\n"), StartsWith("HTTP/1.1 200 "));
}

TEST_F(HttpServerTest, NonsenseIsRefused) {
  for (const std::string& request :
       {std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", 13), std::string("GET\r\n\r\n"),
        std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")}) {
    EXPECT_THAT(Ask(request), Not(HasSubstr(" 200 OK")));
  }
  EXPECT_EQ(made_, 0);
}

// Neither those that do not finish asking nor those that do not read what they asked for.
TEST_F(HttpServerTest, SlowClientsDoNotHoldUpOthers) {
  // On a machine that stalls they may be hung up on beside a page that did not wait: then once more.
  for (int attempt = 0; attempt < 5; ++attempt) {
    std::vector<std::unique_ptr<Connection>> slow;
    for (int i = 0; i < HttpServer::kMostConnections - 1; ++i) {
      slow.push_back(std::make_unique<Connection>(port()));
      slow.back()->Send(i != HttpServer::kMostConnections / 2 ? "GET /pa"
                                                              : "GET /large HTTP/1.1\r\nHost: here\r\n\r\n");
    }
    EXPECT_THAT(Ask("GET /page HTTP/1.1\r\nHost: here\r\n\r\n"), StartsWith("HTTP/1.1 200 "));
    if (!slow.front()->HungUpOn()) return;
  }
  FAIL() << "the page always came after slow clients had been hung up on";
}

// More than there is room for: the oldest of them make room, and the page does not wait for any.
TEST_F(HttpServerTest, ACrowdOfSlowClientsDoesNotHoldUpOthers) {
  for (int attempt = 0; attempt < 5; ++attempt) {
    std::vector<std::unique_ptr<Connection>> slow;
    for (int i = 0; i < 4 * HttpServer::kMostConnections; ++i) {
      slow.push_back(std::make_unique<Connection>(port()));
      slow.back()->Send("GET /pa");
    }
    EXPECT_THAT(Ask("GET /page HTTP/1.1\r\nHost: here\r\n\r\n"), StartsWith("HTTP/1.1 200 "));
    const bool oldest_made_room = slow.front()->HungUpOn();
    if (oldest_made_room && !slow.back()->HungUpOn()) return;
  }
  FAIL() << "the page always came after slow clients had been hung up on";
}

// However often it says something.
TEST_F(HttpServerTest, AClientThatDribblesIsHungUpOn) {
  const Connection slow(port());
  slow.Send("GET /page HTTP/1.1\r\nHost: here\r\nX: ");
  testing::Await("the server to hang up", [&] {
    slow.Send("a");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return slow.HungUpOn();
  });
  EXPECT_THAT(slow.ReadAll(), Not(HasSubstr("200")));
  EXPECT_EQ(made_, 0);
}

TEST_F(HttpServerTest, ARequestInPiecesIsAnswered) {
  const Connection connection(port());
  for (const char* piece : {"GET /pa", "ge HTTP/1.1\r", "\nHost: here\r\n", "\r", "\n"}) {
    connection.Send(piece);
    std::this_thread::yield();
  }
  EXPECT_THAT(connection.ReadAll(), EndsWith("content"));
}

TEST_F(HttpServerTest, AnAnswerReachesAClientThatSentMoreThanItsRequest) {
  const Connection connection(port());
  connection.Send(absl::StrCat("POST /page HTTP/1.1\r\nHost: here\r\nContent-Length: 1000000\r\n\r\n",
                               std::string(1'000'000, 'x')));
  EXPECT_THAT(connection.ReadAll(), EndsWith("only GET and HEAD are answered\n"));
}

TEST_F(HttpServerTest, AnsweredByItsNamesOnly) {
  for (const char* host : {"here", "127.0.0.1:9464", "[::1]:9464", "metrics.example.com", "localhost"}) {
    EXPECT_THAT(Ask(absl::StrCat("GET /page HTTP/1.1\r\nHost: ", host, "\r\n\r\n")),
                StartsWith("HTTP/1.1 200 "))
        << host;
  }
  const int made = made_;
  for (const std::string& request :
       {std::string("GET /page HTTP/1.1\r\nHost: rebound.example.org:9464\r\n\r\n"),
        std::string("GET /page HTTP/1.0\r\nHost: rebound.example.org\r\n\r\n"),
        std::string("GET http://rebound.example.org/page HTTP/1.1\r\nHost: here\r\n\r\n")}) {
    const std::string answer = Ask(request);
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 421 Misdirected Request\r\n"));
    EXPECT_THAT(answer, HasSubstr("--metrics_hosts"));
  }
  EXPECT_EQ(made_, made);
  EXPECT_THAT(Ask("GET /page HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 400 "));
  EXPECT_THAT(Ask("GET /page HTTP/1.0\r\n\r\n"), StartsWith("HTTP/1.1 200 "));
}

TEST_F(HttpServerTest, SlowClientsAreHungUpOn) {
  const Connection slow(port());
  slow.Send("GET /page HT");
  EXPECT_THAT(slow.ReadAll(), Not(HasSubstr("200")));
  EXPECT_EQ(made_, 0);
}

}  // namespace
}  // namespace lossd::telemetry::http_server_test
