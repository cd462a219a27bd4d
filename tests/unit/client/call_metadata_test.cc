#include "client/src/connection/call_metadata.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

namespace lossd::internal::call_metadata_test {
namespace {

class CheckTokenMayGoTest : public ::testing::Test {
 protected:
  CheckTokenMayGoTest() : folder_(::testing::TempDir() + "check_token_XXXXXX") { mkdtemp(folder_.data()); }
  ~CheckTokenMayGoTest() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  std::string Target(const std::string& name) const { return "unix:" + Path(name); }
  void MakeSocket(const std::string& name) const {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, Path(name).c_str(), sizeof(address.sun_path) - 1);
    const int file = socket(AF_UNIX, SOCK_STREAM, 0);
    ASSERT_EQ(bind(file, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    close(file);
  }
  bool May(const std::string& place, const std::string& target) const {
    return CheckTokenMayGo(place, target, options_).ok();
  }

  std::string folder_;
  ClientOptions options_{.token_file = "token"};
};

TEST_F(CheckTokenMayGoTest, WithoutTlsToNoPortButTheTargets) {
  EXPECT_FALSE(May("localhost:50052", "localhost:50051"));
  EXPECT_FALSE(May("node-1:50051", "node-0:50051"));
  options_.token_over_plain_text = true;  // says that it is encrypted on the way to the target
  EXPECT_FALSE(May("host:50052", "host:50051"));
}

TEST_F(CheckTokenMayGoTest, OverTlsAndWithoutATokenAnywhere) {
  options_.tls.emplace();
  EXPECT_TRUE(May("localhost:50052", "localhost:50051"));
  options_ = {};
  EXPECT_TRUE(May("localhost:50052", "localhost:50051"));
}

TEST_F(CheckTokenMayGoTest, ToASocketFileOfTheSameOwner) {
  MakeSocket("socket");
  EXPECT_FALSE(May(Target("socket.1"), Target("socket"))) << "there is none";
  MakeSocket("socket.1");
  EXPECT_TRUE(May(Target("socket.1"), Target("socket")));
  EXPECT_TRUE(May("unix://" + Path("socket.1"), "unix://" + Path("socket")));
  EXPECT_FALSE(May("localhost:50052", Target("socket")));
  EXPECT_FALSE(May(Target("socket.1"), "localhost:50051"));
  std::ofstream(Path("socket.2")) << "no socket";
  EXPECT_FALSE(May(Target("socket.2"), Target("socket")));
  std::filesystem::create_symlink(Path("socket.1"), Path("socket.3"));
  EXPECT_FALSE(May(Target("socket.3"), Target("socket"))) << "anybody can link to it";
}

TEST_F(CheckTokenMayGoTest, NotToOneOfAnotherOwner) {
  MakeSocket("socket");
  MakeSocket("socket.1");
  if (chown(Path("socket.1").c_str(), 65534, 65534) != 0) GTEST_SKIP() << "root alone can give files away";
  EXPECT_FALSE(May(Target("socket.1"), Target("socket")));
}

}  // namespace
}  // namespace lossd::internal::call_metadata_test
