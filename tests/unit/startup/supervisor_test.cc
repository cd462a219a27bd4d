#include "server/startup/group/supervisor.h"

#include <gtest/gtest.h>

namespace lossd::supervisor_test {
namespace {

TEST(WithPort, PutsThePortInThePlaceOfTheFirstFreeOne) {
  EXPECT_EQ(WithPort("127.0.0.1:0", 4321), "127.0.0.1:4321");
  EXPECT_EQ(WithPort("unix:/run/a.sock,[::1]:0,localhost:0", 4321),
            "unix:/run/a.sock,[::1]:4321,localhost:0");
}

TEST(WithPort, LeavesEverythingElse) {
  EXPECT_EQ(WithPort("127.0.0.1:50051", 50051), "127.0.0.1:50051");
  EXPECT_EQ(WithPort("127.0.0.1:50051,localhost:0", 50051), "127.0.0.1:50051,localhost:0");
  EXPECT_EQ(WithPort("unix:/run/a:0", 0), "unix:/run/a:0");
  EXPECT_EQ(WithPort("", 0), "");
}

}  // namespace
}  // namespace lossd::supervisor_test
