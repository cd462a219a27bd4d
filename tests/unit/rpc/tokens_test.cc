#include "server/rpc/transport/tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace lossd::rpc::tokens_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kSecret[] = "abcdefghijklmnop";  // as short as a token may be

std::string Secret() { return kSecret; }

// The message, which must not tell any token.
std::string Refusal(const std::string& text) {
  const auto tokens = Tokens::Parse(text);
  EXPECT_TRUE(absl::IsInvalidArgument(tokens.status())) << text;
  std::string message(tokens.status().message());
  EXPECT_THAT(message, Not(HasSubstr(Secret().substr(0, 8)))) << text;
  return message;
}

TEST(TokensTest, LinesOfRoleTokenAndNameAreReadWhateverSpaceIsBetweenThem) {
  const auto tokens = Tokens::Parse("# comment\n\n  trainer\t" + Secret() + "1   run-7 \r\nadmin " +
                                    Secret() + "2\n#admin " + Secret() + "3\nread-only -._~+/aA0aaaaaaa==");
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  EXPECT_EQ(tokens->size(), 3U);
  const Token* trainer = tokens->Find(HashToken(Secret() + "1"));
  ASSERT_NE(trainer, nullptr);
  EXPECT_EQ(trainer->role, Role::kTrainer);
  const Token* admin = tokens->Find(HashToken(Secret() + "2"));
  ASSERT_NE(admin, nullptr);
  EXPECT_EQ(admin->role, Role::kAdmin);
  EXPECT_NE(tokens->Find(HashToken("-._~+/aA0aaaaaaa==")), nullptr);
  EXPECT_EQ(tokens->Find(HashToken(Secret() + "3")), nullptr) << "it is in a comment";
}

TEST(TokensTest, OnlyAWholeTokenIsFound) {
  const auto tokens = Tokens::Parse("admin " + Secret());
  ASSERT_TRUE(tokens.ok());
  EXPECT_NE(tokens->Find(HashToken(Secret())), nullptr);
  for (const std::string& other :
       {std::string(), Secret().substr(0, 15), Secret() + "q", "Abcdefghijklmnop" + std::string()}) {
    EXPECT_EQ(tokens->Find(HashToken(other)), nullptr) << other;
  }
}

TEST(TokensTest, ALineThatIsNoGoodIsNamed) {
  const std::string good = "admin " + Secret() + "\n";
  EXPECT_THAT(Refusal(good + "trainer\n"), HasSubstr("line 2: has 1 words"));
  EXPECT_THAT(Refusal(good + "trainer " + Secret() + "2 a b\n"), HasSubstr("line 2: has 4 words"));
  EXPECT_THAT(Refusal(Secret() + "2 trainer\n"), HasSubstr("line 1: does not begin with a role"));
  EXPECT_THAT(Refusal("anybody " + Secret() + "\n"), HasSubstr("read-only, trainer, admin"));
  EXPECT_THAT(Refusal("admin " + Secret().substr(1) + "\n"),
              HasSubstr("15 characters; it must have 16 to 512"));
  EXPECT_THAT(Refusal("admin " + std::string(513, 'x') + "\n"), HasSubstr("513 characters"));
  for (const char* bad : {"=", "\x01", "\xc3\xbc", ",", ":", "\"", "{"}) {
    EXPECT_THAT(Refusal("admin " + Secret() + bad + "x\n"), HasSubstr("line 1: its token has characters"))
        << bad;
  }
  EXPECT_THAT(Refusal("admin ================\n"), HasSubstr("characters that"));
  EXPECT_THAT(Refusal("admin " + Secret() + " " + std::string(65, 'n')), HasSubstr("64 visible"));
  EXPECT_THAT(Refusal("admin " + Secret() + " \x1b[2J"), HasSubstr("64 visible"));
}

TEST(TokensTest, ATokenThatIsThereTwiceIsRefusedWhateverItsRole) {
  EXPECT_THAT(Refusal("admin " + Secret() + "\n\ntrainer " + Secret() + "\n"),
              HasSubstr("line 3: has the token of line 1 once more"));
}

TEST(TokensTest, AFileWithoutATokenIsRefused) {
  EXPECT_THAT(Refusal(""), HasSubstr("has no token"));
  EXPECT_THAT(Refusal("# nothing\n \t\n"), HasSubstr("has no token"));
}

TEST(TokensTest, AChangeIsCountedByWhatBecameOfEachToken) {
  const std::string stays = "0123456789abcdef-stays";
  const std::string promoted = "0123456789abcdef-promoted";
  const auto before =
      Tokens::Parse("admin " + stays + "\ntrainer " + promoted + "\nread-only " + Secret() + "\n");
  const auto after = Tokens::Parse("admin " + promoted + " name\nadmin " + stays + "\nadmin " + Secret() +
                                   "1\nadmin " + Secret() + "2\n");
  ASSERT_TRUE(before.ok() && after.ok());
  const TokensChange change = after->ChangeFrom(*before);
  EXPECT_EQ(change.added, 2);
  EXPECT_EQ(change.removed, 1);
  EXPECT_EQ(change.other_role, 1);
}

TEST(TokensTest, WhatIsNoFileIsRefused) {
  for (const char* path : {"/", "/dev/null", "/nonexistent/tokens"}) {
    const auto read = ReadTokens(path);
    EXPECT_TRUE(absl::IsInvalidArgument(read.status())) << path;
    EXPECT_THAT(std::string(read.status().message()), HasSubstr(path));
  }
}

}  // namespace
}  // namespace lossd::rpc::tokens_test
