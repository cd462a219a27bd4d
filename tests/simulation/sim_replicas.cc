#include "tests/simulation/sim_replicas.h"

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lossd/group/v1/replica.pb.h"
#include "server/engine/replicas/agreement.h"
#include "server/engine/replicas/window_ending.h"
#include "server/rpc/replicas/head_commands.h"
#include "server/rpc/replicas/joint_heads.h"
#include "server/rpc/replicas/met_heads.h"
#include "server/rpc/replicas/part_commands.h"
#include "server/rpc/replicas/remote_part.h"

namespace lossd::simulation {
namespace {

constexpr int kTurnsToEnd = 1'000'000;
constexpr int kTurnsToFinish = 5000;

bool Always() { return true; }

}  // namespace

SimReplicas::SimReplicas(Options options)
    : options_(std::move(options)), epoch_(std::make_shared<SimSetEpoch>()) {
  for (int32_t replica = 0; replica < kReplicas; ++replica) {
    at(replica).gate.sabotage = options_.sabotage;
    epoch_->Leave(replica);
    Start(replica);
  }
  if (!GoUntil([this] { return whole(); })) std::abort();
}

SimReplicas::~SimReplicas() {
  coordination_ = nullptr;
  for (int32_t replica = 0; replica < kReplicas; ++replica) Finish(replica);
  for (Process& process : processes_) process.engine.reset();
}

void SimReplicas::Start(int32_t replica) {
  Process& process = at(replica);
  engine::EngineOptions options;
  options.device_loop = engine::DeviceLoop::kByCaller;
  options.session_lease = -absl::Hours(1);  // what has no stream has expired when somebody looks
  options.place_timeout = absl::InfiniteDuration();
  options.place = {replica, kReplicas};
  options.on_device_failure = [this, replica](const absl::Status& status) {
    broken_ = absl::StrCat("the device of replica ", replica, " fails: ", std::string(status.message()));
  };
  if (options.place.coordinates()) TellEngine(&options);
  process.gate.free = false;
  process.gate.added.clear();
  process.engine = *engine::Engine::Create(std::move(options), MakeSimDevice(&process.gate, options_.device));
  process.history = 0;
  process.out = true;
  process.leaving = false;
  process.agrees = false;
}

// As server/startup/replicas does.
void SimReplicas::TellEngine(engine::EngineOptions* options) {
  options->checkpoints = options_.checkpoints;
  options->end_together = [this](const std::shared_ptr<engine::Head>& head, const engine::WindowEnd& end) {
    at(0).work.Run([this, head, end] { EndTogether(head, end); });
  };
  options->publish_together = [this](const std::shared_ptr<engine::Head>& head,
                                     const std::shared_ptr<engine::StagedWrite>& write) {
    at(0).work.Run([this, head, write] { PublishTogether(head, write); });
  };
  options->find_part = [this](const engine::Head& head,
                              int32_t replica) -> absl::StatusOr<std::shared_ptr<engine::ReplicaPart>> {
    const auto epoch = Coordinated();
    if (!epoch.ok()) return epoch.status();
    return std::make_shared<rpc::RemotePart>(*epoch, replica, head.config());
  };
  options->find_replicas = [this](const engine::Head& head) -> absl::StatusOr<engine::JointReplicas> {
    const auto epoch = Coordinated();
    if (!epoch.ok()) return epoch.status();
    return ReplicasOf(*epoch, head);
  };
  options->create_together = [this](const engine::HeadConfig& config) {
    const auto epoch = Coordinated();
    return epoch.ok() ? rpc::CreateAtOthers({*epoch, kReplicas}, config) : epoch.status();
  };
  options->delete_together = [this](const std::string& name, engine::Head::DiscardGradient discard,
                                    absl::FunctionRef<absl::Status()> delete_here) -> absl::StatusOr<bool> {
    const auto epoch = Coordinated();
    if (!epoch.ok()) return epoch.status();
    return rpc::DeleteAtAll({*epoch, kReplicas}, name, discard, delete_here);
  };
}

int64_t SimReplicas::sabotaged() const {
  int64_t all = 0;
  for (const Process& process : processes_) all += process.gate.sabotaged;
  return all;
}

bool SimReplicas::HasAdded(uint64_t item) const {
  return std::any_of(processes_.begin(), processes_.end(),
                     [item](const Process& process) { return process.gate.added.contains(item); });
}

void SimReplicas::Say(const std::string& text) {
  if (options_.record->tracing) {
    options_.record->trace.push_back(absl::StrCat("epoch ", epochs_, ": ", text));
  }
}

// Threads

void SimReplicas::StepDevice(int32_t replica) {
  Process& process = at(replica);
  if (process.device.idle()) {
    process.device.Run([&process] { process.engine->StepDevice(); });
  }
  process.device.Resume();
}

// A client's call begins only while all are there.
void SimReplicas::ResumeThreads(const std::function<bool()>& goes) {
  for (Process& process : processes_) {
    if (goes()) process.work.Resume();
  }
  if ((whole() || calls_.busy()) && goes()) calls_.Resume();
  if (goes()) meets_.Resume();
}

void SimReplicas::Go(Random& random) {
  const auto half = [&random] { return random.OneIn(2); };
  if (half()) Deliver();
  if (half()) epoch_->DeliverAnswer();
  ResumeThreads(half);
  if (half()) StepDevice(random.Below(kReplicas));
  if (epoch_->is_cut() && random.OneIn(6)) epoch_->Lose(random.Below(kReplicas));
  LeaveWhereLost(half);
  AgreeWhereMet(half);
  if (AllOut() && half()) Meet();
  // Those that wait are told so now and then, until all are there.
  if (at(0).out && random.OneIn(10)) TellAllWaiting();
}

bool SimReplicas::GoUntil(const std::function<bool()>& is_done) {
  int turns = 0;
  for (Process& process : processes_) process.gate.free = true;
  for (; turns < kTurnsToFinish && !is_done(); ++turns) {
    Deliver();
    epoch_->DeliverAnswer();
    ResumeThreads(Always);
    for (int32_t replica = 0; replica < kReplicas; ++replica) StepDevice(replica);
    for (int32_t replica = 0; replica < kReplicas && epoch_->is_cut(); ++replica) epoch_->Lose(replica);
    LeaveWhereLost(Always);
    AgreeWhereMet(Always);
    if (AllOut()) Meet();
  }
  for (Process& process : processes_) process.gate.free = false;
  return turns < kTurnsToFinish;
}

bool SimReplicas::Idle(int32_t replica) const {
  const Process& process = at(replica);
  const bool own = process.device.idle() && process.work.idle();
  return own && (replica != 0 || (calls_.idle() && meets_.idle()));
}

void SimReplicas::Finish(int32_t replica) {
  Process& process = at(replica);
  epoch_->Leave(replica);
  process.engine->LeaveEpoch();
  // Nothing waits for a head that is gone.
  for (const auto& head : process.engine->Heads()) process.engine->DropHead(head->config().name);
  process.gate.free = true;
  for (int turns = 0; !Idle(replica); ++turns) {
    if (turns == kTurnsToEnd) std::abort();
    process.work.Resume();
    if (replica == 0) {
      calls_.Resume();
      meets_.Resume();
    }
    // Not again if that was all.
    if (!process.device.idle() || !Idle(replica)) StepDevice(replica);
  }
}

// Epochs

void SimReplicas::Cut(Random& random) {
  if (epoch_->is_cut()) return;
  Count("set cut");
  Say("replicas no longer hear each other");
  epoch_->Cut(random);
}

void SimReplicas::Kill(int32_t replica) {
  Count("replica killed");
  Say(absl::StrCat("replica ", replica, " is killed"));
  if (replica == 0) coordination_ = nullptr;
  Finish(replica);
  at(replica).engine.reset();
  Start(replica);
}

void SimReplicas::LeaveWhereLost(const std::function<bool()>& goes) {
  for (int32_t replica = 0; replica < kReplicas; ++replica) {
    const Process& process = at(replica);
    const bool leaves = epoch_->has_lost(replica) && !process.out && !process.leaving && !process.agrees;
    if (leaves && goes()) Leave(replica);
  }
}

void SimReplicas::AgreeWhereMet(const std::function<bool()>& goes) {
  for (int32_t replica = 0; replica < kReplicas; ++replica) {
    if (at(replica).agrees && goes()) GoOnOrAbandon(replica);
  }
}

void SimReplicas::TellAllWaiting() {
  for (const std::shared_ptr<engine::Head>& head : engine(0).Heads()) {
    head->TellWaiting(absl::UnavailableError("a replica has not joined"));
    head->TellCommitting(absl::UnavailableError("a replica has not joined"));
  }
}

// As MeetingReplica::Run.
void SimReplicas::Leave(int32_t replica) {
  Process& process = at(replica);
  Say(absl::StrCat("replica ", replica, " has noticed that the epoch is over"));
  process.leaving = true;
  if (replica == 0) coordination_ = nullptr;
  epoch_->Leave(replica);
  process.engine->LeaveEpoch();
  process.work.Run([this, replica, &process] {
    // Otherwise the wait were one for the engine's lock.
    SimWorker::Await([this, replica] { return replica != 0 || (!calls_.busy() && !meets_.busy()); });
    process.engine->AwaitExchanges();
    process.leaving = false;
    process.out = true;
  });
}

bool SimReplicas::AllOut() const {
  return std::all_of(processes_.begin(), processes_.end(),
                     [](const Process& process) { return process.out; });
}

void SimReplicas::Meet() {
  Count("set epoch");
  ++epochs_;
  std::vector<engine::MetReplica> all;
  for (int32_t replica = 0; replica < kReplicas; ++replica) {
    all.push_back(rpc::DescribeHeads(engine(replica), at(replica).history));
  }
  const bool is_broken = std::any_of(all.begin(), all.end(), [](const engine::MetReplica& replica) {
    return std::any_of(replica.heads.begin(), replica.heads.end(),
                       [](const auto& head) { return head.second.part.broken; });
  });
  if (is_broken) Count("set meets broken");
  if (is_broken && gate(0).Strikes(Sabotage::kBrokenForgotten)) {
    for (engine::MetReplica& replica : all) {
      for (auto& [name, head] : replica.heads) head.part.broken = false;
    }
  }
  const engine::Agreement agreement = engine::Agree(all, ++histories_);
  Say(agreement.go_back.empty() ? "all meet" : "all meet, and go back");
  if (!agreement.alike.empty()) Count("set goes on");
  if (!agreement.go_back.empty()) Count("set goes back");
  epoch_ = std::make_shared<SimSetEpoch>();
  agreement_ = agreement;
  for (Process& process : processes_) {
    process.out = false;
    process.agrees = true;
  }
}

void SimReplicas::GoOnOrAbandon(int32_t replica) {
  at(replica).agrees = false;
  rpc::GoOnOrAbandon(engine(replica), agreement_);
  const bool some_have_yet_to = std::any_of(processes_.begin(), processes_.end(),
                                            [](const Process& process) { return process.agrees; });
  if (some_have_yet_to || epoch_->has_lost(0)) return;
  meets_.Run([this, epoch = epoch_, agreement = agreement_] { Settle(epoch, agreement); });
}

// As MeetingReplica::Settle.
void SimReplicas::Settle(const std::shared_ptr<SimSetEpoch>& epoch, const engine::Agreement& agreement) {
  const rpc::OtherReplicas others(epoch, kReplicas);
  const absl::StatusOr<engine::Engine::WentBack> went = engine(0).GoBack(
      agreement,
      {.replicas = [this, epoch](const engine::Head& head) { return ReplicasOf(epoch, head); },
       .create = [&others](const engine::HeadConfig& config) { return rpc::ReplaceAtOthers(others, config); },
       .drop = [&others](const std::string& name) { return rpc::DropHeadAtOthers(others, name); }});
  if (went.ok()) {
    for (const engine::CheckpointInfo& head : went->restored) options_.on_return(head.tag);
    for (size_t i = 0; i < went->gone.size(); ++i) options_.on_return("");
  } else if (!absl::IsUnavailable(went.status()) && !epoch->has_lost(0)) {
    broken_ = absl::StrCat("the replicas cannot go back: ", std::string(went.status().message()));
  }
  absl::Status settled = went.status();
  if (!settled.ok()) Say(absl::StrCat("they could not go back: ", std::string(settled.message())));
  if (settled.ok()) {
    group::v1::ReplicaCommand whole;
    whole.mutable_whole()->set_history(agreement.history);
    settled = others.Ask("SetIsWhole", whole);
  }
  if (!settled.ok() || epoch->has_lost(0)) return epoch->Lose(0);
  Say("all are there");
  at(0).history = agreement.history;
  engine(0).replicas().NoteMeeting(agreement.history);
  coordination_ = epoch;
}

// The coordinator

absl::StatusOr<std::shared_ptr<SimSetEpoch>> SimReplicas::Coordinated() const {
  if (coordination_ == nullptr) return absl::UnavailableError("not all replicas are there");
  return coordination_;
}

engine::JointReplicas SimReplicas::ReplicasOf(const std::shared_ptr<SimSetEpoch>& epoch,
                                              const engine::Head& head) {
  engine::JointReplicas replicas{.own = epoch->communicators(0),
                                 .others = {},
                                 .epoch = epoch->coordinated(),
                                 .on_broken = [epoch](const absl::Status& /*why*/) { epoch->Lose(0); },
                                 .watch = &engine(0).replicas()};
  for (int32_t replica = 1; replica < kReplicas; ++replica) {
    replicas.others.push_back(std::make_shared<rpc::RemotePart>(epoch, replica, head.config()));
  }
  return replicas;
}

void SimReplicas::EndTogether(const std::shared_ptr<engine::Head>& head, const engine::WindowEnd& end) {
  const auto epoch = Coordinated();
  if (!epoch.ok()) return head->GiveUpEnding(epoch.status(), end);
  engine::EndWindow(head, end, ReplicasOf(*epoch, *head));
}

void SimReplicas::PublishTogether(const std::shared_ptr<engine::Head>& head,
                                  const std::shared_ptr<engine::StagedWrite>& write) {
  const auto epoch = Coordinated();
  if (!epoch.ok()) return head->DropPrepared(epoch.status());
  rpc::PublishAtAll({*epoch, kReplicas}, head, *write,
                    [&epoch](const absl::Status& /*why*/) { (*epoch)->Lose(0); });
}

// The other one

void SimReplicas::Deliver() {
  if (!epoch_->HasCommand()) return;
  const SimSetEpoch::Command command = epoch_->NextCommand();
  Say(absl::StrCat("replica 1 is asked: ", command.name));
  Take(command);
}

void SimReplicas::Take(const SimSetEpoch::Command& command) {
  Process& process = at(1);
  const auto parsed = std::make_shared<group::v1::ReplicaCommand>();
  if (!parsed->ParseFromString(command.bytes)) std::abort();  // both ends are of one version
  if (rpc::IsHeadCommand(*parsed)) {
    process.work.Run(
        [&process, parsed, reply = command.reply] { reply(rpc::DoHeadCommand(*process.engine, *parsed)); });
  } else if (parsed->has_whole()) {
    process.history = parsed->whole().history();
    command.reply("");
  } else {
    rpc::DoPart(*process.engine, epoch_->communicators(1), *parsed, command.reply,
                [epoch = epoch_](const absl::Status& /*why*/) { epoch->Lose(1); });
  }
}

}  // namespace lossd::simulation
