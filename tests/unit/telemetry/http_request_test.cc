#include "server/telemetry/http/http_request.h"

#include <gtest/gtest.h>

#include <string>

namespace lossd::telemetry::http_request_test {
namespace {

TEST(HttpRequest, HasMethodPathAndHost) {
  const auto request = ParseRequest("GET /metrics?a=b HTTP/1.1\r\nX: y\r\nhOsT:  a.example:80 \r\n\r\n");
  ASSERT_TRUE(request.has_value());
  EXPECT_EQ(request->method, "GET");
  EXPECT_EQ(request->path, "/metrics");
  EXPECT_EQ(request->host, "a.example:80");
}

TEST(HttpRequest, AnOldClientNeedsNoHost) {
  const auto request = ParseRequest("GET / HTTP/1.0\r\n\r\n");
  ASSERT_TRUE(request.has_value());
  EXPECT_FALSE(request->host.has_value());
  EXPECT_FALSE(ParseRequest("GET / HTTP/1.1\r\n\r\n").has_value());
}

TEST(HttpRequest, AWholeUrlNamesTheHost) {
  const auto request = ParseRequest("GET HTTP://a.example/page?x HTTP/1.1\r\nHost: here\r\n\r\n");
  ASSERT_TRUE(request.has_value());
  EXPECT_EQ(request->host, "a.example");
  EXPECT_EQ(request->path, "/page");
  EXPECT_EQ(ParseRequest("GET http://a.example HTTP/1.1\r\nHost: here\r\n\r\n")->path, "/");
}

TEST(HttpRequest, NonsenseIsNone) {
  for (const char* head :
       {"", "\r\n\r\n", "GET\r\n\r\n", "GET /\r\n\r\n", "GET / HTTP/1.1 \r\nHost: a\r\n\r\n",
        "GET  / HTTP/1.1\r\nHost: a\r\n\r\n", "GET / HTTP/2.0\r\nHost: a\r\n\r\n",
        "G T / HTTP/1.1\r\nHost: a\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost : a\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n",
        "GET / HTTP/1.1\r\nno colon\r\nHost: a\r\n\r\n", "GET /\x01 HTTP/1.1\r\nHost: a\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\n"}) {
    EXPECT_FALSE(ParseRequest(head).has_value()) << head;
  }
}

TEST(HttpRequest, EveryBeginningAndEveryChangedByteIsReadWithoutHarm) {
  const std::string head = "GET http://a/b?c HTTP/1.1\r\nHost: a:1\r\nX-Y: z\r\n\r\n";
  for (size_t size = 0; size <= head.size(); ++size) {
    const std::string part = head.substr(0, size);
    EXPECT_EQ(EndOfHead(part), size < head.size() ? std::string::npos : head.size());
    ParseRequest(part);
    for (int byte = 0; byte < 256 && size < head.size(); ++byte) {
      std::string changed = head;
      changed[size] = static_cast<char>(byte);
      ParseRequest(changed);
    }
  }
}

}  // namespace
}  // namespace lossd::telemetry::http_request_test
