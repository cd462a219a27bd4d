#include "proto/wire/token.h"

#include <gtest/gtest.h>

namespace lossd::wire::token_test {
namespace {

TEST(TokenTest, OnlyThisMachineIsLoopback) {
  for (const char* host : {"localhost", "LocalHost", "127.0.0.1", "127.8.9.10", "[::1]", "[0:0:0:0:0:0:0:1]",
                           "[::ffff:127.0.0.1]"}) {
    EXPECT_TRUE(IsLoopbackHost(host)) << host;
  }
  for (const char* host : {"", "0.0.0.0", "10.0.0.1", "128.0.0.1", "127.example.com", "localhost.example.com",
                           "[::]", "::1", "[::2]", "[::ffff:10.0.0.1]", "[", "[]", "127.0.0.1:1"}) {
    EXPECT_FALSE(IsLoopbackHost(host)) << host;
  }
}

}  // namespace
}  // namespace lossd::wire::token_test
