// Several addresses, and socket files with what earlier servers left of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "lossd/client.h"
#include "server/rpc/transport/listen_address.h"
#include "tests/support/test_server.h"

namespace lossd::listen_test {
namespace {

using ::testing::HasSubstr;
using testing::TestServer;

class ListenTest : public ::testing::Test {
 protected:
  ListenTest() : folder_(std::filesystem::temp_directory_path() / "lossd-listen-XXXXXX") {
    if (mkdtemp(folder_.data()) == nullptr) std::abort();
    path_ = folder_ + "/socket";
  }
  ~ListenTest() override { std::filesystem::remove_all(folder_); }

  absl::StatusOr<std::unique_ptr<rpc::Server>> Start(const std::string& listen) {
    return rpc::Server::Start({.listen = listen, .tls = {}}, &host_.engine());
  }
  static void ExpectAnswers(const std::string& target) {
    const auto client = Client::Connect(target, {});
    ASSERT_TRUE(client.ok()) << target << ": " << client.status();
    EXPECT_TRUE((*client)->Status().ok());
  }

  TestServer host_;  // for its engine
  std::string folder_;
  std::string path_;
};

TEST_F(ListenTest, AServerAnswersOnEachOfItsAddresses) {
  const auto server = Start("127.0.0.1:0,unix:" + path_);
  ASSERT_TRUE(server.ok()) << server.status();
  ExpectAnswers("127.0.0.1:" + std::to_string((*server)->port()));
  ExpectAnswers("unix:" + path_);
}

TEST_F(ListenTest, ASocketFileIsForOwnerAndGroup) {
  const auto server = Start("unix:" + path_);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ((*server)->port(), 0);
  struct stat status {};
  ASSERT_EQ(stat(path_.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0660U);
}

TEST_F(ListenTest, TheSocketOfAServerThatIsNoMoreIsReplaced) {
  const int left = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path_.c_str(), sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(left, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  close(left);
  ASSERT_TRUE(std::filesystem::exists(path_));
  const auto server = Start("unix:" + path_);
  ASSERT_TRUE(server.ok()) << server.status();
  ExpectAnswers("unix:" + path_);
}

TEST_F(ListenTest, TheSocketOfALiveServerIsLeftAlone) {
  const auto first = Start("unix:" + path_);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = Start("unix:" + path_);
  EXPECT_TRUE(absl::IsAlreadyExists(second.status())) << second.status();
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("a server listens there"));
  ExpectAnswers("unix:" + path_);
}

TEST_F(ListenTest, AFileThatIsNoSocketIsLeftAlone) {
  std::ofstream(path_) << "precious";
  const auto server = Start("unix:" + path_);
  EXPECT_TRUE(absl::IsAlreadyExists(server.status())) << server.status();
  EXPECT_EQ(std::filesystem::file_size(path_), 8U);
}

TEST_F(ListenTest, TheAddressThatCannotBeListenedOnIsNamed) {
  const auto server = Start("127.0.0.1:0," + host_.target());
  EXPECT_TRUE(absl::IsUnavailable(server.status())) << server.status();
  EXPECT_THAT(std::string(server.status().message()), HasSubstr(host_.target()));
  const auto no_folder = Start("unix:" + folder_ + "/nowhere/socket");
  EXPECT_TRUE(absl::IsUnavailable(no_folder.status())) << no_folder.status();
  EXPECT_THAT(std::string(no_folder.status().message()), HasSubstr("folder"));
}

TEST_F(ListenTest, AddressesThatCannotBeOnesAreRefused) {
  for (const std::string& bad :
       {std::string(), std::string("localhost"), std::string("127.0.0.1:70000"), std::string("127.0.0.1:1,"),
        std::string("unix:"), std::string("unix-abstract:anybody"), "unix:/" + std::string(200, 'x')}) {
    EXPECT_TRUE(absl::IsInvalidArgument(rpc::ParseListen(bad).status())) << bad;
  }
  EXPECT_TRUE(rpc::IsLoopback("unix:/run/lossd"));
  EXPECT_FALSE(rpc::IsLoopback("unixhost:50051"));
  EXPECT_FALSE(rpc::IsLoopback("0.0.0.0:50051"));
}

}  // namespace
}  // namespace lossd::listen_test
