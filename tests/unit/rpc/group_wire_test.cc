#include "server/rpc/group/group_wire.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/device/device_report_fields.h"
#include "server/engine/group/group_command_fields.h"
#include "tests/unit/rpc/fields/every_member.h"

namespace lossd::engine {

// MemberFiller's values, where FaultOf() would refuse them.
void MakeSense(HeadConfig& config) { config.vocab_size = 2; }
void MakeSense(ChunkHeader& chunk) {
  chunk.tokens = 2;
  chunk.labels = "16 bytes: labels";
  chunk.token_weights = "weights.";
  chunk.lse_gradients = "of lses.";
  chunk.entropy_gradients = "entropy.";
}

}  // namespace lossd::engine

namespace lossd::rpc {

template <>
inline constexpr size_t kLeftOut<engine::TeacherKind> = 1;  // backend
template <>
inline constexpr size_t kLeftOut<engine::BatchKey> = 3;  // holds, lists, gradient

}  // namespace lossd::rpc

namespace lossd::rpc::group_wire_test {

using engine::GroupCommand;
using ::testing::HasSubstr;

template <class Visit, size_t... indices>
void ForEachCommand(const Visit& visit, std::index_sequence<indices...> /*all*/) {
  (visit(std::variant_alternative_t<indices, GroupCommand>()), ...);
}
// Calls visit(command) with one of each kind, as it is by default.
template <class Visit>
void ForEachCommand(const Visit& visit) {
  ForEachCommand(visit, std::make_index_sequence<std::variant_size_v<GroupCommand>>());
}

// A command that is added is here because it is in the variant. A struct with a member that is added does not
// compile until its Fields take it apart with it; a loss option or a field of a head arrives by its table.
// This fails where Fields, or the table, do not tell a member.
TEST(GroupWire, EveryMemberOfEveryCommandArrives) {
  ForEachCommand([](const auto& command) {
    SCOPED_TRACE(engine::NameOf(command));
    ExpectEveryMemberArrives<GroupCommand>(command);
  });
}

TEST(GroupWire, EveryMemberOfAnswersAndReportsArrives) {
  ExpectEveryMemberArrives<engine::AnsweredChunk>(engine::AnsweredChunk());
  ExpectEveryMemberArrives<engine::RankReport>(engine::RankReport());
}

// By the table that checks, messages and checkpoints go over, not by what the options tell of themselves.
TEST(GroupWire, EveryLossOptionArrives) {
  engine::StartBatchCommand sent;
  float value = 0.25f;
  for (const kernels::LossOption& option : kernels::kLossOptions) {
    sent.kind.options.*option.value = value /= 2;
  }
  const absl::StatusOr<GroupCommand> read = ParseCommand(SerializeCommand(sent));
  ASSERT_EQ(read.status(), absl::OkStatus());
  EXPECT_EQ(std::get<engine::StartBatchCommand>(*read).kind, sent.kind);
  EXPECT_EQ(sizeof sent.kind.options, sizeof value * std::size(kernels::kLossOptions))
      << "the table lacks one";
}

std::vector<std::string> OneOfEach() {
  std::vector<std::string> all;
  ForEachCommand([&all](auto command) {
    MemberFiller().Fill(command);
    all.push_back(SerializeCommand(command));
  });
  return all;
}

TEST(GroupWire, OnlyWholeCommandsAreRead) {
  for (const std::string& bytes : OneOfEach()) {
    ASSERT_EQ(ParseCommand(bytes).status(), absl::OkStatus());
    for (size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_TRUE(absl::IsInvalidArgument(ParseCommand(bytes.substr(0, size)).status())) << size;
    }
    EXPECT_TRUE(absl::IsInvalidArgument(ParseCommand(bytes + '\0').status()));
  }
}

// The items of a command: where they begin, and where what they are themselves ends; arrays without their
// items.
std::vector<std::pair<size_t, size_t>> ItemsOf(const std::string& bytes) {
  std::vector<std::pair<size_t, size_t>> items;
  for (size_t at = 0; at < bytes.size();) {
    CborReader reader(absl::string_view(bytes).substr(at));
    uint64_t number = 0;
    int64_t integer = 0;
    float single = 0;
    double wide = 0;
    bool yes = false;
    absl::string_view string;
    EXPECT_TRUE(reader.Unsigned(&number) || reader.Signed(&integer) || reader.Float(&single) ||
                reader.Double(&wide) || reader.Bool(&yes) || reader.Null() || reader.Bytes(&string) ||
                reader.Array(&number));
    if (reader.position() == 0) return items;
    items.emplace_back(at, at + reader.position());
    at += reader.position();
  }
  return items;
}

// What an item is, by its first byte: positive and negative integers are one kind.
int KindOf(const std::string& item) {
  const auto first = static_cast<uint8_t>(item[0]);
  if (first >> 5 == 7) return first == 0xF4 ? 0xF5 : first;
  return std::max(1, first >> 5);
}

TEST(GroupWire, AnItemOfAnotherKindIsRefused) {
  // Text, a map, a tag, a simple value, undefined, a short float, what ends somewhere, its end, what is too
  // long.
  const std::vector<std::string> of_no_kind = {"\x60",
                                               "\xA0",
                                               "\xC0",
                                               "\xE0",
                                               "\xF7",
                                               "\xF9\x3C\x01",
                                               "\x9F",
                                               "\x5F",
                                               "\xFF",
                                               "\x9B\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF",
                                               "\x5B\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF"};
  const std::vector<std::string> of_any_kind = {
      "\x81",        "\xF6", "\x41x", "\xF5", "\xFA\x01\x01\x01\x01", "\xFB\x01\x01\x01\x01\x01\x01\x01\x01",
      "\x39\x7F\xFF"};
  for (const std::string& bytes : OneOfEach()) {
    for (const auto& [begin, end] : ItemsOf(bytes)) {
      const auto with = [&, first = begin, past = end](const std::string& other) {
        return ParseCommand(bytes.substr(0, first) + other + bytes.substr(past)).ok();
      };
      const int kind = KindOf(bytes.substr(begin));
      for (const std::string& other : of_no_kind) {
        EXPECT_FALSE(with(other)) << ::testing::PrintToString(other);
      }
      for (const std::string& other : of_any_kind) {
        const bool may_be_absent = other == "\xF6" && (kind == KindOf("\x41") || kind == 0xFA);
        if (KindOf(other) == kind || may_be_absent) continue;
        EXPECT_FALSE(with(other)) << ::testing::PrintToString(other) << " at byte " << begin;
      }
    }
  }
}

TEST(GroupWire, WhatIsReadIsWrittenTheSameWay) {
  for (const std::string& bytes : OneOfEach()) {
    for (size_t at = 0; at < bytes.size(); ++at) {
      for (int bit = 0; bit < 8; ++bit) {
        std::string damaged = bytes;
        damaged[at] = static_cast<char>(damaged[at] ^ 1 << bit);
        const absl::StatusOr<GroupCommand> read = ParseCommand(damaged);
        if (!read.ok()) continue;
        EXPECT_EQ(SerializeCommand(*read), damaged) << "bit " << bit << " of byte " << at;
      }
    }
  }
}

std::string Refused(const GroupCommand& command) {
  const absl::Status status = ParseCommand(SerializeCommand(command)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(GroupWire, ValuesThatMakeNoSenseAreRefused) {
  const auto batch = [](const auto& change) {
    engine::StartBatchCommand command;
    MemberFiller().Fill(command);
    change(&command);
    return Refused(command);
  };
  for (const int64_t tokens : {int64_t{0}, int64_t{-1}, int64_t{3}, std::numeric_limits<int64_t>::max()}) {
    EXPECT_THAT(batch([&](auto* command) { command->chunks[1].tokens = tokens; }),
                HasSubstr("command.StartBatch.chunks[1] has no tokens, or more or fewer labels"));
  }
  // Times 8 it is 0, as long as its labels.
  EXPECT_THAT(batch([](auto* command) { command->chunks = {{.tokens = int64_t{1} << 61}}; }),
              HasSubstr("chunks[0] has no tokens"));
  EXPECT_THAT(batch([](auto* command) { command->chunks[0].labels.pop_back(); }),
              HasSubstr("chunks[0] has no tokens"));
  for (std::string engine::ChunkHeader::*const array :
       {&engine::ChunkHeader::token_weights, &engine::ChunkHeader::lse_gradients,
        &engine::ChunkHeader::entropy_gradients}) {
    EXPECT_THAT(batch([&](auto* command) { (command->chunks[0].*array).pop_back(); }),
                HasSubstr("chunks[0] has an array of more or fewer"));
  }
  EXPECT_THAT(batch([](auto* command) { command->kind.holder = -1; }),
              HasSubstr("command.StartBatch.kind has a holder below 0"));
  EXPECT_THAT(batch([](auto* command) { command->teacher = 0; }), HasSubstr("says of a teacher how it is"));

  EXPECT_THAT(Refused(engine::ReadRowsCommand{.first_row = -1}),
              HasSubstr("command.ReadRows has a first_row or rows"));
  EXPECT_THAT(Refused(engine::ReadRowsCommand{.rows = -1}), HasSubstr("has a first_row or rows"));
  EXPECT_THAT(Refused(engine::WriteRowsCommand{.first_row = -1}), HasSubstr("has a first_row or rows"));
  EXPECT_THAT(Refused(engine::WriteRowsCommand{.rows = -1}), HasSubstr("has a first_row or rows"));
  EXPECT_THAT(Refused(engine::LogitsCommand{.rows = 0}), HasSubstr("has no rows"));
  EXPECT_THAT(Refused(engine::LogitsCommand{.rows = 1, .top_k = -1}), HasSubstr("a top_k below 0"));
  for (const double decay : {1.0, -0.5, std::nan("")}) {
    EXPECT_THAT(Refused(engine::BlendWeightsCommand{1, 2, decay}),
                HasSubstr("has a decay that is not in [0, 1)"));
  }
  for (const engine::ReplicaPlace& place : {engine::ReplicaPlace{3, 3}, {-1, 3}, {0, 0}}) {
    EXPECT_THAT(Refused(engine::CreateHeadCommand{1, {}, place}),
                HasSubstr("replica is none of its replicas"));
    EXPECT_THAT(Refused(engine::ConnectReplicasCommand{1, {.place = place}}),
                HasSubstr("network.place is none of"));
  }
  engine::HeadConfig config{"lm_head", 3, 1};
  config.class_weights = std::make_shared<const std::vector<float>>(2, 1.0f);
  EXPECT_THAT(Refused(engine::CreateGradientCommand{1, config}), HasSubstr("more or fewer class_weights"));
}

TEST(GroupWire, AReportOfMemoryThatNoProcessHasIsRefused) {
  engine::RankReport report;
  report.memory.heads["a"] = {{"weights", 1}, {"gradient", 2, engine::MemoryPlace::kRank}};
  EXPECT_THAT(std::string(ParseReport(SerializeReport(report)).status().message()),
              HasSubstr("report.memory.heads[0].value[1] is at a place that no process has"));
}

TEST(GroupWire, BytesOfSomethingElseAreRefused) {
  for (const char* bytes : {"", "\xFF\xFF\xFF", "PRI * HTTP/2.0", "\x82\x18\x18\x81\x01", "\x82\x20\x80"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseCommand(bytes).status())) << bytes;
    EXPECT_TRUE(absl::IsInvalidArgument(ParseAnswer(bytes).status())) << bytes;
    EXPECT_TRUE(absl::IsInvalidArgument(ParseReport(bytes).status())) << bytes;
  }
}

}  // namespace lossd::rpc::group_wire_test
