// A rank whose leader says what makes no sense: it answers with an error, by which its process ends.
#include "server/engine/device/sharded/sharded_rank.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/device/cpu/cpu_backend.h"

namespace lossd::engine::sharded_rank_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();

// Without communicators, which nothing here may come to.
std::unique_ptr<ShardedRank> Rank() {
  return *ShardedRank::Create(*CreateCpuDevice(int64_t{1} << 20), {.rank = 1, .ranks = 2}, int64_t{1} << 30);
}

const HeadConfig kConfig{"h", 100, 4, kernels::DataType::kFloat32};

TEST(ShardedRank, TooLittleMemoryIsSaidWithTheControlGroupThatBoundsIt) {
  const absl::StatusOr<std::unique_ptr<ShardedRank>> rank = ShardedRank::Create(
      *CreateCpuDevice(int64_t{2} << 20), {.rank = 1, .ranks = 2}, int64_t{1} << 20, "control group /a");
  EXPECT_EQ(rank.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(rank.status().message()),
              AllOf(HasSubstr("raise the limit of the control group /a"), HasSubstr("--workspace_bytes")));
}

TEST(ShardedRank, KnowsOnlyWhatItWasToldToCreate) {
  const std::unique_ptr<ShardedRank> rank = Rank();
  ASSERT_EQ(rank->Execute(CreateHeadCommand{1, kConfig}), absl::OkStatus());
  const std::vector<GroupCommand> unknown_heads = {
      ReadRowsCommand{.head = 2},
      WriteRowsCommand{.head = 2},
      RestoreStateCommand{.head = 2},
      ResetCommand{.head = 2},
      FoldCommand{.head = 2},
      SummarizeCommand{.head = 2},
      ApplyStepCommand{2, 0, {}},
      SumSlicesCommand{.head = 2},
      AddToSumCommand{.head = 2},
      TallySumCommand{.head = 2},
      StepSlicesCommand{2, {}},
      GatherSlicesCommand{.head = 2},
      LogitsCommand{.head = 2, .rows = 1},
      PrepareTeacherCommand{.head = 2},
      PrepareTeacherCommand{.head = 1, .teacher = 2},
      StartBatchCommand{.head = 2, .teacher = 0, .gradient = 0, .kind = {}, .chunks = {}},
      StartBatchCommand{.head = 1, .teacher = 2, .gradient = 0, .kind = {}, .chunks = {}},
  };
  for (const GroupCommand& command : unknown_heads) {
    EXPECT_THAT(std::string(rank->Execute(command).message()), HasSubstr("head 2")) << command.index();
  }
  const std::vector<GroupCommand> unknown_gradients = {
      ReadRowsCommand{.head = 1, .what = HeadRows::kGradient, .gradient = 3},
      WriteRowsCommand{.head = 1, .gradient = 3},
      ResetCommand{1, 3},
      FoldCommand{1, 0, 3},
      FoldCommand{1, 3, 0},
      SummarizeCommand{1, 3},
      ApplyStepCommand{1, 3, {}},
      SumSlicesCommand{.head = 1, .gradient = 3},
      AddToSumCommand{.head = 1, .gradient = 3},
      StartBatchCommand{.head = 1, .teacher = 0, .gradient = 3, .kind = {}, .chunks = {}},
  };
  for (const GroupCommand& command : unknown_gradients) {
    EXPECT_THAT(std::string(rank->Execute(command).message()), HasSubstr("gradient 3")) << command.index();
  }
  EXPECT_EQ(rank->Execute(DeleteHeadCommand{2}), absl::OkStatus()) << "it may have been refused here";
  EXPECT_EQ(rank->Execute(DeleteGradientCommand{3}), absl::OkStatus());
}

TEST(ShardedRank, ThatNobodyCanReachIsNotConnectedWithOtherReplicas) {
  const std::unique_ptr<ShardedRank> rank = Rank();
  EXPECT_EQ(rank->Execute(AbortReplicasCommand{1}), absl::OkStatus()) << "it may have failed before";
  const absl::Status refused = rank->Execute(ConnectReplicasCommand{1, {.place = {0, 2}}});
  EXPECT_EQ(refused.code(), absl::StatusCode::kInternal) << refused;
}

TEST(ShardedRank, HoldsNoBatchWithoutItsPayloads) {
  const std::unique_ptr<ShardedRank> rank = Rank();
  ASSERT_EQ(rank->Execute(CreateHeadCommand{1, kConfig}), absl::OkStatus());
  const auto refusal = [&](int32_t holder, uint64_t payload) {
    StartBatchCommand batch{.head = 1, .teacher = 0, .gradient = 0, .kind = {}, .chunks = {}};
    batch.kind.holder = holder;
    batch.chunks.push_back({.tokens = 2, .labels = std::string(16, '\0'), .payload = payload});
    const absl::Status refused = rank->Execute(batch);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInternal) << refused;
    return std::string(refused.message());
  };
  EXPECT_THAT(refusal(2, 1), HasSubstr("rank 2"));
  EXPECT_THAT(refusal(1, 0), HasSubstr("payload 0"));
  EXPECT_THAT(refusal(1, 17), HasSubstr("payload 17"));
  const auto add = [&](const std::string& hidden_states, const std::string& teacher_hidden) {
    return rank->payloads()->Add(
        std::make_shared<RankPayload>(Payload::Of(hidden_states), Payload::Of(teacher_hidden)));
  };
  const std::string right(2 * 4 * 4, 'x');
  EXPECT_THAT(refusal(1, add("short", "")), HasSubstr("5 and 0 bytes"));
  EXPECT_THAT(refusal(1, add(right, "of no teacher")), HasSubstr("32 and 13 bytes"));
  const uint64_t released = add(right, "");
  ASSERT_EQ(rank->Execute(ReleasePayloadCommand{released}), absl::OkStatus());
  EXPECT_THAT(refusal(1, released), HasSubstr(absl::StrCat("payload ", released)));
  EXPECT_EQ(rank->Execute(ReleasePayloadCommand{released}), absl::OkStatus());
}

TEST(ShardedRank, HasNoRowsBeyondItsVocabulary) {
  const std::unique_ptr<ShardedRank> rank = Rank();
  ASSERT_EQ(rank->Execute(CreateHeadCommand{1, kConfig}), absl::OkStatus());
  const std::vector<std::pair<int64_t, int64_t>> ranges = {
      {-1, 1}, {0, -1}, {0, 101}, {100, 1}, {kLargest, 1}, {1, kLargest}, {kLargest, kLargest}};
  for (const auto& [first, rows] : ranges) {
    const ReadRowsCommand read{.head = 1, .first_row = first, .rows = rows};
    EXPECT_EQ(rank->Execute(read).code(), absl::StatusCode::kInternal) << first << " " << rows;
    const WriteRowsCommand written{.head = 1, .first_row = first, .rows = rows};
    EXPECT_EQ(rank->Execute(written).code(), absl::StatusCode::kInternal) << first << " " << rows;
  }
  const ReadRowsCommand unknown{.head = 1, .what = HeadRows::kState, .tensor = "nothing", .rows = 1};
  EXPECT_EQ(rank->Execute(unknown).code(), absl::StatusCode::kInvalidArgument);
}

TEST(ShardedRank, RefusesHeadsThatNoClientCouldHaveCreated) {
  const std::unique_ptr<ShardedRank> rank = Rank();
  for (const auto& [vocab, hidden] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 4}, {0, 4}, {-5, 4}, {kLargest, 4}, {100, 0}, {100, -1}, {100, kLargest}}) {
    const HeadConfig config{"h", vocab, hidden, kernels::DataType::kFloat32};
    EXPECT_EQ(rank->Execute(CreateHeadCommand{1, config}).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(rank->Execute(CreateGradientCommand{1, config}).code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace lossd::engine::sharded_rank_test
