// What lossctl prints: tables, numbers, errors with their exit codes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/status/status.h"
#include "absl/strings/str_split.h"
#include "client/tools/connection_options.h"
#include "client/tools/lossctl/completion.h"
#include "client/tools/lossctl/context.h"
#include "client/tools/lossctl/errors.h"
#include "client/tools/lossctl/head_info.h"
#include "client/tools/lossctl/table.h"
#include "nlohmann/json.hpp"

namespace lossd::tools::output_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(TableTest, ColumnsAreAsWideAsTheirWidestCellCountedInCharacters) {
  Table table({{"NAME"}, {"SIZE", Align::kRight}, {""}});
  table.AddRow({"é", "1", "█░"});
  table.AddRow({"longer", "12345"});
  EXPECT_EQ(table.Render(),
            "NAME     SIZE\n"
            "é           1  █░\n"
            "longer  12345\n");
}

TEST(HeadsTableTest, SaysHowMuchOfTheNextWeightsIsThere) {
  HeadInfo head;
  head.config = {.name = "h", .vocab_size = 200, .hidden_size = 8};
  head.weight_version = 3;
  EXPECT_THAT(HeadsTable({head}), HasSubstr("version 3  "));
  head.staged_rows = 84;
  EXPECT_THAT(HeadsTable({head}), HasSubstr("version 3, next 42 %"));
  head.weight_version = 0;
  EXPECT_THAT(HeadsTable({head}), HasSubstr("none, next 42 %"));
}

TEST(HeadsTableTest, HasTheOptimizerInAColumnOfItsOwn) {
  HeadInfo head;
  head.config = {.name = "h", .vocab_size = 200, .hidden_size = 8};
  head.config.softcap = 30;
  head.config.optimizer.kind = OptimizerKind::kAdamW;
  head.config.master_weights = true;
  head.config.double_buffer = true;
  const std::vector<std::string> lines = absl::StrSplit(HeadsTable({head}), '\n');
  const size_t loss = lines[0].find("LOSS");
  const size_t optimizer = lines[0].find("OPTIMIZER");
  ASSERT_NE(optimizer, std::string::npos);
  EXPECT_EQ(lines[1].substr(loss, optimizer - loss), "softcap 30  ");
  EXPECT_THAT(lines[1].substr(optimizer), HasSubstr("AdamW"));
  EXPECT_THAT(lines[1].substr(optimizer), HasSubstr("fp32 master"));
  EXPECT_THAT(lines[1], HasSubstr(", two gradients  "));
}

TEST(HeadsTableTest, NamesFixedSegmentsBesideTheLoss) {
  HeadInfo head;
  head.config = {.name = "h", .vocab_size = 200, .hidden_size = 8, .softcap = 30};
  EXPECT_THAT(HeadsTable({head}), Not(HasSubstr("fixed segments")));
  EXPECT_FALSE(HeadToJson(head)["fixed_segments"]);
  head.config.fixed_segments = true;
  EXPECT_THAT(HeadsTable({head}), HasSubstr("softcap 30, fixed segments"));
  EXPECT_TRUE(HeadToJson(head)["fixed_segments"]);
}

TEST(FormatErrorTest, SaysSomethingWhereGrpcDoesNot) {
  EXPECT_THAT(FormatError(absl::UnimplementedError(""), false), HasSubstr("--listen"));
  EXPECT_THAT(FormatError(absl::UnimplementedError(""), false), HasSubstr("does not serve this call"));
  EXPECT_THAT(FormatError(absl::InternalError(""), false), HasSubstr("INTERNAL"));
}

TEST(NameFlagsTest, NamesFlagsForFieldsAndLeavesFilesAlone) {
  const auto named = [](absl::string_view message) {
    return std::string(NameFlags(absl::InvalidArgumentError(message)).message());
  };
  EXPECT_EQ(named("tls.key: cannot read '/etc/tls.key: x'"), "--tls_key: cannot read '/etc/tls.key: x'");
  EXPECT_EQ(named("tls.ca_certificates: 'x' holds no CERTIFICATE"), "--tls_ca: 'x' holds no CERTIFICATE");
  EXPECT_EQ(named("name it in TlsOptions::ca_certificates (--tls_ca)"), "name it in --tls_ca");
  EXPECT_EQ(named("anything else"), "anything else");
}

TEST(HeadsTableTest, SaysWhichFlushHoldsAWindowAndWhatEndsIt) {
  HeadInfo head;
  head.config = {.name = "h", .vocab_size = 200, .hidden_size = 8};
  EXPECT_THAT(HeadsTable({head}), Not(HasSubstr("Flush")));
  EXPECT_TRUE(HeadToJson(head)["flush_id"].is_null());
  head.window_state = WindowState::kFrozen;
  head.flush_id = "f1";
  head.flush_seconds = 90;
  EXPECT_THAT(HeadsTable({head}), HasSubstr("\nFlush f1 has held the window of 'h' for 1 min 30 s."));
  EXPECT_THAT(HeadsTable({head}), HasSubstr("lossctl flush h --abort\n"));
  EXPECT_EQ(HeadToJson(head)["flush_id"], "f1");
}

TEST(WithCommasTest, GroupsByThree) {
  EXPECT_EQ(WithCommas(0), "0");
  EXPECT_EQ(WithCommas(999), "999");
  EXPECT_EQ(WithCommas(1000), "1,000");
  EXPECT_EQ(WithCommas(-123456), "-123,456");
  EXPECT_EQ(WithCommas(std::numeric_limits<int64_t>::min()), "-9,223,372,036,854,775,808");
}

TEST(ErrorsTest, EveryStatusCodeHasItsExitCode) {
  using absl::StatusCode;
  const std::pair<StatusCode, int> expected[] = {
      {StatusCode::kOk, 0},
      {StatusCode::kCancelled, 1},
      {StatusCode::kUnknown, 1},
      {StatusCode::kInvalidArgument, 7},
      {StatusCode::kNotFound, 3},
      {StatusCode::kDeadlineExceeded, 4},
      {StatusCode::kUnavailable, 4},
      {StatusCode::kAlreadyExists, 5},
      {StatusCode::kAborted, 5},
      {StatusCode::kFailedPrecondition, 5},
      {StatusCode::kOutOfRange, 7},
      {StatusCode::kResourceExhausted, 6},
      {StatusCode::kInternal, 1},
      {StatusCode::kDataLoss, 1},
      {StatusCode::kUnimplemented, 1},
      {StatusCode::kPermissionDenied, 1},
      {StatusCode::kUnauthenticated, 1},
  };
  for (const auto& [code, exit_code] : expected) {
    EXPECT_EQ(static_cast<int>(ExitCodeOf(absl::Status(code, "m"))), exit_code)
        << absl::StatusCodeToString(code);
  }
}

TEST(ErrorsTest, TheFirstAdviceStays) {
  absl::Status status = WithAdvice(absl::NotFoundError("no head"), "look here");
  status = WithAdvice(status, "");
  status = WithAdvice(status, "or there");
  EXPECT_EQ(FormatError(status, /*json=*/false), "lossctl: no head\n  look here\n");
  const auto json = nlohmann::json::parse(FormatError(status, /*json=*/true));
  EXPECT_EQ(json["error"]["code"], "NOT_FOUND");
  EXPECT_EQ(json["error"]["exit_code"], 3);
  EXPECT_EQ(json["error"]["advice"], "look here");
  EXPECT_TRUE(WithAdvice(absl::OkStatus(), "none needed").ok());
}

TEST(ErrorsTest, AMessageThatIsNotUtf8IsStillJson) {
  EXPECT_FALSE(
      nlohmann::json::parse(FormatError(absl::InternalError("\xff"), true), nullptr, false).is_discarded());
}

TEST(CompletionTest, AnOptionOrCommandThatIsAddedIsOffered) {
  CLI::App app("", "lossctl");
  Context context;
  AddStatusCommand(app, context);
  EXPECT_THAT(BashCompletion(DescribeCommands(app)), Not(HasSubstr("brandnew")));
  std::string value;
  CLI::App* added = app.add_subcommand("brandnew", "It's new: \"very\"");
  added->add_option("--brandnew-option", value, "d")->type_name("FILE");
  const CompletionCommand root = DescribeCommands(app);
  for (const std::string& script : {BashCompletion(root), ZshCompletion(root), FishCompletion(root)}) {
    EXPECT_THAT(script, HasSubstr("lossctl brandnew"));
    EXPECT_THAT(script, HasSubstr("brandnew-option"));
  }
}

TEST(CompletionTest, QuotesWhatAShellWouldRead) { EXPECT_EQ(ShellQuote("it's $HOME"), "'it'\\''s $HOME'"); }

}  // namespace
}  // namespace lossd::tools::output_test
