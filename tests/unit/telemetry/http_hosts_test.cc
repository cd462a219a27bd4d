#include "server/telemetry/http/http_hosts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <string>

namespace lossd::telemetry::http_hosts_test {
namespace {

using ::testing::HasSubstr;

HttpHosts Parsed(const std::string& listen_host, const std::string& more) {
  auto hosts = HttpHosts::Parse(listen_host, more);
  EXPECT_TRUE(hosts.ok()) << hosts.status();
  return *std::move(hosts);
}

TEST(HttpHosts, AddressesAndNamesThatAreNobodysInTheDnsNeedNoFlag) {
  const HttpHosts hosts = Parsed("0.0.0.0", "");
  for (const char* host :
       {"10.1.2.3", "10.1.2.3:9464", "[::1]", "[fd00::7]:9464", "localhost", "LOCALHOST:9464", "localhost.",
        "lossd", "lossd-0:9464", "trainer_7", "lossd.training.svc", "lossd.training.svc:9464",
        "lossd-0.lossd.training.svc.cluster.local", "10-1-2-3.training.pod.cluster.local.",
        "ip-10-1-2-3.ec2.internal", "a.localhost"}) {
    EXPECT_TRUE(hosts.Include(host)) << host;
  }
}

TEST(HttpHosts, NamesThatAnybodyCanHaveAreNotIncluded) {
  const HttpHosts hosts = Parsed("0.0.0.0", "");
  for (const char* host : {"", ":9464", ".", "evil.example", "localhost.evil.example",
                           "10.1.2.3.evil.example", "127.0.0.1.nip.io", "lossd.training", "evil.svc.example",
                           "svc.cluster.local.evil.example", "notsvc.evilsvc.com", "[evil]", "[::1",
                           "[127.0.0.1]", "a b", "localhost/evil.example", "::1", "user@evil.example"}) {
    EXPECT_FALSE(hosts.Include(host)) << host;
  }
  EXPECT_FALSE(hosts.Include(std::string("local\0.example", 14)));
  EXPECT_FALSE(hosts.Include(std::string(300, 'a')));
}

TEST(HttpHosts, TheMachinesNameAndThatOfTheAddressAreIncluded) {
  std::array<char, 256> name{};
  ASSERT_EQ(gethostname(name.data(), name.size() - 1), 0);
  EXPECT_TRUE(HttpHosts().Include(name.data()));
  EXPECT_TRUE(Parsed("GPU-7.example.com", "").Include("gpu-7.example.com:9464"));
  EXPECT_FALSE(Parsed("gpu-7.example.com", "").Include("gpu-8.example.com"));
}

TEST(HttpHosts, NamesOfTheFlagAreIncluded) {
  const HttpHosts hosts = Parsed("0.0.0.0", "a.example.com, *.Training.example.com");
  for (const char* host :
       {"a.example.com", "A.EXAMPLE.COM.:80", "x.training.example.com", "x.y.training.example.com"}) {
    EXPECT_TRUE(hosts.Include(host)) << host;
  }
  for (const char* host :
       {"b.example.com", "x.a.example.com", "training.example.com", "xtraining.example.com"}) {
    EXPECT_FALSE(hosts.Include(host)) << host;
  }
  EXPECT_TRUE(Parsed("0.0.0.0", "*").Include("evil.example"));
}

TEST(HttpHosts, WhatIsNoNameIsRefused) {
  for (const char* more : {"a.example.com:9464", "http://a.example.com", "*.*", "a b", "a,*.,b", "[::1]"}) {
    const auto hosts = HttpHosts::Parse("0.0.0.0", more);
    EXPECT_EQ(hosts.status().code(), absl::StatusCode::kInvalidArgument) << more;
    EXPECT_THAT(std::string(hosts.status().message()), HasSubstr("*.NAME")) << more;
  }
}

}  // namespace
}  // namespace lossd::telemetry::http_hosts_test
