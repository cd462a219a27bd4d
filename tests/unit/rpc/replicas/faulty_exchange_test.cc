// What replicas exchange hangs or fails at one of them: all meet again, and nobody has to be killed for it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "server/engine/common/monotonic_clock.h"
#include "tests/unit/engine/replicas/faulty_exchanges.h"
#include "tests/unit/rpc/replicas/set_under_test.h"

namespace lossd::rpc::faulty_exchange_test {
namespace {

using engine::StepRequest;
using engine::testing::ExchangeFaults;
using engine::testing::ReplicaServers;
using kernels::collectives::Code;
using kernels::collectives::Result;
using replica_set_test::SetUnderTest;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr StepRequest kStep = {.learning_rate = 1e-2};

void Pause() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

// Two replicas.
class FaultyExchangeTest : public ::testing::Test {
 protected:
  // An exchange of this replica's hangs until its connection is aborted.
  void Hang(int32_t replica) {
    faults(replica).Arm([this](const std::function<bool()>& aborted) {
      hanging_ = true;
      while (!aborted()) Pause();
      return Result(Code::kAborted, "aborted");
    });
  }
  // Once that one hangs, one of this replica's fails.
  void FailThen(int32_t replica) {
    faults(replica).Arm([this](const std::function<bool()>& /*aborted*/) {
      AwaitHanging();
      return Result(Code::kPeerLost, "as the test has it");
    });
  }
  void AwaitHanging() const {
    while (!hanging_) Pause();
  }
  absl::StatusOr<engine::StepResult> StepUntilAnswered() {
    return SetUnderTest::UntilAnswered(
        [this] { return set_.servers().BeginStep(1, set_.servers().Marks(), kStep); });
  }
  ExchangeFaults& faults(int32_t replica) { return faults_[static_cast<size_t>(replica)]; }

  std::atomic<bool> hanging_ = false;
  std::atomic<int32_t> failed_ = -1;  // whose process is to end
  std::array<ExchangeFaults, 2> faults_;
  SetUnderTest set_{engine::testing::SetSize{2},
                    ReplicaServers::AdamWHead(),
                    {},
                    {},
                    [this](int32_t replica, engine::EngineOptions& options) {
                      options.on_device_failure = [this, replica](const absl::Status& /*why*/) {
                        failed_ = replica;
                      };
                    },
                    [this](int32_t replica, std::unique_ptr<engine::Device> device) {
                      return CreateFaultyDevice(std::move(device), &faults(replica));
                    }};
};

TEST_F(FaultyExchangeTest, WhatHangsIsAbortedWhenTheCoordinatorEndsTheEpoch) {
  set_.MeetAll();
  for (int32_t replica = 0; replica < 2; ++replica) set_.servers().at(replica).Compute(7, 3);
  Hang(1);
  FailThen(0);
  const absl::StatusOr<engine::StepResult> step = StepUntilAnswered();
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->window_tokens, 6U);
  EXPECT_EQ(set_.servers().at(1).engine().replicas().Read().epochs, 2U);
}

TEST_F(FaultyExchangeTest, WhoIsMissingIsNamedBeforeWhatHangsHasEnded) {
  set_.MeetAll();
  std::atomic<bool> released = false;
  faults(0).Arm([&](const std::function<bool()>& /*aborted*/) {
    hanging_ = true;
    while (!released) Pause();
    return Result(Code::kAborted, "aborted");
  });
  set_.servers().at(0).Compute(7, 3);
  auto asked = set_.servers().BeginStep(1, set_.servers().Marks(), kStep);
  AwaitHanging();
  set_.Leave(1);
  const auto missing = [&] { return set_.set(0).FindPart(*set_.servers().at(0).head(), 1).status(); };
  while (missing().ok()) Pause();
  EXPECT_THAT(std::string(missing().message()), HasSubstr("replica 1"));
  EXPECT_FALSE(set_.set(0).Whole().ok());
  released = true;
  EXPECT_TRUE(absl::IsUnavailable(ReplicaServers::Answer(std::move(asked)).status()));
}

TEST_F(FaultyExchangeTest, WhoseDeviceHangsIsNamedWhileTheOthersWaitForIt) {
  set_.MeetAll();
  for (int32_t replica = 0; replica < 2; ++replica) set_.servers().at(replica).Compute(7, 3);
  faults(1).HangDevice();
  auto asked = set_.servers().BeginStep(1, set_.servers().Marks(), kStep);
  const auto look = [this](absl::Duration later) {
    return set_.servers().at(0).engine().replicas().Read(engine::MonotonicNow() + later);
  };
  constexpr auto kSeal = static_cast<size_t>(engine::ReplicaPhase::kSeal);
  // Until the first one has sealed its window, it may be that one as well.
  while (look(absl::Minutes(10)).replicas[1].late_seconds[kSeal] == 0) Pause();
  const engine::ReplicaReport report = look(absl::Minutes(10));
  EXPECT_TRUE(report.whole.ok());
  EXPECT_THAT(report.WhyNot(), StartsWith("replica 1 has not answered a seal for 6"));
  EXPECT_GT(report.replicas[1].late_seconds[kSeal], 500);
  EXPECT_GT(report.replicas[1].late[kSeal].sum(), 500);
  EXPECT_EQ(report.replicas[0].late_seconds[kSeal], 0);
  faults(1).GoOn();
  const absl::StatusOr<engine::StepResult> step = ReplicaServers::Answer(std::move(asked));
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(look(absl::Minutes(10)).WhyNot(), "");
}

TEST_F(FaultyExchangeTest, AllAreNamedWhoseExchangeHangs) {
  set_.MeetAll();
  for (int32_t replica = 0; replica < 2; ++replica) set_.servers().at(replica).Compute(7, 3);
  Hang(1);
  auto asked = set_.servers().BeginStep(1, set_.servers().Marks(), kStep);
  AwaitHanging();
  const engine::ReplicaWatch& watch = set_.servers().at(0).engine().replicas();
  EXPECT_THAT(watch.Read(engine::MonotonicNow() + absl::Minutes(10)).WhyNot(),
              StartsWith("replicas 0, 1 have not answered a sum for 6"));
  set_.MeetAgain();
  EXPECT_TRUE(absl::IsUnavailable(ReplicaServers::Answer(std::move(asked)).status()));
  EXPECT_EQ(watch.Read(engine::MonotonicNow() + absl::Minutes(10)).WhyNot(), "");
}

TEST_F(FaultyExchangeTest, ADeviceThatFailsInAnExchangeEndsItsServer) {
  set_.MeetAll();
  faults(1).Arm([](const std::function<bool()>& /*aborted*/) {
    return Result(Code::kDeviceFailed, "an illegal address");
  });
  set_.servers().at(0).Compute(7, 3);
  const absl::Status step = set_.servers().Step(1, set_.servers().Marks(), kStep).status();
  EXPECT_FALSE(step.ok());
  while (failed_ != 1) Pause();  // the other one may notice the loss before
}

TEST_F(FaultyExchangeTest, AReplicaThatIsLostEndsNoServer) {
  set_.MeetAll();
  faults(1).Arm([](const std::function<bool()>& /*aborted*/) { return Result(Code::kPeerLost, "lost"); });
  set_.servers().at(0).Compute(7, 3);
  EXPECT_TRUE(StepUntilAnswered().ok());
  EXPECT_EQ(failed_, -1);
}

TEST_F(FaultyExchangeTest, ADeviceThatCannotBeConnectedEndsItsServer) {
  faults(1).RefuseToConnect(absl::InternalError("an illegal address"));
  set_.Meet(0);
  set_.Meet(1);
  while (failed_ != 1) Pause();
}

}  // namespace
}  // namespace lossd::rpc::faulty_exchange_test
