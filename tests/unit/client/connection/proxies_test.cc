// Proxies of the environment: which connections go by one, and what an error says of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "client/src/connection/channel_arguments.h"
#include "lossd/client.h"
#include "tests/unit/client/fake_server.h"

namespace lossd::internal::proxies_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

using Variables = std::vector<std::pair<const char*, const char*>>;

constexpr char kProxy[] = "http://user:secret@127.0.0.1:1";  // where nothing listens

class ProxiesTest : public ::testing::Test {
 protected:
  ~ProxiesTest() override { Set({}); }

  static void Set(const Variables& variables) {
    for (const char* name : {"grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"}) {
      unsetenv(name);
    }
    for (const auto& [name, value] : variables) setenv(name, value, 1);
  }
};

TEST_F(ProxiesTest, LoopbackNeverGoesByOne) {
  testing::FakeServer server;
  const std::string port = server.target().substr(server.target().rfind(':'));
  for (const char* variable : {"grpc_proxy", "https_proxy", "http_proxy"}) {
    Set({{variable, kProxy}});
    for (const char* host : {"127.0.0.1", "localhost", "LOCALHOST", "dns:///localhost", "dns:127.0.0.1",
                             "ipv4:127.0.0.1", "ipv4:127.0.0.2:1,127.0.0.1"}) {
      const auto client = Client::Connect(host + port, {.reconnect_timeout = std::chrono::seconds(2)});
      EXPECT_TRUE(client.ok()) << variable << " " << host << ": " << client.status();
    }
  }
}

struct Case {
  Variables variables;
  const char* target;
  const char* variable;  // in force
  bool is_used = true;
};

TEST_F(ProxiesTest, TheVariableInForceIsNamedWithoutItsValue) {
  const Case cases[] = {
      {{}, "h.invalid:1", ""},
      {{{"http_proxy", kProxy}}, "h.invalid:1", "http_proxy"},
      {{{"http_proxy", kProxy}, {"https_proxy", kProxy}}, "h.invalid:1", "https_proxy"},
      {{{"http_proxy", kProxy}, {"grpc_proxy", kProxy}}, "dns:///h.invalid:1", "grpc_proxy"},
      {{{"http_proxy", kProxy}, {"grpc_proxy", ""}}, "h.invalid:1", ""},
      {{{"http_proxy", kProxy}, {"no_proxy", "a.test, .INVALID"}}, "h.invalid:1", ""},
      {{{"http_proxy", kProxy}, {"no_proxy", "a.test,,"}}, "h.invalid:1", "http_proxy"},
      {{{"http_proxy", kProxy}, {"no_proxy", "h.invalid"}, {"no_grpc_proxy", ""}},
       "h.invalid:1",
       "http_proxy"},
      {{{"http_proxy", kProxy}, {"no_grpc_proxy", "h.invalid"}}, "h.invalid:1", ""},
      {{{"http_proxy", kProxy}}, "ipv4:127.0.0.1:1,192.0.2.1:1", "http_proxy"},
      {{{"http_proxy", kProxy}}, "ipv6:%5B::1%5D:1", ""},
      {{{"http_proxy", kProxy}}, "[::1]:1", ""},
      {{{"http_proxy", kProxy}}, "[::ffff:127.0.0.1]:1", ""},
      {{{"http_proxy", kProxy}}, "unix:/nobody", ""},
      {{{"http_proxy", kProxy}}, "unix-abstract:nobody", ""},
      {{{"http_proxy", "user:secret@127.0.0.1:1"}}, "h.invalid:1", "http_proxy", false},
      {{{"https_proxy", "https://user:secret@127.0.0.1:1"}}, "h.invalid:1", "https_proxy", false},
      {{{"http_proxy", "http://user:secret@h.invalid:1"}}, "h.invalid:1", "http_proxy"},
  };
  for (const Case& given : cases) {
    std::string set;
    for (const auto& [name, value] : given.variables) set += std::string(name) + "=" + value + " ";
    SCOPED_TRACE(set + given.target);
    Set(given.variables);
    const Proxy proxy = ProxyTo(given.target, {});
    EXPECT_EQ(proxy.variable, given.variable);
    EXPECT_EQ(proxy.is_used, given.is_used && !proxy.variable.empty());
    const absl::Status failed =
        Client::Connect(given.target, {.reconnect_timeout = std::chrono::milliseconds(1)}).status();
    EXPECT_EQ(failed.code(), absl::StatusCode::kUnavailable);
    const std::string said(failed.message());
    EXPECT_THAT(said, Not(HasSubstr("secret")));
    if (proxy.variable.empty()) {
      EXPECT_THAT(said, Not(HasSubstr("_proxy")));
    } else {
      EXPECT_THAT(said, HasSubstr(proxy.variable + " names"));
      EXPECT_THAT(said, HasSubstr(proxy.is_used ? "add the host to no_proxy" : "http://HOST:PORT"));
    }
  }
}

TEST_F(ProxiesTest, ExceptionsHaveIpv6AddressesWithoutBrackets) {
  Set({{"http_proxy", kProxy}, {"no_proxy", "2001:db8::1"}});
  EXPECT_EQ(ProxyTo("[2001:db8::1]:50051", {}).variable, "");
  EXPECT_EQ(ProxyTo("[2001:db8::2]:50051", {}).variable, "http_proxy");
}

TEST_F(ProxiesTest, ATokenInPlainTextGoesByNone) {
  Set({{"http_proxy", kProxy}});
  ClientOptions options{.token_file = "token"};
  EXPECT_EQ(ProxyTo("h.invalid:1", options).variable, "");
  options.tls.emplace();
  EXPECT_EQ(ProxyTo("h.invalid:1", options).variable, "http_proxy");
}

TEST_F(ProxiesTest, OnlyThisMachineIsLoopback) {
  for (const char* target : {"127.0.0.1:50051", "127.8.9.10:1", "localhost:50051", "localhost", "[::1]:50051",
                             "dns:///localhost:1", "ipv4:127.0.0.1:1", "ipv4:127.0.0.1:1,127.0.0.1:2",
                             "ipv6:[::1]:1", "unix:/run/lossd", "unix:x"}) {
    EXPECT_TRUE(IsLoopback(target)) << target;
  }
  for (const char* target : {"", "0.0.0.0:1", "10.0.0.1:1", "127.example.com:1", "localhost.example.com:1",
                             "dns:///lossd:1", "[::]:1", "ipv4:127.0.0.1:1,10.0.0.1:1",
                             "dns://8.8.8.8/localhost:1", "xds:///localhost", "unix-host:1"}) {
    EXPECT_FALSE(IsLoopback(target)) << target;
  }
}

}  // namespace
}  // namespace lossd::internal::proxies_test
