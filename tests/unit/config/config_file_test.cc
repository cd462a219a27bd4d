#include "server/startup/config_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace lossd::config_file_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Names and values of flags, in the order of the names.
absl::StatusOr<std::vector<HeadEntry>> Parsed(const std::string& text, std::vector<std::string>* flags) {
  return ParseConfig(text, "lossd.json", [flags](const std::string& name, const nlohmann::json& value) {
    flags->push_back(absl::StrCat(name, "=", value.dump()));
    return name == "unknown" ? absl::InvalidArgumentError("unknown") : absl::OkStatus();
  });
}

std::string Refusal(const std::string& text) {
  std::vector<std::string> flags;
  const absl::Status status = Parsed(text, &flags).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text.substr(0, 100);
  return std::string(status.message());
}

TEST(ConfigFileTest, HasFlagsAndHeads) {
  std::vector<std::string> flags;
  const auto heads = Parsed(
      R"({"listen": "127.0.0.1:0", "max_heads": 3, "restore": true, "heads": [
          {"name": "lm", "vocab_size": 32, "hidden_size": 8, "optimizer": {"kind": "adamw"}},
          {"name": "held", "vocab_size": 32, "hidden_size": 8, "held_bytes": 4096}]})",
      &flags);
  ASSERT_TRUE(heads.ok()) << heads.status();
  EXPECT_THAT(flags, ElementsAre("listen=\"127.0.0.1:0\"", "max_heads=3", "restore=true"));
  ASSERT_EQ(heads->size(), 2U);
  EXPECT_EQ(heads->front().config.held_bytes, 0);
  EXPECT_EQ(heads->back().config.held_bytes, 4096);
  EXPECT_EQ(heads->front().config.name, "lm");
  EXPECT_EQ(heads->front().config.optimizer.weight_decay, 0.01);
}

TEST(ConfigFileTest, WhatIsNoObjectIsRefusedNamingTheFile) {
  for (const char* text : {"", "{", "[]", "3", "{\"listen\": \"\xff\"}"}) {
    EXPECT_THAT(Refusal(text), HasSubstr("lossd.json is not a JSON object")) << text;
  }
  EXPECT_EQ(Refusal(R"({"unknown": 1})"), "unknown");
}

// What writes a value out again calls itself for what is inside.
TEST(ConfigFileTest, ValuesThatGoDeepAreRefused) {
  const size_t depth = 200000;
  const std::string deep = std::string(depth, '[') + std::string(depth, ']');
  EXPECT_THAT(Refusal(absl::StrCat("{\"listen\": ", deep, "}")), HasSubstr("inside each other"));
  EXPECT_THAT(Refusal(absl::StrCat("{\"heads\": [{\"name\": \"a\", \"vocab_size\": ", deep, "}]}")),
              HasSubstr("inside each other"));
}

}  // namespace
}  // namespace lossd::config_file_test
