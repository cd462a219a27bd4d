#include "server/rpc/transport/socket_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

namespace lossd::rpc::socket_folder_test {
namespace {

using Variable = std::optional<std::string>;

// Sets a variable of the environment while it lives; nothing: unsets it.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const Variable& value) : name_(name) {
    if (const char* const before = std::getenv(name); before != nullptr) before_ = before;
    Set(value);
  }
  ~ScopedVariable() { Set(before_); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  void Set(const Variable& value) { value ? setenv(name_, value->c_str(), 1) : unsetenv(name_); }

  const char* const name_;
  Variable before_;
};

class SocketFolderTest : public ::testing::Test {
 protected:
  ~SocketFolderTest() override { std::filesystem::remove_all(own_); }

  // A folder below this test's whose path has so many bytes.
  std::string FolderOf(size_t bytes) const {
    const std::string path = own_ + "/" + std::string(bytes - own_.size() - 1, 'x');
    std::filesystem::create_directory(path);
    return path;
  }

  const std::string own_ = [] {
    std::string made = "/tmp/test-XXXXXX";
    return std::string(mkdtemp(made.data()));
  }();
};

TEST_F(SocketFolderTest, TheFirstOfTheThreeThatIsOfUseIsTaken) {
  const std::string name = "control.sock";
  const size_t most = 107 - std::string("/lossd-group-XXXXXX/").size() - name.size();
  const std::string fits = FolderOf(most);
  const std::string too_long = FolderOf(most + 1);
  struct Case {
    Variable tmpdir, runtime_directory;
    std::string folder;
  };
  for (const auto& [tmpdir, runtime_directory, folder] : {
           Case{own_, {}, own_},
           Case{fits, own_, fits},
           Case{too_long, own_, own_},
           Case{too_long, {}, "/tmp"},
           Case{FolderOf(200), too_long, "/tmp"},
           Case{own_ + "/none", own_, own_},
           Case{"/proc/self", own_, own_},  // which no user, root included, can write to
           Case{"/proc/self", "/proc/self", "/tmp"},
           Case{"", own_, own_},
           Case{{}, own_, own_},
           Case{{}, {}, "/tmp"},
       }) {
    SCOPED_TRACE(tmpdir.value_or("unset") + ", " + runtime_directory.value_or("unset"));
    const ScopedVariable first("TMPDIR", tmpdir);
    const ScopedVariable second("RUNTIME_DIRECTORY", runtime_directory);
    const absl::StatusOr<std::string> made = MakeSocketFolder("lossd-group", name);
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ(std::filesystem::path(*made).parent_path(), folder);
    EXPECT_THAT(std::filesystem::path(*made).filename(), ::testing::StartsWith("lossd-group-"));
    struct stat info {};
    ASSERT_EQ(stat(made->c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777U, 0700U);
    ASSERT_EQ(rmdir(made->c_str()), 0);
  }
}

TEST_F(SocketFolderTest, TheErrorSaysWhatIsWrongWithEach) {
  const ScopedVariable first("TMPDIR", own_ + "/none");
  const ScopedVariable second("RUNTIME_DIRECTORY", FolderOf(90));
  const std::string name(94, 's');  // 1 byte too many for /tmp
  const absl::StatusOr<std::string> made = MakeSocketFolder("p", name);
  EXPECT_TRUE(absl::IsFailedPrecondition(made.status()));
  EXPECT_THAT(std::string(made.status().message()),
              ::testing::AllOf(::testing::HasSubstr("set TMPDIR to"),
                               ::testing::HasSubstr("TMPDIR: too long by 18 bytes"),
                               ::testing::HasSubstr("RUNTIME_DIRECTORY: too long by 87 bytes"),
                               ::testing::HasSubstr("/tmp: too long by 1 bytes")));
}

}  // namespace
}  // namespace lossd::rpc::socket_folder_test
