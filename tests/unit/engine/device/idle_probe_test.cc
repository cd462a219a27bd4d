#include "server/engine/device/sharded/idle_probe.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/engine/device/sharded/sharded_rank.h"
#include "tests/support/wait.h"

namespace lossd::engine::idle_probe_test {
namespace {

using testing::Await;

constexpr std::chrono::milliseconds kIdle{40};

// Ranks that are told and say nothing.
class CountingChannel final : public RankChannel {
 public:
  void Send(GroupCommand command) override {
    EXPECT_TRUE(std::holds_alternative<ProbeCommand>(command));
    ++probes_;
  }
  absl::Status Ask(GroupCommand /*command*/) override { return absl::OkStatus(); }
  void SendTo(int32_t /*rank*/, GroupCommand /*command*/) override { ADD_FAILURE() << "to one rank"; }
  std::vector<AnsweredChunk> TakeAnswered() override { return {}; }
  uint64_t BatchesApplied() const override { return 0; }
  GroupReport Report() const override { return {}; }

  int probes() const { return probes_; }

 private:
  std::atomic<int> probes_ = 0;
};

// A device whose round trips do what a test says, and that does nothing else.
class ProbedDevice final : public Device {
 public:
  explicit ProbedDevice(std::function<absl::Status()> round_trip) : round_trip_(std::move(round_trip)) {}

  std::string name() const override { return "probed"; }
  std::string description() const override { return "probed"; }
  int64_t AvailableMemory() const override { return 0; }
  absl::StatusOr<MemoryPlan> PlanMemory(const HeadConfig& /*config*/) const override {
    return absl::UnimplementedError("no heads");
  }
  absl::StatusOr<std::unique_ptr<HeadBackend>> CreateHead(const HeadConfig& /*config*/) override {
    return absl::UnimplementedError("no heads");
  }
  MemoryPlan SharedMemory() const override { return {}; }
  absl::Status RoundTrip() override { return round_trip_(); }

 private:
  const std::function<absl::Status()> round_trip_;
};

TEST(IdleProbe, EveryDeviceMakesRoundTripsWhileNobodyHasAnythingForIt) {
  std::atomic<int> trips = 0;
  ProbedDevice device([&trips] {
    ++trips;
    return absl::OkStatus();
  });
  RankWatch watch;
  CountingChannel channel;
  const IdleProbe probe(&device, &watch, &channel, kIdle);
  Await("round trips", [&] { return trips >= 3; });
  EXPECT_GE(channel.probes(), 3);
}

TEST(IdleProbe, DoesNotComeBetweenCommands) {
  ProbedDevice device([] { return absl::OkStatus(); });
  RankWatch watch;
  CountingChannel channel;
  auto command = std::make_unique<RankWatch::Executing>(&watch, "ApplyStep");
  const IdleProbe probe(&device, &watch, &channel, kIdle);
  std::this_thread::sleep_for(5 * kIdle);
  EXPECT_EQ(channel.probes(), 0);
  command.reset();
  Await("a probe", [&] { return channel.probes() > 0; });
}

// Waits until the rank is at this command.
void AwaitCommand(const RankWatch& watch, const std::string& command) {
  Await("the command " + command, [&] { return watch.Read().command == command; });
}

TEST(IdleProbe, ADeviceThatDoesNotComeBackShowsAsACommandThatLasts) {
  std::atomic<bool> let_go = false;
  ProbedDevice device([&let_go] {
    Await("the end", [&] { return let_go.load(); });
    return absl::OkStatus();
  });
  RankWatch watch;
  CountingChannel channel;
  const IdleProbe probe(&device, &watch, &channel, kIdle);
  AwaitCommand(watch, "Probe");
  Await("the command to last", [&] { return watch.Read().command_seconds >= 0.1; });
  EXPECT_EQ(channel.probes(), 1);
  let_go = true;
  AwaitCommand(watch, "");
}

TEST(IdleProbe, SoDoesADeviceThatHasFailed) {
  ProbedDevice device([] { return absl::InternalError("broken"); });
  RankWatch watch;
  CountingChannel channel;
  const IdleProbe probe(&device, &watch, &channel, kIdle);
  AwaitCommand(watch, "Probe");
  Await("the command to last", [&] { return watch.Read().command_seconds >= 0.1; });
  EXPECT_EQ(channel.probes(), 1);
}

TEST(ShardedRank, AProbeIsARoundTripOfItsDevice) {
  absl::Status comes_to;
  auto device = std::make_unique<ProbedDevice>([&comes_to] { return comes_to; });
  RankWatch watch;
  const auto rank =
      ShardedRank::Create(std::move(device), {.rank = 1, .ranks = 2, .watch = &watch}, int64_t{1} << 30);
  ASSERT_TRUE(rank.ok()) << rank.status();
  Await("idle time", [&] { return (*rank)->Report().activity.last_done_seconds >= 0.05; });
  const absl::Time before = absl::Now();
  EXPECT_EQ((*rank)->Execute(ProbeCommand{}), absl::OkStatus());
  const double last_done = (*rank)->Report().activity.last_done_seconds;
  EXPECT_LT(last_done, absl::ToDoubleSeconds(absl::Now() - before) + 0.04) << "the probe was done since";
  comes_to = absl::InternalError("broken");
  EXPECT_EQ((*rank)->Execute(ProbeCommand{}), comes_to) << "by which the rank ends";
}

}  // namespace
}  // namespace lossd::engine::idle_probe_test
