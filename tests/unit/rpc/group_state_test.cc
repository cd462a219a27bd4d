// The leader's state of a group, without gRPC: threads that all use it at once.
#include "server/rpc/group/group_state.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/rpc/group/group_timing.h"
#include "server/rpc/group/group_wire.h"
#include "server/rpc/group/message_queue.h"
#include "tests/support/wait.h"
#include "tests/unit/rpc/group_ranks.h"

namespace lossd::rpc::group_state_test {
namespace {

using group::v1::LeaderMessage;
using testing::Question;
using testing::Told;

// A rank that answers each command (nobody waits for some of them), in a thread of its own.
class FakeRank final : public RankStream {
 public:
  FakeRank(std::shared_ptr<GroupState> state, int32_t rank)
      : state_(std::move(state)), rank_(rank), thread_([this] { Answer(); }) {}
  ~FakeRank() override {
    Close();
    thread_.join();
  }

  void Write(std::shared_ptr<const LeaderMessage> message) override ABSL_LOCKS_EXCLUDED(mutex_) {
    const engine::MutexLock lock(mutex_);
    if (message->has_command()) last_ = message->command().number();
    changed_.NotifyAll();
  }
  void Cancel() override {}
  bool IsStuck() override { return false; }
  void Close() override ABSL_LOCKS_EXCLUDED(mutex_) {
    const engine::MutexLock lock(mutex_);
    closed_ = true;
    changed_.NotifyAll();
  }

 private:
  void Answer() {
    for (uint64_t next = 1; Await(next); ++next) {
      group::v1::MemberMessage message;
      message.mutable_reply()->set_number(next);
      state_->Take(rank_, message).IgnoreError();
    }
  }
  // False: there will be no such command.
  bool Await(uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_) {
    const engine::MutexLock lock(mutex_);
    while (!closed_ && last_ < number) changed_.Wait(mutex_);
    return last_ >= number;
  }

  const std::shared_ptr<GroupState> state_;
  const int32_t rank_;
  engine::Mutex mutex_;
  engine::CondVar changed_;
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

group::v1::Hello HelloOf(int32_t rank) {
  group::v1::Hello hello;

  hello.set_epoch(1);
  hello.set_rank(rank);
  hello.set_ranks(3);
  return hello;
}

TEST(GroupState, AnswersAllThreadsUntilARankIsLostAndThenNone) {
  testing::Loss loss;
  auto state = std::make_shared<GroupState>(
      GroupIdentity{.epoch = 1, .ranks = 3, .version = {}, .device_kind = {}}, absl::InfiniteDuration(),
      [&loss](int32_t rank, const std::string& why) { loss.Tell(rank, why); });
  std::vector<std::shared_ptr<FakeRank>> ranks;
  for (int32_t rank = 1; rank < 3; ++rank) {
    ranks.push_back(std::make_shared<FakeRank>(state, rank));
    ASSERT_TRUE(state->Join(HelloOf(rank), ranks.back()).ok());
  }
  ASSERT_TRUE(state->AwaitRanks(absl::InfiniteDuration()).ok());
  std::atomic<int> answered = 0;
  std::atomic<bool> over = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&state, &answered] {
      for (uint64_t number = 0;; ++number) {
        state->Send(Told(number));
        if (!state->Ask(Question(number)).ok()) return;
        ++answered;
      }
    });
  }
  threads.emplace_back([&state, &over] {
    while (!over) state->Beat();
  });
  lossd::testing::Await("200 answers", [&] { return answered >= 200; });
  state->Leave(2, "it had enough");
  EXPECT_EQ(loss.Await(), "2: it had enough");
  over = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(state->End()) << "it was not whole";
  state->Leave(1, "it is alone");
  EXPECT_EQ(loss.times(), 1);
}

// Takes everything and says nothing.
class SilentRank final : public RankStream {
 public:
  void Write(std::shared_ptr<const LeaderMessage> /*message*/) override {}
  void Close() override {}
  void Cancel() override {}
  bool IsStuck() override { return false; }
};

std::string AnyAnswer(std::mt19937_64& random, uint64_t batch) {
  engine::AnsweredChunk answer{.batch = batch, .chunk = 0, .losses = {}, .returns = {}};
  answer.chunk = static_cast<uint32_t>(random() % 2);
  answer.losses = std::string(4 * (random() % 2), 'l');
  if (random() % 8 == 0) answer.returns.entropies = "more";
  std::string bytes = SerializeAnswer(answer);
  if (random() % 8 == 0) bytes.pop_back();
  return bytes;
}

// Whatever a member may say, and much that it may not.
group::v1::MemberMessage AnyMessage(std::mt19937_64& random) {
  const auto number = [&random]() -> uint64_t { return random() % 4 == 0 ? random() : random() % 4; };
  group::v1::MemberMessage message;
  switch (random() % 8) {
    case 0:
      *message.mutable_hello() = HelloOf(static_cast<int32_t>(number()));
      break;
    case 1:
      message.mutable_offer()->set_round(static_cast<int64_t>(number()));
      message.mutable_offer()->set_data(std::string(number() % 100, 'x'));
      break;
    case 2:
      message.mutable_reply()->set_number(number());
      message.mutable_reply()->set_code(static_cast<int32_t>(number()));
      (*message.mutable_reply()->mutable_payloads())["kind"] = std::string(number() % 100, 'y');
      break;
    case 3:
      message.mutable_applied();
      break;
    case 4:
      message.mutable_heartbeat();
      break;
    case 5:
      message.set_answered(AnyAnswer(random, number()));
      break;
    case 6:
      message.mutable_drain();
      break;
    default:
      break;
  }
  return message;
}

TEST(GroupState, NoMessagesMoveMarksAnswerTwiceOrLeaveTheLeaderWaiting) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    std::mt19937_64 random(seed);
    GroupState state(GroupIdentity{.epoch = 1, .ranks = 3, .version = {}, .device_kind = {}},
                     absl::InfiniteDuration(), nullptr);
    for (int32_t rank = 1; rank < 3; ++rank) {
      ASSERT_TRUE(state.Join(HelloOf(rank), std::make_shared<SilentRank>()).ok());
    }
    const auto started = static_cast<uint64_t>(random() % 3);
    size_t held = 0;  // batches, by others than the leader
    for (uint64_t i = 0; i < started; ++i) {
      engine::StartBatchCommand batch{.head = 1, .teacher = 0, .gradient = 0, .kind = {}, .chunks = {}};
      batch.kind.holder = static_cast<int32_t>(random() % 3);
      batch.chunks.push_back({.tokens = 1, .labels = "12345678"});
      if (batch.kind.holder > 0) ++held;
      state.Send(batch);
    }
    std::vector<bool> there = {false, true, true};
    for (int i = 0; i < 40; ++i) {
      const auto rank = static_cast<int32_t>(1 + random() % 2);
      EXPECT_FALSE(
          state.Join(HelloOf(static_cast<int32_t>(random() % 5) - 1), std::make_shared<SilentRank>()).ok());
      if (!there[static_cast<size_t>(rank)]) continue;
      const absl::Status taken = state.Take(rank, AnyMessage(random));
      if (taken.ok()) continue;
      state.Leave(rank, std::string(taken.message()));
      there[static_cast<size_t>(rank)] = false;
    }
    EXPECT_LE(state.batches_applied(), started);
    const std::vector<engine::AnsweredChunk> answered = state.TakeAnswered();
    EXPECT_LE(answered.size(), held) << "each once";
    for (const engine::AnsweredChunk& chunk : answered) {
      EXPECT_TRUE(chunk.batch >= 1 && chunk.batch <= started && chunk.chunk == 0);
      EXPECT_EQ(chunk.losses.size(), 4u);
      EXPECT_EQ(chunk.returns.bytes(), 0);
    }
    if (there[1] && there[2]) state.Leave(1, "enough");
    EXPECT_EQ(state.Ask(Question(1)).code(), absl::StatusCode::kUnavailable);
    std::vector<std::string> all;
    EXPECT_EQ(state.AllGather("", std::chrono::hours(1), &all).code(), kernels::collectives::Code::kPeerLost);
  }
}

TEST(GroupState, WhatComesLateChangesNothing) {
  int drains = 0;
  GroupState state(GroupIdentity{.epoch = 1, .ranks = 3, .version = {}, .device_kind = {}},
                   absl::InfiniteDuration(), nullptr, [&drains](int32_t /*rank*/) { ++drains; });
  for (int32_t rank = 1; rank < 3; ++rank) {
    ASSERT_TRUE(state.Join(HelloOf(rank), std::make_shared<SilentRank>()).ok());
  }
  state.Send(engine::StartBatchCommand{.head = 1, .teacher = 0, .gradient = 0, .kind = {}, .chunks = {}});
  group::v1::MemberMessage applied;
  applied.mutable_applied();
  ASSERT_TRUE(state.Take(2, applied).ok());
  state.Leave(2, "it had enough");
  EXPECT_TRUE(state.Take(1, applied).ok());
  EXPECT_EQ(state.batches_applied(), 0) << "nobody may take the batch for done";
  group::v1::MemberMessage report;
  engine::RankReport late;
  late.device = "late";
  report.set_report(SerializeReport(late));
  EXPECT_TRUE(state.Take(1, report).ok());
  EXPECT_EQ(state.Report().ranks[1].device, "");
  group::v1::MemberMessage drain;
  drain.mutable_drain();
  EXPECT_TRUE(state.Take(1, drain).ok());
  EXPECT_EQ(drains, 0);
  EXPECT_EQ(state.Join(HelloOf(2), std::make_shared<SilentRank>()).code(), absl::StatusCode::kUnavailable)
      << "so that it comes again, to the next epoch";
}

// Rank 1 of two lives, and answers what the test has it answer.
class AskedRank {
 public:
  void Ask(const std::string& command, Answers answers) {
    state_.AskRank(1, command, "", answers, [this, command](const absl::Status& lost, const auto& data) {
      told_[command] = lost.ok() ? data.status() : lost;
    });
  }
  void Answer(uint64_t number) {
    group::v1::MemberMessage message;
    message.mutable_reply()->set_number(number);
    EXPECT_EQ(state_.Take(1, message), absl::OkStatus());
  }
  void LiveFor(absl::Duration time) {
    group::v1::MemberMessage heartbeat;
    heartbeat.mutable_heartbeat();
    for (; time > absl::ZeroDuration(); time -= HeartbeatInterval(kTimeout)) {
      EXPECT_EQ(state_.Take(1, heartbeat), absl::OkStatus());
      state_.Beat();
    }
  }
  // What each command came to so far.
  const std::map<std::string, absl::Status>& told() const { return told_; }
  const std::vector<std::string>& late() const { return late_; }
  const std::string& lost() const { return lost_; }

  static constexpr absl::Duration kTimeout = absl::Seconds(10);

 private:
  std::map<std::string, absl::Status> told_;
  std::vector<std::string> late_;
  std::string lost_;
  GroupState state_{
      GroupIdentity{.epoch = 1, .ranks = 2, .version = {}, .device_kind = {}, .member = "replica"}, kTimeout,
      [this](int32_t rank, const std::string& why) { lost_ = absl::StrCat(rank, ": ", why); }, nullptr,
      [this](int32_t rank, const std::string& command, absl::Duration age) {
        late_.push_back(absl::StrCat(rank, ": ", command, " ", absl::FormatDuration(age)));
      }};
  const absl::Status joined_ = [this] {
    group::v1::Hello hello = HelloOf(1);
    hello.set_ranks(2);
    return state_.Join(hello, std::make_shared<SilentRank>());
  }();
};

TEST(GroupState, WhoLivesAndDoesNotAnswerWhatIsAnsweredSoonIsLost) {
  AskedRank rank;
  rank.LiveFor(absl::Minutes(10));
  rank.Ask("FindSession", Answers::kSoon);
  rank.LiveFor(absl::Minutes(4));
  EXPECT_EQ(rank.lost(), "");
  EXPECT_TRUE(rank.told().empty()) << "it may yet answer";
  rank.LiveFor(absl::Minutes(1));
  EXPECT_EQ(rank.lost(), "1: it did not answer FindSession for 5m");
  EXPECT_EQ(rank.told().at("FindSession"),
            absl::UnavailableError("replica 1 was lost: it did not answer FindSession for 5m"));
}

TEST(GroupState, WhatMayTakeLongIsNamedOnceAndWaitedFor) {
  AskedRank rank;
  rank.Ask("StepWindow", Answers::kWhenDone);
  rank.LiveFor(absl::Seconds(59));
  EXPECT_TRUE(rank.late().empty());
  rank.LiveFor(absl::Hours(1));
  EXPECT_EQ(rank.late(), std::vector<std::string>{"1: StepWindow 1m"});
  EXPECT_EQ(rank.lost(), "");
  rank.Answer(1);
  EXPECT_EQ(rank.told().at("StepWindow"), absl::OkStatus());
}

TEST(GroupState, WhoAnswersEachInTimeIsNotLost) {
  AskedRank rank;
  for (uint64_t number = 1; number <= 10; ++number) {
    rank.Ask("FindSession", Answers::kSoon);
    rank.LiveFor(absl::Minutes(4));
    rank.Answer(number);
  }
  EXPECT_EQ(rank.lost(), "");
}

TEST(MessageQueue, GivesOneMessageAtATime) {
  MessageQueue queue;
  const auto first = std::make_shared<group::v1::MemberMessage>();
  const auto second = std::make_shared<group::v1::MemberMessage>();
  EXPECT_EQ(queue.Push(first), first.get());
  EXPECT_EQ(queue.Push(second), nullptr) << "the first is being written";
  EXPECT_EQ(queue.Pop(), second.get());
  EXPECT_FALSE(queue.empty());
  EXPECT_EQ(queue.Pop(), nullptr);
  EXPECT_TRUE(queue.empty());
}

}  // namespace
}  // namespace lossd::rpc::group_state_test
