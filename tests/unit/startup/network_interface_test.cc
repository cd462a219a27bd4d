#include "server/startup/group/network_interface.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lossd::network_interface_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(NetworkInterface, HasItsAddressesWithIpv4First) {
  const auto addresses = AddressesOf("lo");
  ASSERT_TRUE(addresses.ok()) << addresses.status();
  EXPECT_EQ(addresses->front(), "127.0.0.1");
}

TEST(NetworkInterface, OneThatIsNotThereIsAnsweredWithThoseThatAre) {
  for (const char* name : {"", "none0"}) {
    const absl::Status status = AddressesOf(name).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("--collective_interface is '" + std::string(name) + "'"),
                      HasSubstr("lo (127.0.0.1")));
  }
}

TEST(NetworkInterface, ALeaderListensOnTheAddressThatOthersKnowOrTheFirst) {
  EXPECT_EQ(ControlAddress("lo", "127.0.0.1:50053", "--group_leader").value_or(""), "127.0.0.1:50053");
  EXPECT_EQ(ControlAddress("lo", "lossd-0.invalid:7", "--group_leader").value_or(""), "127.0.0.1:7");
  EXPECT_EQ(ControlAddress("lo", "localhost:7", "--group_leader").value_or(""), "127.0.0.1:7");
  const auto addresses = AddressesOf("lo");
  if (addresses.ok() && addresses->back() == "::1") {
    EXPECT_EQ(ControlAddress("lo", "[::1]:7", "--group_leader").value_or(""), "[::1]:7");
  }
  EXPECT_EQ(ControlAddress("none0", "a:1", "--group_leader").status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(NetworkInterface, OfThisHostAreItsAddressesAndItsNames) {
  for (const char* leader : {"127.0.0.1:7", "[::1]:7", "localhost:7"}) EXPECT_TRUE(IsOfThisHost(leader));
  for (const char* leader : {"203.0.113.7:7", "lossd-0.invalid:7"}) EXPECT_FALSE(IsOfThisHost(leader));
}

TEST(NetworkInterface, ALeaderThatIsSomewhereElseIsNotWaitedFor) {
  const absl::Status status = ControlAddress("lo", "203.0.113.7:7", "--group_leader").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("--group_leader 203.0.113.7 is 203.0.113.7"),
                                                   HasSubstr("--collective_interface lo has 127.0.0.1"),
                                                   HasSubstr("give --group_leader=127.0.0.1")));
}

}  // namespace
}  // namespace lossd::network_interface_test
