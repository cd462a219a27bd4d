#include "server/startup/group/group_token.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "tests/support/scratch_folder.h"

namespace lossd::group_token_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class GroupToken : public ::testing::Test {
 protected:
  std::string File(const std::string& text, std::filesystem::perms others = std::filesystem::perms::none) {
    const std::string path = folder_.File("token");
    std::filesystem::remove(path);
    std::ofstream(path) << text;
    std::filesystem::permissions(path, std::filesystem::perms::owner_read | others);
    return path;
  }

  std::string WhyNot(const std::string& path) {
    const absl::Status status = ReadGroupToken(path).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("--group_token_file: " + path));
    return std::string(status.message());
  }

  const lossd::testing::ScratchFolder folder_;
};

TEST_F(GroupToken, IsTheTextWithoutSpaceAroundIt) {
  EXPECT_EQ(ReadGroupToken(File("0123456789abcdef")).value_or(""), "0123456789abcdef");
  EXPECT_EQ(ReadGroupToken(File(" \n0123456789abcdef\r\n")).value_or(""), "0123456789abcdef");
  EXPECT_EQ(ReadGroupToken(File(std::string(1023, 'x') + "\n")).value_or("").size(), 1023);
}

TEST_F(GroupToken, AFileThatIsNotThereIsToBeMade) {
  EXPECT_THAT(WhyNot("/none/there"), AllOf(HasSubstr("No such file"), HasSubstr("openssl rand -hex 32")));
}

TEST_F(GroupToken, AFileForEverybodyIsNoSecret) {
  EXPECT_THAT(WhyNot(File("0123456789abcdef", std::filesystem::perms::others_read)), HasSubstr("chmod o-r"));
  EXPECT_TRUE(ReadGroupToken(File("0123456789abcdef", std::filesystem::perms::group_read)).ok());
}

TEST_F(GroupToken, WhatCanBeGuessedOrIsNoWordIsNoneAndIsNotQuoted) {
  EXPECT_THAT(WhyNot(File("")), HasSubstr("0 bytes"));
  EXPECT_THAT(WhyNot(File("   0123456789abcde\n")), AllOf(HasSubstr("15 bytes"), Not(HasSubstr("0123"))));
  EXPECT_THAT(WhyNot(File("0123456789 abcdef")), AllOf(HasSubstr("one word"), Not(HasSubstr("0123"))));
  EXPECT_THAT(WhyNot(File(std::string(20, '\0'))), HasSubstr("one word"));
  EXPECT_THAT(WhyNot(File(std::string(5000, 'x'))), HasSubstr("one word"));
  EXPECT_THAT(WhyNot(folder_.path()), HasSubstr("is no file"));
}

TEST_F(GroupToken, APipeIsNoFileAndNotWaitedFor) {
  const std::string path = folder_.File("pipe");
  ASSERT_EQ(mkfifo(path.c_str(), S_IRUSR | S_IWUSR), 0);
  EXPECT_THAT(WhyNot(path), HasSubstr("is no file"));
}

}  // namespace
}  // namespace lossd::group_token_test
