// The control of a group over a real socket: who may join, commands, replies, rendezvous, the end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <map>

#include "absl/strings/str_cat.h"
#include "server/rpc/transport/file_descriptor.h"
#include "tests/support/wait.h"
#include "tests/unit/rpc/group_ranks.h"

namespace lossd::rpc::group_control_test {
namespace {

using kernels::collectives::Code;
using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::FakeExecutor;
using testing::GroupUnderTest;
using ::testing::HasSubstr;
using testing::Large;
using testing::NumberOf;
using testing::Question;
using testing::RunningMember;
using testing::Taking;
using testing::Told;

// A group that is whole and runs.
class Whole {
 public:
  Whole(GroupUnderTest& group, std::vector<FakeExecutor*> executors) : leader_(group.Lead()) {
    for (size_t i = 0; i < executors.size(); ++i) {
      members_.push_back(
          std::make_unique<RunningMember>(group.Join(static_cast<int32_t>(i) + 1), executors[i]));
    }
    EXPECT_EQ(leader_->AwaitRanks(absl::Minutes(5)), absl::OkStatus());
  }

  std::unique_ptr<engine::RankChannel> Channel() { return leader_->Channel(); }
  absl::Status Await(int32_t rank) { return members_[static_cast<size_t>(rank) - 1]->Await(); }
  // In order, and until every rank has heard it.
  void End() {
    leader_->End();
    for (auto& member : members_) EXPECT_EQ(member->Await(), absl::OkStatus());
  }

 private:
  std::unique_ptr<GroupLeader> leader_;
  std::vector<std::unique_ptr<RunningMember>> members_;
};

TEST(GroupControl, EveryRankExecutesTheCommandsOfAllThreadsInOneOrder) {
  constexpr uint64_t kEach = 200;
  GroupUnderTest group(3);
  FakeExecutor one;
  FakeExecutor two;
  Whole whole(group, {&one, &two});
  const std::shared_ptr<engine::RankChannel> channel = whole.Channel();
  std::vector<std::thread> threads;
  for (uint64_t thread = 1; thread <= 4; ++thread) {
    threads.emplace_back([&channel, thread] {
      for (uint64_t i = 0; i < kEach; ++i) channel->Send(Told(thread * 1000 + i));
      EXPECT_EQ(channel->Ask(Question(thread * 1000 + kEach)), absl::OkStatus());
    });
  }
  for (std::thread& thread : threads) thread.join();
  whole.End();
  const std::vector<uint64_t> order = one.executed();
  EXPECT_EQ(order, two.executed());
  ASSERT_EQ(order.size(), 4 * (kEach + 1));
  std::map<uint64_t, uint64_t> next;
  for (const uint64_t number : order) EXPECT_EQ(number % 1000, next[number / 1000]++) << number;
}

TEST(GroupControl, AReplyIsTheFirstErrorInTheOrderOfTheRanksWithAllThatItSays) {
  GroupUnderTest group(3);
  FakeExecutor one([](const engine::GroupCommand& command) {
    return NumberOf(command) == 1 ? absl::ResourceExhaustedError("too little here") : absl::OkStatus();
  });
  FakeExecutor two([](const engine::GroupCommand& command) {
    absl::Status status = NumberOf(command) == 3 ? absl::OkStatus() : absl::InvalidArgumentError("not this");
    if (!status.ok()) status.SetPayload("kind", absl::Cord("fact"));
    return status;
  });
  Whole whole(group, {&one, &two});
  const auto channel = whole.Channel();
  const absl::Status first = channel->Ask(Question(1));
  EXPECT_EQ(first, absl::ResourceExhaustedError("rank 1: too little here"));
  const absl::Status second = channel->Ask(Question(2));
  EXPECT_EQ(second.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(second.message(), "rank 2: not this");
  EXPECT_EQ(second.GetPayload("kind"), absl::Cord("fact"));
  EXPECT_EQ(channel->Ask(Question(3)), absl::OkStatus()) << "an error that is a reply changes nothing";
  whole.End();
}

TEST(GroupControl, ACommandMayBeLarge) {
  constexpr size_t kBytes = size_t{24} << 20;
  GroupUnderTest group(2);
  std::atomic<size_t> arrived = 0;
  FakeExecutor one([&arrived](const engine::GroupCommand& command) {
    if (const auto* write = std::get_if<engine::WriteRowsCommand>(&command)) arrived += write->tensor.size();
    return absl::OkStatus();
  });
  Whole whole(group, {&one});
  const auto channel = whole.Channel();
  for (uint64_t i = 0; i < 3; ++i) channel->Send(Large(i, kBytes));
  EXPECT_EQ(channel->Ask(Question(3)), absl::OkStatus());
  EXPECT_EQ(arrived, 3 * kBytes);
  whole.End();
}

TEST(GroupControl, SendDoesNotWaitForARankThatExecutes) {
  GroupUnderTest group(2);
  std::promise<void> let_go;
  const std::shared_future<void> gate = let_go.get_future().share();
  FakeExecutor one([&gate](const engine::GroupCommand& /*command*/) {
    lossd::testing::Await("the test to let go", gate);
    return absl::OkStatus();
  });
  Whole whole(group, {&one});
  const auto channel = whole.Channel();
  for (uint64_t i = 0; i < 64; ++i) channel->Send(Large(i, size_t{1} << 20));
  let_go.set_value();  // it would not come to this
  EXPECT_EQ(channel->Ask(Question(64)), absl::OkStatus());
  whole.End();
  EXPECT_EQ(one.executed().size(), 65);
}

TEST(GroupControl, ABatchCountsAsAppliedWhenTheLastRankHasExecutedIt) {
  GroupUnderTest group(3);
  std::promise<void> let_go;
  std::shared_future<void> may_go = let_go.get_future().share();
  FakeExecutor fast;
  FakeExecutor slow([&may_go](const engine::GroupCommand& command) {
    if (std::holds_alternative<engine::StartBatchCommand>(command)) {
      lossd::testing::Await("the test to let go", may_go);
    }
    return absl::OkStatus();
  });
  Whole whole(group, {&fast, &slow});
  const auto channel = whole.Channel();
  EXPECT_EQ(channel->BatchesApplied(), 0u);
  engine::StartBatchCommand batch;
  batch.head = 1;
  for (int i = 0; i < 3; ++i) channel->Send(batch);
  channel->Send(Told(2));  // no batch
  lossd::testing::Await("four commands", [&] { return fast.executed().size() >= 4; });
  EXPECT_EQ(channel->BatchesApplied(), 0u) << "one rank has not applied any";
  let_go.set_value();
  lossd::testing::Await("three batches", [&] { return channel->BatchesApplied() >= 3; });
  EXPECT_EQ(channel->Ask(Question(3)), absl::OkStatus());
  EXPECT_EQ(channel->BatchesApplied(), 3u);
  whole.End();
}

engine::StartBatchCommand BatchHeldBy(int32_t holder, const engine::WantedReturns& returns = {}) {
  engine::StartBatchCommand batch{.head = 1, .teacher = 0, .gradient = 0, .kind = {}, .chunks = {}};
  batch.kind.holder = holder;
  batch.kind.returns = returns;
  batch.chunks.push_back({.tokens = 2, .labels = std::string(16, 'l')});
  return batch;
}

TEST(GroupControl, AnAnswerOfTheRankThatHoldsABatchComesBeforeTheBatchIsApplied) {
  GroupUnderTest group(3);
  engine::AnsweredChunk answer{.batch = 2, .chunk = 0, .losses = "lossloss", .returns = {}};
  answer.returns.entropies = std::string("ent\0opy\xff", 8);
  answer.returns.top_tokens = std::string(2 * 3 * 4, 't');
  answer.returns.top_log_probabilities = std::string(2 * 3 * 4, 'p');
  FakeExecutor one;
  FakeExecutor* holder = nullptr;
  FakeExecutor two([&](const engine::GroupCommand& command) {
    const auto* batch = std::get_if<engine::StartBatchCommand>(&command);
    if (batch != nullptr && batch->kind.holder == 2) holder->Answer(answer);
    return absl::OkStatus();
  });
  holder = &two;
  Whole whole(group, {&one, &two});
  const auto channel = whole.Channel();
  channel->Send(BatchHeldBy(0));
  channel->Send(BatchHeldBy(2, {.entropy = true, .top_k = 3}));
  lossd::testing::Await("two batches", [&] { return channel->BatchesApplied() >= 2; });
  const std::vector<engine::AnsweredChunk> answered = channel->TakeAnswered();
  ASSERT_EQ(answered.size(), 1u);
  EXPECT_EQ(answered[0].batch, 2u);
  EXPECT_EQ(answered[0].chunk, 0u);
  EXPECT_EQ(answered[0].losses, answer.losses);
  EXPECT_EQ(answered[0].returns.entropies, answer.returns.entropies);
  EXPECT_EQ(answered[0].returns.top_tokens, answer.returns.top_tokens);
  EXPECT_EQ(answered[0].returns.top_log_probabilities, answer.returns.top_log_probabilities);
  EXPECT_TRUE(channel->TakeAnswered().empty()) << "once";
  whole.End();
}

TEST(GroupControl, ARankThatDoesNotAnswerWhatItHoldsIsLost) {
  GroupUnderTest group(2);
  FakeExecutor one;
  auto leader = group.Lead();
  RunningMember member(group.Join(1), &one);
  ASSERT_EQ(leader->AwaitRanks(absl::Minutes(5)), absl::OkStatus());
  const auto channel = leader->Channel();
  channel->Send(BatchHeldBy(1));
  EXPECT_THAT(group.loss().Await(), HasSubstr("applied batch 1 without answering all of it"));
  EXPECT_EQ(channel->BatchesApplied(), 0u);
  EXPECT_EQ(channel->Ask(Question(1)).code(), absl::StatusCode::kUnavailable);
  leader.reset();
}

TEST(GroupControl, ARankThatAnswersAndThenDiesMovesNoMark) {
  GroupUnderTest group(2);
  FakeExecutor* holder = nullptr;
  FakeExecutor one([&holder](const engine::GroupCommand& /*command*/) {
    holder->Answer({.batch = 1, .chunk = 0, .losses = "lossloss", .returns = {}});
    return absl::InternalError("it breaks in dW");
  });
  holder = &one;
  auto leader = group.Lead();
  auto member = std::make_unique<RunningMember>(group.Join(1), &one);
  ASSERT_EQ(leader->AwaitRanks(absl::Minutes(5)), absl::OkStatus());
  const auto channel = leader->Channel();
  channel->Send(BatchHeldBy(1));
  EXPECT_EQ(member->Await().code(), absl::StatusCode::kInternal);
  member.reset();
  EXPECT_THAT(group.loss().Await(), HasSubstr("1: "));
  EXPECT_EQ(channel->BatchesApplied(), 0u);
  EXPECT_LE(channel->TakeAnswered().size(), 1u) << "whether it was heard or not";
}

TEST(GroupControl, WhatOneRankIsToldAloneComesInItsTurn) {
  GroupUnderTest group(3);
  FakeExecutor one;
  FakeExecutor two;
  Whole whole(group, {&one, &two});
  const auto channel = whole.Channel();
  channel->Send(Told(2));
  channel->SendTo(2, Told(4));
  channel->Send(Told(6));
  EXPECT_EQ(channel->Ask(Question(7)), absl::OkStatus());
  EXPECT_THAT(one.executed(), ElementsAre(2, 6, 7));
  EXPECT_THAT(two.executed(), ElementsAre(2, 4, 6, 7));
  whole.End();
  channel->SendTo(1, Told(8));  // to nobody
}

// Stops whoever takes memory until it is told to go on.
class Gate {
 public:
  FakeExecutor::Do Do() {
    return [this](const engine::GroupCommand& command) {
      if (engine::TakesMemory(command)) {
        most_at_once_ = std::max(most_at_once_.load(), ++at_once_);
        lossd::testing::Await("the gate to open", open_);
        --at_once_;
      }
      return absl::OkStatus();
    };
  }
  void Open() { opened_.set_value(); }
  int most_at_once() const { return most_at_once_; }

 private:
  std::promise<void> opened_;
  const std::shared_future<void> open_ = opened_.get_future().share();
  std::atomic<int> at_once_ = 0;
  std::atomic<int> most_at_once_ = 0;
};

void AwaitExecuted(FakeExecutor& executor, uint64_t number) {
  lossd::testing::Await("a command to be executed", [&] {
    const std::vector<uint64_t> executed = executor.executed();
    return std::find(executed.begin(), executed.end(), number) != executed.end();
  });
}

TEST(GroupControl, OtherCommandsGoOnWhileARankTakesMemory) {
  GroupUnderTest group(3);
  Gate gate;
  FakeExecutor one;
  FakeExecutor two(gate.Do());
  Whole whole(group, {&one, &two});
  const std::shared_ptr<engine::RankChannel> channel = whole.Channel();
  const auto ask = [&channel](uint64_t number) { return channel->Ask(Taking(number)); };
  auto first = std::async(std::launch::async, ask, 1);
  AwaitExecuted(two, 1);
  auto second = std::async(std::launch::async, ask, 2);
  AwaitExecuted(one, 2);
  channel->Send(Told(3));
  EXPECT_EQ(channel->Ask(Question(4)), absl::OkStatus());
  EXPECT_THAT(two.executed(), ElementsAre(1, 3, 4)) << "one at a time";
  gate.Open();
  EXPECT_EQ(first.get(), absl::OkStatus());
  EXPECT_EQ(second.get(), absl::OkStatus());
  EXPECT_THAT(two.executed(), ElementsAre(1, 3, 4, 2));
  EXPECT_EQ(gate.most_at_once(), 1);
  whole.End();
}

TEST(GroupControl, WhatInterruptsIsExecutedWhileAnotherCommandWaitsForIt) {
  GroupUnderTest group(2);
  std::promise<void> interrupted;
  FakeExecutor one([&interrupted](const engine::GroupCommand& command) {
    if (testing::NumberOf(command) == 1) lossd::testing::Await("the interruption", interrupted);
    if (engine::Interrupts(command)) interrupted.set_value();
    return absl::OkStatus();
  });
  Whole whole(group, {&one});
  const auto channel = whole.Channel();
  channel->Send(Told(1));
  channel->Send(Told(2));
  AwaitExecuted(one, 1);
  channel->Send(testing::Interrupting(3));
  EXPECT_EQ(channel->Ask(Question(4)), absl::OkStatus());
  EXPECT_THAT(one.executed(), ElementsAre(1, 3, 2, 4));
  whole.End();
}

TEST(GroupControl, WhatIsExecutedBesideOthersNeedNotBeRepliedTo) {
  GroupUnderTest group(2);
  std::promise<void> open;
  FakeExecutor one([&open](const engine::GroupCommand& command) {
    if (testing::NumberOf(command) == 1) lossd::testing::Await("the test to let go", open);
    return absl::OkStatus();
  });
  Whole whole(group, {&one});
  const auto channel = whole.Channel();
  channel->Send(testing::Beside(1));
  AwaitExecuted(one, 1);
  EXPECT_EQ(channel->Ask(Question(2)), absl::OkStatus());
  open.set_value();
  EXPECT_EQ(channel->Ask(Taking(3)), absl::OkStatus());
  EXPECT_THAT(one.executed(), ElementsAre(1, 2, 3));
  whole.End();
  EXPECT_EQ(group.loss().times(), 0);
}

TEST(GroupControl, MemoryIsTakenWhenAllCommandsBeforeAreDone) {
  GroupUnderTest group(2);
  std::atomic<bool> deleted = false;
  FakeExecutor one([&deleted](const engine::GroupCommand& command) {
    if (engine::TakesMemory(command)) {
      EXPECT_TRUE(deleted) << "what was deleted before may be what it needs";
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      deleted = true;
    }
    return absl::OkStatus();
  });
  Whole whole(group, {&one});
  const auto channel = whole.Channel();
  channel->Send(Told(1));
  EXPECT_EQ(channel->Ask(Taking(2)), absl::OkStatus());
  whole.End();
}

TEST(GroupControl, AGroupEndsInOrderWhileARankTakesMemory) {
  GroupUnderTest group(2);
  Gate gate;
  FakeExecutor one(gate.Do());
  Whole whole(group, {&one});
  const std::shared_ptr<engine::RankChannel> channel = whole.Channel();
  auto asked = std::async(std::launch::async, [&channel] { return channel->Ask(Taking(1)); });
  AwaitExecuted(one, 1);
  auto ended = std::async(std::launch::async, [&whole] { whole.End(); });
  EXPECT_EQ(asked.get().code(), absl::StatusCode::kUnavailable);
  gate.Open();
  ended.get();
  EXPECT_EQ(group.loss().times(), 0);
}

TEST(GroupControl, ARankThatCannotGoOnSaysSoWhileItTakesMemory) {
  GroupUnderTest group(2);
  Gate gate;
  FakeExecutor one([takes = gate.Do()](const engine::GroupCommand& command) {
    return engine::TakesMemory(command) ? takes(command) : absl::DataLossError("broken");
  });
  Whole whole(group, {&one});
  const std::shared_ptr<engine::RankChannel> channel = whole.Channel();
  auto asked = std::async(std::launch::async, [&channel] { return channel->Ask(Taking(1)); });
  AwaitExecuted(one, 1);
  channel->Send(Told(2));
  EXPECT_EQ(whole.Await(1), absl::DataLossError("broken"));
  gate.Open();
  EXPECT_TRUE(asked.get().ok());
}

// What the leader knows of a rank, once that is as `known` wants it.
engine::RankReport AwaitReport(const engine::RankChannel& channel, size_t rank,
                               const std::function<bool(const engine::RankReport&)>& known) {
  for (;;) {
    const engine::GroupReport group = channel.Report();
    if (known(group.ranks[rank])) return group.ranks[rank];
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

TEST(GroupControl, RanksReportAtOnceAndAgainWhenSomethingChanges) {
  GroupUnderTest group(3);
  engine::RankReport first;
  first.device = "cpu";
  first.memory_limit = 100;
  FakeExecutor one;
  one.set_report(first);
  FakeExecutor two;
  const auto leader = group.Lead();
  EXPECT_EQ(leader->AwaitReports(absl::Milliseconds(100)).code(), absl::StatusCode::kDeadlineExceeded);
  RunningMember member_one(group.Join(1), &one);
  RunningMember member_two(group.Join(2), &two);
  ASSERT_EQ(leader->AwaitReports(absl::Minutes(5)), absl::OkStatus());
  const auto channel = leader->Channel();
  const engine::GroupReport report = channel->Report();
  EXPECT_EQ(report.epoch, 7);
  ASSERT_EQ(report.ranks.size(), 3u);
  EXPECT_EQ(report.ranks[1].device, "cpu");
  EXPECT_EQ(report.ranks[1].memory_limit, 100);
  EXPECT_EQ(report.ranks[2].memory_limit, 0);
  first.memory_limit = 200;
  one.set_report(first);
  AwaitReport(*channel, 1, [](const auto& rank) { return rank.memory_limit == 200; });
  leader->End();
  EXPECT_EQ(member_one.Await(), absl::OkStatus());
  EXPECT_EQ(member_two.Await(), absl::OkStatus());
}

// Its heartbeats come, and so do its reports: that is how the others know.
TEST(GroupControl, ACommandThatARankDoesNotComeToIsToldWithItsAge) {
  GroupUnderTest group(2);
  std::promise<void> let_go;
  const std::shared_future<void> gate = let_go.get_future().share();
  FakeExecutor one([&gate](const engine::GroupCommand& /*command*/) {
    lossd::testing::Await("the test to let go", gate);
    return absl::OkStatus();
  });
  Whole whole(group, {&one});
  const auto channel = whole.Channel();
  channel->Send(Told(1));
  channel->Send(Large(2, 10));
  const auto waits = [](const engine::RankReport& rank) { return rank.activity.command == "WriteRows"; };
  const double before = AwaitReport(*channel, 1, waits).activity.command_seconds;
  AwaitReport(*channel, 1, [&](const auto& rank) {
    return waits(rank) && rank.activity.command_seconds > before;  // the first one that waits for its turn
  });
  let_go.set_value();
  AwaitReport(*channel, 1, [](const auto& rank) { return rank.activity.command.empty(); });
  whole.End();
}

TEST(GroupControl, TheEndComesBehindAllCommandsAndNothingBehindIt) {
  GroupUnderTest group(2);
  FakeExecutor one;
  Whole whole(group, {&one});
  const auto channel = whole.Channel();
  for (uint64_t i = 0; i < 5; ++i) channel->Send(Told(i));
  whole.End();
  channel->Send(Told(5));
  EXPECT_EQ(channel->Ask(Question(6)).code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(one.executed(), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_EQ(group.loss().times(), 0);
}

TEST(GroupControl, ARankMayComeBeforeItsLeader) {
  GroupUnderTest group(2);
  auto joining = std::async(std::launch::async, [&group] { return group.Join(1); });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const auto leader = group.Lead();
  EXPECT_EQ(leader->AwaitRanks(absl::Minutes(5)), absl::OkStatus());
  joining.get();
}

TEST(GroupControl, ARankWithoutALeaderSaysSo) {
  GroupUnderTest group(2);
  GroupMemberOptions options = group.MemberOptions(1);
  options.start_timeout = absl::Milliseconds(300);
  const auto member = GroupMember::Join(options);
  EXPECT_EQ(member.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(member.status().message()), AllOf(HasSubstr("rank 1"), HasSubstr(group.socket())));
}

TEST(GroupControl, RanksThatDoNotComeAreNamed) {
  GroupUnderTest group(4);
  const auto leader = group.Lead();
  const auto member = group.Join(2);
  const absl::Status missing = leader->AwaitRanks(absl::Milliseconds(200));
  EXPECT_EQ(missing.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("ranks 1, 3 of 4"));
}

TEST(GroupControl, WhoIsNotOfTheGroupIsRefusedAndChangesNothing) {
  GroupUnderTest group(3);
  const auto leader = group.Lead();
  const auto first = group.Join(1);
  struct Case {
    std::function<void(group::v1::Hello*)> change;
    grpc::StatusCode code;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases = {
      {[](auto* hello) { hello->set_epoch(6); }, grpc::StatusCode::FAILED_PRECONDITION, {"epoch 7", "has 6"}},
      {[](auto* hello) { hello->set_ranks(4); },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"ranks of 3", "has 4"}},
      {[](auto* hello) { hello->set_version("1.2.4"); },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"version 1.2.3", "has 1.2.4"}},
      {[](auto* hello) { hello->set_device_kind("cuda"); },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"cpu", "has cuda"}},
      {[](auto* hello) { (*hello->mutable_agreed())["rank_timeout"] = "20s"; },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"--rank_timeout=10s", "--rank_timeout=20s"}},
      {[](auto* hello) { hello->mutable_agreed()->clear(); },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"has --rank_timeout=10s", "no such flag: one is a rank"}},
      {[](auto* hello) { (*hello->mutable_agreed())["network"] = "eth0"; },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"has --network=eth0", "no such flag"}},
      {[](auto* hello) { hello->set_rank(1); }, grpc::StatusCode::ALREADY_EXISTS, {"is 1", "before"}},
      {[](auto* hello) { hello->set_rank(3); }, grpc::StatusCode::FAILED_PRECONDITION, {"is 3", "1 to 2"}},
      {[](auto* hello) { hello->set_rank(0); }, grpc::StatusCode::FAILED_PRECONDITION, {"is 0", "1 to 2"}},
      {[](auto* hello) { hello->set_rank(-1); }, grpc::StatusCode::FAILED_PRECONDITION, {"is -1", "1 to 2"}},
  };
  for (const Case& each : cases) {
    group::v1::MemberMessage message = group.Hello(2);
    each.change(message.mutable_hello());
    const grpc::Status refused = group.Refusal(message);
    EXPECT_EQ(refused.error_code(), each.code) << refused.error_message();
    for (const std::string& word : each.words) EXPECT_THAT(refused.error_message(), HasSubstr(word));
  }
  for (const char* const token : {"", "a secret of the grouq", "a secret of the group and more", "a"}) {
    const grpc::Status refused = group.Refusal(group.Hello(2), token);
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::PERMISSION_DENIED) << token;
    EXPECT_THAT(refused.error_message(), HasSubstr("token"));
  }
  group::v1::MemberMessage not_hello;
  not_hello.mutable_heartbeat();
  EXPECT_EQ(group.Refusal(not_hello).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  const auto second = group.Join(2);
  EXPECT_EQ(leader->AwaitRanks(absl::Minutes(5)), absl::OkStatus());
  EXPECT_EQ(group.loss().times(), 0);
}

TEST(GroupControl, ARefusedRankIsToldAtOnce) {
  GroupUnderTest group(2);
  const auto leader = group.Lead();
  GroupMemberOptions options = group.MemberOptions(1);
  options.credentials.token = "another";
  options.start_timeout = absl::InfiniteDuration();
  EXPECT_EQ(GroupMember::Join(options).status().code(), absl::StatusCode::kPermissionDenied);
}

FileDescriptor ConnectTo(const std::string& path) {
  FileDescriptor file(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  EXPECT_EQ(connect(file.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  return file;
}

TEST(GroupControl, StrangersOnTheSocketChangeNothing) {
  GroupUnderTest group(2);
  const auto leader = group.Lead();
  const std::string garbage(100'000, '\x17');
  const FileDescriptor silent = ConnectTo(group.socket());
  const FileDescriptor noisy = ConnectTo(group.socket());
  (void)!send(noisy.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  const auto stub = group.Stub();
  grpc::ClientContext context;
  ShowToken(group.credentials(), &context);
  const auto without_hello = stub->Join(&context);
  FakeExecutor one;
  RunningMember member(group.Join(1), &one);
  ASSERT_EQ(leader->AwaitRanks(absl::Minutes(5)), absl::OkStatus());
  (void)!send(noisy.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  EXPECT_EQ(leader->Channel()->Ask(Question(1)), absl::OkStatus());
  leader->End();
  EXPECT_EQ(member.Await(), absl::OkStatus());
  EXPECT_EQ(group.loss().times(), 0);
  context.TryCancel();
}

TEST(GroupControl, ARendezvousGivesEveryRankWhatAllGave) {
  GroupUnderTest group(3);
  const auto leader = group.Lead();
  const auto one = group.Join(1);
  const auto two = group.Join(2);
  const std::vector<kernels::collectives::Rendezvous*> ranks = {&leader->rendezvous(), &one->rendezvous(),
                                                                &two->rendezvous()};
  const auto meet = [&ranks](size_t rank) {
    std::vector<std::vector<std::string>> rounds(3);
    for (size_t round = 0; round < rounds.size(); ++round) {
      const auto met = ranks[rank]->AllGather(absl::StrCat(rank, std::string(1, '\0'), round),
                                              std::chrono::minutes(5), &rounds[round]);
      EXPECT_TRUE(met.ok()) << met.message();
    }
    return rounds;
  };
  auto first = std::async(std::launch::async, meet, 1);
  auto second = std::async(std::launch::async, meet, 2);
  const auto own = meet(0);
  EXPECT_EQ(own, first.get());
  EXPECT_EQ(own, second.get());
  for (size_t round = 0; round < own.size(); ++round) {
    const auto said = [round](int rank) { return absl::StrCat(rank, std::string(1, '\0'), round); };
    EXPECT_THAT(own[round], ElementsAre(said(0), said(1), said(2)));
  }
}

TEST(GroupControl, ARendezvousThatNobodyElseComesToNamesWhoIsMissing) {
  GroupUnderTest group(3);
  const auto leader = group.Lead();
  const auto one = group.Join(1);
  const auto two = group.Join(2);
  std::vector<std::string> all;
  const auto alone = one->rendezvous().AllGather("1", std::chrono::milliseconds(300), &all);
  EXPECT_EQ(alone.code(), Code::kTimeout);
  EXPECT_THAT(alone.message(), HasSubstr("ranks 0, 2"));
  const auto two_of_three = leader->rendezvous().AllGather("0", std::chrono::milliseconds(300), &all);
  EXPECT_EQ(two_of_three.code(), Code::kTimeout);
  EXPECT_THAT(two_of_three.message(), HasSubstr("rank 2"));
}

TEST(GroupControl, WhoTheLeaderWaitsForInARendezvousIsKnown) {
  GroupUnderTest group(3);
  const auto leader = group.Lead();
  const auto one = group.Join(1);
  const auto two = group.Join(2);
  EXPECT_TRUE(leader->Awaited().ranks.empty());
  const auto meet = [](kernels::collectives::Rendezvous& rendezvous) {
    std::vector<std::string> all;
    EXPECT_TRUE(rendezvous.AllGather("", std::chrono::minutes(5), &all).ok());
  };
  auto first = std::async(std::launch::async, [&] { meet(leader->rendezvous()); });
  auto second = std::async(std::launch::async, [&] { meet(one->rendezvous()); });
  lossd::testing::Await("rank 2 alone to be awaited",
                        [&] { return leader->Awaited().ranks == std::vector<int32_t>{2}; });
  const absl::Duration before = leader->Awaited().time;
  EXPECT_GT(leader->Awaited().time, before);
  meet(two->rendezvous());
  first.get();
  second.get();
  EXPECT_TRUE(leader->Awaited().ranks.empty());
}

// One call of each at a time has a thread; who is at the door has another.
TEST(GroupControl, AsManyRanksJoinAsAnySetHas) {
  constexpr int32_t kRanks = 1024;
  GroupUnderTest group(kRanks);
  const auto leader = group.Lead();
  struct Joined {
    std::unique_ptr<group::v1::GroupService::Stub> stub;
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<group::v1::MemberMessage, group::v1::LeaderMessage>> stream;
  };
  std::vector<std::unique_ptr<Joined>> joined;
  for (int32_t rank = 1; rank < kRanks; ++rank) {
    Joined& one = *joined.emplace_back(std::make_unique<Joined>());
    one.stub = group.Stub();
    ShowToken(group.credentials(), &one.context);
    one.stream = one.stub->Join(&one.context);
    group::v1::LeaderMessage welcome;
    ASSERT_TRUE(one.stream->Write(group.Hello(rank)) && one.stream->Read(&welcome)) << "rank " << rank;
  }
  EXPECT_EQ(leader->AwaitRanks(absl::Minutes(5)), absl::OkStatus());
  for (const auto& one : joined) one->context.TryCancel();
  for (const auto& one : joined) (void)one->stream->Finish();
}

}  // namespace
}  // namespace lossd::rpc::group_control_test
