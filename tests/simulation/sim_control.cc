#include "tests/simulation/sim_control.h"

#include <cstdlib>
#include <utility>

#include "absl/time/time.h"
#include "server/rpc/group/group_timing.h"
#include "server/rpc/group/group_wire.h"

namespace lossd::simulation {
namespace {

// Nothing waits for it: heartbeats come when the schedule says so.
constexpr absl::Duration kRankTimeout = absl::Seconds(5);

// From the end of the rank's process until the leader's end of the connection knows.
constexpr int64_t kBeatsToBreak = 3;

rpc::GroupIdentity Identity(int64_t epoch) {
  return {.epoch = epoch, .ranks = 2, .version = "simulated", .device_kind = "cpu"};
}

group::v1::Hello HelloOf(int64_t epoch) {
  group::v1::Hello hello;
  hello.set_epoch(epoch);
  hello.set_rank(1);
  hello.set_ranks(2);
  hello.set_version("simulated");
  hello.set_device_kind("cpu");
  return hello;
}

}  // namespace

void SimControl::Wire::Write(Message message) {
  const std::lock_guard lock(mutex_);
  ++written_;
  under_way_.push_back(std::move(message));
}

// What does not stand still is read when it comes.
bool SimControl::Wire::IsStuck() {
  const std::lock_guard lock(mutex_);
  return stalls_ && !under_way_.empty();
}

std::optional<SimControl::Wire::Message> SimControl::Wire::Read() {
  const std::lock_guard lock(mutex_);
  if (stalls_ || under_way_.empty()) return std::nullopt;
  Message message = std::move(under_way_.front());
  under_way_.pop_front();
  return message;
}

void SimControl::Wire::Stall(bool stalls) {
  const std::lock_guard lock(mutex_);
  stalls_ = stalls;
}

bool SimControl::Wire::stalls() const {
  const std::lock_guard lock(mutex_);
  return stalls_;
}

uint64_t SimControl::Wire::written() const {
  const std::lock_guard lock(mutex_);
  return written_;
}

SimControl::SimControl(int64_t epoch)
    : patience_(rpc::HeartbeatsToLoss(kRankTimeout)),
      state_(Identity(epoch), kRankTimeout,
             [this](int32_t /*rank*/, const std::string& why) { why_lost_ = why; }) {
  if (!state_.Join(HelloOf(0), wire_).ok()) std::abort();
}

uint64_t SimControl::written() const { return wire_->written(); }

void SimControl::LoseLeader() {
  to_leader_stalls_ = true;
  wire_->Stall(false);
}

bool SimControl::HasNext() {
  Listen();
  return !commands_.empty();
}

std::optional<SimControl::Command> SimControl::Next() {
  if (!HasNext()) return std::nullopt;
  Command command = std::move(commands_.front());
  commands_.pop_front();
  return command;
}

void SimControl::Listen() {
  while (const std::optional<Wire::Message> message = wire_->Read()) {
    silent_ = 0;
    if (!(*message)->has_command()) continue;
    const group::v1::NumberedCommand& numbered = (*message)->command();
    absl::StatusOr<engine::GroupCommand> command = rpc::ParseCommand(numbered.command());
    if (!command.ok()) std::abort();  // both ends are of one version
    commands_.push_back({numbered.number(), *std::move(command)});
  }
}

SimControl::FromRank SimControl::Applied() {
  FromRank message;
  message.mutable_applied();
  return message;
}

void SimControl::Reply(uint64_t number, const absl::Status& status) {
  FromRank message;
  message.mutable_reply()->set_number(number);
  message.mutable_reply()->set_code(static_cast<int32_t>(status.code()));
  message.mutable_reply()->set_message(std::string(status.message()));
  Tell(std::move(message));
}

void SimControl::Tell(FromRank message) {
  to_leader_.push_back(std::move(message));
  Deliver();
}

void SimControl::Deliver() {
  while (!to_leader_stalls_ && !to_leader_.empty()) {
    const FromRank message = std::move(to_leader_.front());
    to_leader_.pop_front();
    if (message.has_reply()) ++replies_;
    const absl::Status status = state_.Take(1, message);
    if (!status.ok()) state_.Leave(1, std::string(status.message()));
  }
}

void SimControl::Stall(Way way) {
  if (way == Way::kToLeader) {
    to_leader_stalls_ = true;
  } else {
    wire_->Stall(true);
  }
}

void SimControl::Heal() {
  to_leader_stalls_ = false;
  wire_->Stall(false);
  Deliver();
}

void SimControl::BeatRank() {
  if (closed_) {
    if (!to_leader_stalls_ && ++since_closed_ >= kBeatsToBreak) state_.Leave(1, "its connection broke");
    return;
  }
  ++silent_;
  Listen();
  FromRank heartbeat;
  heartbeat.mutable_heartbeat();
  Tell(std::move(heartbeat));
}

absl::Status SimControl::Hello(int64_t epoch) {
  return state_.Join(HelloOf(epoch), std::make_shared<Wire>());
}

}  // namespace lossd::simulation
