#include "tests/simulation/sim_ranks.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "server/engine/device/sharded/sharded_device.h"

namespace lossd::simulation {

using engine::GroupCommand;
using kernels::collectives::Code;

namespace {

constexpr int64_t kMemory = int64_t{1} << 40;
constexpr int kTurnsToReply = 10'000'000;
constexpr int64_t kHopelessTurns = 1'000'000'000;

}  // namespace

// What the leader's device has of the group.
class SimGroup::Channel : public engine::RankChannel {
 public:
  explicit Channel(SimGroup* group) : group_(group) {}

  void Send(GroupCommand command) override {
    // Comes from a thread that goes by the clock.
    if (std::holds_alternative<engine::ProbeCommand>(command)) return;
    const std::lock_guard lock(group_->turn_);
    group_->Send(command);
  }
  absl::Status Ask(GroupCommand command) override { return group_->Ask(command); }
  // The simulation's clients know one address.
  void SendTo(int32_t /*rank*/, GroupCommand /*command*/) override {}
  std::vector<engine::AnsweredChunk> TakeAnswered() override { return {}; }
  uint64_t BatchesApplied() const override {
    const std::lock_guard lock(group_->turn_);
    return group_->BatchesApplied();
  }
  engine::GroupReport Report() const override { return {}; }

 private:
  SimGroup* const group_;
};

SimGroup::SimGroup(Options options)
    : options_(std::move(options)),
      host_meeting_(MakeMeeting()),
      device_meeting_(MakeMeeting()),
      host_(MakeSimCommunicator(0, &host_meeting_)),
      device_(MakeSimCommunicator(0, &device_meeting_)),
      control_(static_cast<int64_t>(options_.epoch)),
      rank_([this] { Body(); }) {
  Count("epoch");
  gate_.sabotage = options_.sabotage;
  gate_.free = true;
  gate_.before_adding = [this] { return Pause(); };
}

SimGroup::~SimGroup() {
  if (!channel_.expired()) std::abort();
  End();
  options_.record->sabotaged += gate_.sabotaged;
}

SimMeeting SimGroup::MakeMeeting() {
  return {{[this] { return LeaderComes(); }, [this](const auto& met) { return LeaderWaits(met); }},
          {[] { return Code::kOk; }, [this](const auto& met) { return RankWaits(met); }}};
}

std::unique_ptr<engine::Device> SimGroup::MakeDevice() {
  const engine::RankPlace place{0, 2, host_.get(), device_.get()};
  auto channel = std::make_shared<Channel>(this);
  channel_ = channel;
  return engine::CreateShardedDevice(MakeSimDevice(options_.leader_gate, options_.device), place,
                                     std::move(channel));
}

void SimGroup::Say(const std::string& text) {
  if (options_.record->tracing) {
    options_.record->trace.push_back(absl::StrCat("epoch ", options_.epoch, ": ", text));
  }
}

void SimGroup::Run(int steps) {
  const std::lock_guard lock(turn_);
  steps_ = steps;
  Resume();
  steps_ = 0;
}

void SimGroup::RunAll() {
  const std::lock_guard lock(turn_);
  free_ = true;
  Resume();
  free_ = false;
}

void SimGroup::Resume() {
  if (!gone_) rank_.Resume();
}

void SimGroup::Kill() {
  const std::lock_guard lock(turn_);
  if (gone_) return;
  Count("rank killed");
  Say("rank 1 is killed");
  EndRank();
}

void SimGroup::KillInCollective() {
  const std::lock_guard lock(turn_);
  dies_in_collective_ = !lost();
}

void SimGroup::Part(SimControl::Way way) {
  const std::lock_guard lock(turn_);
  const bool to_leader = way == SimControl::Way::kToLeader;
  Count(to_leader ? "leader hears nothing" : "rank hears nothing");
  Say(to_leader ? "rank 0 no longer hears rank 1" : "rank 1 no longer hears rank 0");
  control_.Stall(way);
}

void SimGroup::Heal() {
  const std::lock_guard lock(turn_);
  if (!control_.stalls()) return;
  Count("partition healed");
  Say("ranks hear each other again");
  control_.Heal();
}

void SimGroup::Beat() {
  const std::lock_guard lock(turn_);
  BeatOnce();
}

void SimGroup::AwaitSilence() {
  const std::lock_guard lock(turn_);
  while (!noticed()) BeatOnce();
}

void SimGroup::BeatOnce() {
  const bool knew = noticed();
  if (!leaderless_) control_.BeatLeader();
  control_.BeatRank();
  if (noticed() && !knew) {
    Count("loss noticed by the leader");
    Say(absl::StrCat("rank 0 notices: ", control_.why_lost()));
  }
  if (control_.IsLeftAlone() && !gone_) {
    Count("loss noticed by the rank");
    Say("rank 1 notices that nothing comes from rank 0");
    EndRank();
  }
}

// Whatever rank 1 is at fails.
void SimGroup::EndRank() {
  gone_ = true;
  control_.Close();
  rank_.Resume();
}

void SimGroup::LoseLeader() {
  const std::lock_guard lock(turn_);
  leaderless_ = true;
  control_.LoseLeader();
}

void SimGroup::EndInOrder() {
  const std::lock_guard lock(turn_);
  control_.EndInOrder();
}

void SimGroup::End() {
  const std::lock_guard lock(turn_);
  leaderless_ = true;
  EndRank();
}

void SimGroup::Arrive(Command command) {
  const std::lock_guard lock(turn_);
  strays_.push_back(std::move(command));
}

// Whoever sends it has to say hello first.
void SimGroup::Arrive(const Report& report) {
  const std::lock_guard lock(turn_);
  if (control_.Hello(static_cast<int64_t>(report.epoch)).ok()) {
    broken_ = absl::StrCat("a rank of epoch ", report.epoch, " joins epoch ", options_.epoch);
  }
  if (gate_.Strikes(Sabotage::kOldEpochCounts)) return control_.TakeStray(report.message);
  Count("late report refused");
  Say(absl::StrCat("rank 0 refuses a report of epoch ", report.epoch));
}

void SimGroup::RepeatHello() {
  const std::lock_guard lock(turn_);
  if (control_.Hello(0).ok()) broken_ = "rank 1 joins twice";
  Count("repeated hello refused");
}

bool SimGroup::HasAdded(uint64_t item) {
  const std::lock_guard lock(turn_);
  return gate_.added.contains(item);
}

std::deque<SimGroup::Command> SimGroup::Undelivered() {
  const std::lock_guard lock(turn_);
  std::deque<Command> left;
  control_.Heal();
  while (std::optional<SimControl::Command> command = control_.Next()) {
    left.push_back({options_.epoch, std::move(command->command)});
  }
  return left;
}

std::deque<SimGroup::Report> SimGroup::Untold() {
  const std::lock_guard lock(turn_);
  std::deque<Report> untold;
  for (SimControl::FromRank& message : control_.TakeUndelivered()) {
    if (message.has_applied()) untold.push_back({options_.epoch, std::move(message)});
  }
  if (gone_) {
    // What its last breath may have been.
    for (uint64_t batch = applied_; batch < sent_; ++batch) {
      untold.push_back({options_.epoch, SimControl::Applied()});
    }
  }
  return untold;
}

// The leader

void SimGroup::Send(const GroupCommand& command) {
  if (leaderless_) return;
  if (std::holds_alternative<engine::StartBatchCommand>(command)) ++sent_;
  control_.Send(command);
}

// Rank 1 may have to do something together with the leader first: that is the business of the thread that has
// the device.
absl::Status SimGroup::Ask(const GroupCommand& command) {
  uint64_t written = 0;
  int64_t replies = 0;
  {
    const std::lock_guard lock(turn_);
    if (leaderless_ || noticed()) return absl::UnavailableError("rank 1 is lost");
    written = control_.written();
    replies = control_.replies();
  }
  absl::Status reply;
  std::thread asks([&] { reply = control_.Ask(command); });
  while (control_.written() == written) std::this_thread::yield();
  int turns = 0;
  for (; turns < kTurnsToReply && ComesOn(replies); ++turns) {
    if (std::this_thread::get_id() == owner_) {
      options_.leader_gate->answers = 1;
      options_.step_leader();
    } else {
      std::this_thread::yield();
    }
  }
  if (turns == kTurnsToReply) {
    const std::lock_guard lock(turn_);
    broken_ = "rank 1 does not reply";
    control_.EndInOrder();  // nobody waits any more
  }
  asks.join();
  return reply;
}

// Whether the answer is still to come. Nobody answers for a rank that is lost.
bool SimGroup::ComesOn(int64_t replies) {
  const std::lock_guard lock(turn_);
  const auto answered = [&] { return control_.replies() > replies; };
  while ((gone_ || control_.stalls()) && !noticed()) BeatOnce();
  if (noticed() || answered()) return false;
  ResumeFor(answered);
  return !answered();
}

uint64_t SimGroup::BatchesApplied() {
  if (leaderless_) return std::numeric_limits<uint64_t>::max();
  if (options_.leader_gate->free) {
    free_ = true;
    Resume();
    free_ = false;
  }
  // Nobody asks so often but in a wait that never ends, which the schedule has to keep from happening.
  if (lost() && options_.leader_gate->free && ++hopeless_ > kHopelessTurns) std::abort();
  const uint64_t applied = control_.BatchesApplied();
  if (sent_ > applied && gate_.Strikes(Sabotage::kMarkBeforeRanks)) return sent_;
  if (sent_ > applied && doomed() && gate_.Strikes(Sabotage::kMarkWithoutLost)) return sent_;
  return applied;
}

Code SimGroup::LeaderComes() {
  const std::lock_guard lock(turn_);
  if (dies_in_collective_ && !lost()) {
    Count("rank killed");
    Count("rank killed in a collective");
    Say("rank 1 is killed in a collective");
    EndRank();
  }
  return lost() || leaderless_ ? Code::kPeerLost : Code::kOk;
}

Code SimGroup::LeaderWaits(const SimMeeting::Met& met) {
  const std::lock_guard lock(turn_);
  Say("rank 0 waits for rank 1");
  ResumeFor(met);
  if (met()) return Code::kOk;
  if (lost()) return Code::kPeerLost;
  Say("rank 0 has waited for too long");
  if (control_.stalls()) {
    Count("collective timed out");
    timed_out_ = true;
  }
  return Code::kTimeout;
}

void SimGroup::ResumeFor(const SimMeeting::Met& met) {
  awaited_ = &met;
  Resume();
  awaited_ = nullptr;
}

// Rank 1

void SimGroup::Body() {
  std::unique_ptr<kernels::collectives::Communicator> host = MakeSimCommunicator(1, &host_meeting_);
  std::unique_ptr<kernels::collectives::Communicator> device = MakeSimCommunicator(1, &device_meeting_);
  const engine::RankPlace place{1, 2, host.get(), device.get()};
  auto rank = engine::ShardedRank::Create(MakeSimDevice(&gate_, options_.device), place, kMemory);
  if (rank.ok()) {
    Serve(**rank);
  } else {
    Break(std::string(rank.status().message()));
  }
}

void SimGroup::Serve(engine::RankExecutor& executor) {
  while (!gone_) {
    TellBatches(executor);
    if (strays_.empty() && !control_.HasNext()) {
      rank_.Yield();
      continue;
    }
    if (!Pause()) return;
    if (!strays_.empty()) {
      const Command stray = std::move(strays_.front());
      strays_.pop_front();
      if (gate_.Strikes(Sabotage::kOldEpochCounts)) {
        Execute(executor, {0, stray.command});
      } else {
        Count("late command refused");
        Say(absl::StrCat("rank 1 refuses ", NameOf(stray.command), " of epoch ", stray.epoch));
      }
    } else if (std::optional<SimControl::Command> command = control_.Next(); command.has_value()) {
      Execute(executor, *std::move(command));
    }
  }
}

void SimGroup::Execute(engine::RankExecutor& executor, SimControl::Command command) {
  const bool replied_to = engine::IsRepliedTo(command.command) && command.number > 0;
  const char* const name = NameOf(command.command);
  Say(absl::StrCat("rank 1 does ", name));
  if (leaderless_) Count("done for a leader that is gone");
  const absl::Status status = executor.Execute(std::move(command.command));
  if (gone_) return;
  if (replied_to) {
    control_.Reply(command.number, status);
  } else if (!status.ok()) {
    Break(absl::StrCat(name, " at rank 1: ", std::string(status.message())));
  }
  if (status.ok()) TellBatches(executor);
}

// Without its leader a rank fails as it may.
void SimGroup::Break(const std::string& why) {
  Say(why);
  if (!leaderless_ && !noticed()) broken_ = why;
  gone_ = true;
  control_.Close();
}

void SimGroup::TellBatches(engine::RankExecutor& executor) {
  const absl::StatusOr<engine::BatchProgress> progress = executor.Poll();
  if (gone_) return;
  if (!progress.ok()) {
    return Break(absl::StrCat("a batch at rank 1: ", std::string(progress.status().message())));
  }
  for (; applied_ < progress->applied; ++applied_) {
    Say("rank 1 has applied a batch");
    control_.TellApplied();
  }
}

Code SimGroup::RankWaits(const SimMeeting::Met& met) {
  while (!gone_ && !met()) {
    rank_.Yield();
  }
  return met() ? Code::kOk : Code::kPeerLost;
}

bool SimGroup::Pause() {
  const auto goes_on = [this] { return free_ || (awaited_ != nullptr && !(*awaited_)()); };
  while (!gone_ && !goes_on() && steps_ == 0) {
    rank_.Yield();
  }
  if (steps_ > 0 && !goes_on()) --steps_;
  return !gone_;
}

}  // namespace lossd::simulation
