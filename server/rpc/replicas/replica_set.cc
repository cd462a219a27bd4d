#include "server/rpc/replicas/replica_set.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "kernels/collectives/rendezvous.h"
#include "lossd/group/v1/replica.pb.h"
#include "server/engine/common/mutex.h"
#include "server/engine/common/worker_pool.h"
#include "server/engine/device/rank_status.h"
#include "server/engine/device/replica_connection.h"
#include "server/engine/replicas/agreement.h"
#include "server/engine/replicas/joint_replicas.h"
#include "server/engine/replicas/window_ending.h"
#include "server/rpc/group/group_leader.h"
#include "server/rpc/group/group_member.h"
#include "server/rpc/group/group_timing.h"
#include "server/rpc/group/ticker.h"
#include "server/rpc/replicas/head_commands.h"
#include "server/rpc/replicas/joint_heads.h"
#include "server/rpc/replicas/meeting.h"
#include "server/rpc/replicas/met_heads.h"
#include "server/rpc/replicas/part_commands.h"
#include "server/rpc/replicas/remote_part.h"
#include "server/rpc/replicas/replica_wire.h"
#include "server/telemetry/common/logging.h"

namespace lossd::rpc {
namespace {

using kernels::collectives::Rendezvous;
using telemetry::Log;
using telemetry::LogLevel;

// A call waits for what the slowest replica does before it; that one is lost is noticed by its heartbeats.
constexpr std::chrono::milliseconds kExchangeTimeout = std::chrono::hours(24);
// Who has given up is not noticed by those that connect to it.
constexpr absl::Duration kLeastConnectTimeout = absl::Seconds(1);
// Before they meet again: those that have lost one, and those that cannot agree.
constexpr absl::Duration kPause = absl::Milliseconds(20);
constexpr absl::Duration kLongPause = absl::Seconds(1);
// How long one looks for the coordinator before it says that it is missing. It doubles up to eightfold: a
// network or a resolver of names may take longer to answer.
constexpr absl::Duration kSearch = absl::Seconds(1);
// How often one that waits for others looks whether it is to end.
constexpr absl::Duration kLookAgain = absl::Milliseconds(100);
// How often it is looked whether others keep from agreeing who has joined, and is told so.
constexpr absl::Duration kLookWhoAgrees = absl::Milliseconds(500);
// Who stops all servers does not reach them at the same moment.
constexpr absl::Duration kToldTogether = absl::Seconds(5);
// Calls of clients that a replica passes on at a time.
constexpr int kMostPassed = 4096;
// At a time, of one replica: its own, and those.
constexpr int kCallsOfAReplica = kMostPassed + 4;

uint64_t RandomHistory() {
  std::random_device random;
  return std::uniform_int_distribution<uint64_t>(1)(random);
}

engine::ReplicaNetwork NetworkOf(const ReplicaSetOptions& options) {
  const absl::Duration connecting = std::max(options.replica_timeout / 5, kLeastConnectTimeout);
  return {.place = options.place,
          .interface = options.interface,
          .timeout = kExchangeTimeout,
          .connect_timeout = absl::ToChronoMilliseconds(connecting)};
}

void LogLate(int32_t replica, const std::string& command, absl::Duration age) {
  Log(LogLevel::kWarning, "a replica has not answered",
      {{"replica", replica}, {"command", command}, {"seconds", absl::ToDoubleSeconds(age)}});
}

void LogGone(const engine::Engine::GoneHead& gone) {
  if (gone.why.ok()) {
    Log(LogLevel::kError,
        "a head is gone: its replicas were not alike, and it has no checkpoint (--checkpoint_dir and "
        "--checkpoint_steps of replica 0 keep one)",
        {{"head", gone.head}});
    return;
  }
  Log(LogLevel::kError,
      "a head is gone: it had no weights, and its newest checkpoint, which stays, cannot be restored "
      "(restore another one, or create the head again)",
      {{"head", gone.head}, {"reason", std::string(gone.why.message())}});
}

// What is told while those that have all joined agree on what there is, once it takes long; `said` is what
// those have yet to say whom the coordinator waits for.
absl::Status StillAgreeing(const AwaitedOffers& awaited, const std::string& said) {
  if (awaited.ranks.empty()) {
    return absl::UnavailableError("all replicas have joined, and heads go back to their newest checkpoints");
  }
  return absl::UnavailableError(
      absl::StrCat(RankList(awaited.ranks, "replica"), awaited.ranks.size() == 1 ? " has" : " have",
                   " joined, but", awaited.ranks.size() == 1 ? " has" : " have", " not said ", said));
}

// It has ended the epoch in order, since it has heard of a loss or leaves itself.
absl::Status CoordinatorLeft() { return absl::UnavailableError("replica 0 has left"); }

// `all` is null where all that matters is that everybody has come.
absl::Status AllGather(Rendezvous& rendezvous, std::string own, std::vector<std::string>* all) {
  std::vector<std::string> unused;
  return engine::ToStatus(
      rendezvous.AllGather(std::move(own), kExchangeTimeout, all == nullptr ? &unused : all));
}

class MeetingReplica final : public ReplicaSet {
 public:
  explicit MeetingReplica(ReplicaSetOptions options)
      : options_(std::move(options)),
        passes_(options_.credentials),
        sessions_(options_.place, {.coordinator = [this] { return Coordinator(); },
                                   .others = [this] { return Others(); },
                                   .history = [this] { return history(); }}) {
    options_.identity.epoch = 0;
    options_.identity.ranks = options_.place.replicas;
    options_.identity.member = "replica";
  }
  ~MeetingReplica() override;

  void Meet(engine::Engine* engine) override {
    engine_ = engine;
    const auto name = options_.identity.agreed.find("replica_set");
    if (name != options_.identity.agreed.end()) engine_->replicas().NameSet(name->second);
    thread_ = std::thread([this] { Run(); });
  }
  void EndTogether(std::shared_ptr<engine::Head> head, engine::WindowEnd end) override;
  void PublishTogether(std::shared_ptr<engine::Head> head,
                       std::shared_ptr<engine::StagedWrite> write) override;
  absl::Status CreateTogether(const engine::HeadConfig& config) override;
  absl::Status CopyTogether(const engine::HeadCopy& copy,
                            absl::FunctionRef<absl::Status()> copy_here) override;
  absl::StatusOr<bool> DeleteTogether(const std::string& name, engine::Engine::DiscardGradient discard,
                                      absl::FunctionRef<absl::Status()> delete_here) override;

  void Serve(SessionCalls sessions, std::shared_ptr<grpc::Channel> own) override {
    sessions_.Serve(engine_, std::move(sessions));
    passes_.Open(std::move(own));
  }
  void StopServing() override {
    passes_.Close();
    sessions_.StopServing();
  }
  absl::StatusOr<CoordinatorCalls> Coordinator() const override;
  SessionRouter& sessions() override { return sessions_; }

  const engine::ReplicaPlace& place() const override { return options_.place; }
  bool AwaitMeeting(const std::function<bool()>& told_to_end) override;
  absl::StatusOr<std::shared_ptr<engine::ReplicaPart>> FindPart(const engine::Head& head,
                                                                int32_t replica) override;
  absl::StatusOr<engine::JointReplicas> FindReplicas(const engine::Head& head) override;
  void TellDraining() override;
  absl::Status AwaitOthersDrained(absl::Time deadline) override;
  bool StayForDrain(absl::Time deadline) override;
  absl::Status Whole() const override {
    const engine::MutexLock lock(mutex_);
    return whole_;
  }

 private:
  // What the coordinator asks the others by, while all are there.
  struct Coordination {
    std::shared_ptr<const engine::ReplicaCommunicators> own;
    std::shared_ptr<RankQuestions> questions;
    std::shared_ptr<engine::CoordinatedEpoch> epoch;
    std::shared_ptr<Meeting> meeting;
  };

  void Run();
  // One epoch, with why it has ended.
  absl::Status Coordinate(const std::shared_ptr<Meeting>& meeting);
  absl::Status Follow(const std::shared_ptr<Meeting>& meeting);
  // Says who keeps those from agreeing that have joined, once it takes long.
  void TellAgreeing(GroupLeader& leader, Meeting& meeting, absl::Time since);
  // Tells all others what there is here, and hears what they have: heads that are alike go on, and the others
  // wait to go back. Then connects the devices.
  absl::StatusOr<engine::Agreement> Agree(Rendezvous& rendezvous, Meeting& meeting,
                                          std::shared_ptr<const engine::ReplicaCommunicators>* replicas);
  // At the coordinator: all are alike when this is done, and know it.
  absl::Status Settle(const engine::Agreement& agreement, const std::shared_ptr<Coordination>& coordination);
  engine::JointReplicas ReplicasOf(const Coordination& coordination, const engine::Head& head) const;
  // That of the windows which all replicas have; 0: they have yet to meet.
  uint64_t history() const {
    const engine::MutexLock lock(mutex_);
    return settled_history_;
  }
  // At other replicas: begins what the coordinator asks for.
  void Take(const std::string& command, GroupMember::Reply reply,
            const std::shared_ptr<const engine::ReplicaCommunicators>& replicas,
            const std::shared_ptr<Meeting>& meeting, const CoordinatorCalls& calls);
  void HearOfDrain(const group::v1::CoordinatorDrains& drains, GroupMember::Reply reply);
  void HearOfWhole(uint64_t history, CoordinatorCalls calls);
  // At the coordinator, while all are there.
  absl::StatusOr<std::shared_ptr<Coordination>> Coordinated() const;
  absl::StatusOr<OtherReplicas> Others() const;
  absl::Status NotWholeLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Publish(const std::shared_ptr<engine::Head>& head, const std::shared_ptr<engine::StagedWrite>& write);
  // Nothing that was asked for in an epoch that is over is under way any more.
  void AwaitQuiet();
  // This replica is alike to all others.
  void TellSettled(uint64_t history);

  // Who waits for the end of a window has to ask again.
  void TellAllWaiting(const absl::Status& why);
  // Sets what Whole() says, and logs it if it is news; if it has been so for a while that is said, too.
  // Unless all are there nobody is asked any more, and what was passed on to the coordinator ends.
  void Tell(const absl::Status& whole, absl::Duration time = absl::ZeroDuration());
  bool Sleep(absl::Duration duration);
  bool stopping() const {
    const engine::MutexLock lock(mutex_);
    return stopping_;
  }

  ReplicaSetOptions options_;
  engine::Engine* engine_ = nullptr;
  absl::Duration search_ = kSearch;         // the thread's
  absl::Time told_draining_;                // of who drains this server
  std::atomic<const char*> agreeing_ = "";  // what the others are to say next

  mutable engine::Mutex mutex_;
  engine::CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status whole_ ABSL_GUARDED_BY(mutex_) = absl::UnavailableError("the replicas have yet to meet");
  absl::Status told_ ABSL_GUARDED_BY(mutex_) = whole_;  // without the time
  std::shared_ptr<Coordination> coordination_ ABSL_GUARDED_BY(mutex_);
  std::optional<CoordinatorCalls> to_coordinator_ ABSL_GUARDED_BY(mutex_);  // while all are there
  std::shared_ptr<Meeting> meeting_ ABSL_GUARDED_BY(mutex_);
  uint64_t settled_history_ ABSL_GUARDED_BY(mutex_) = 0;
  // At other replicas, of a drain of all.
  bool drained_ ABSL_GUARDED_BY(mutex_) = false;             // this one
  bool coordinator_drains_ ABSL_GUARDED_BY(mutex_) = false;  // in this epoch
  GroupMember::Reply when_drained_ ABSL_GUARDED_BY(mutex_);  // null: it does not wait

  PassService passes_;
  mutable PassPlaces pass_places_{kMostPassed};
  SessionRouter sessions_;
  // What takes long or waits for others: at the coordinator ends of windows and writes, of which one comes
  // after the other; elsewhere what it asks for but its parts in them.
  std::optional<engine::WorkerPool> work_{1};
  std::optional<engine::WorkerPool> about_sessions_{
      1};  // what it asks for about sessions: it is answered soon
  std::thread thread_;
};

MeetingReplica::~MeetingReplica() {
  std::shared_ptr<Meeting> meeting;
  {
    const engine::MutexLock lock(mutex_);
    stopping_ = true;
    meeting = meeting_;
    changed_.NotifyAll();
  }
  if (meeting != nullptr) {
    meeting->Lose(absl::CancelledError("this replica leaves"));
    meeting->Interrupt();
  }
  if (!thread_.joinable()) return;
  thread_.join();
  work_.reset();
  about_sessions_.reset();
  TellAllWaiting(absl::UnavailableError("this replica leaves"));
}

void MeetingReplica::TellAllWaiting(const absl::Status& why) {
  for (const std::shared_ptr<engine::Head>& head : engine_->Heads()) {
    head->TellWaiting(why);
    head->TellCommitting(why);
  }
}

void MeetingReplica::Tell(const absl::Status& told, absl::Duration time) {
  absl::Status whole = told;
  if (time > absl::ZeroDuration()) {
    whole = absl::Status(told.code(),
                         absl::StrFormat("%s for %.0f s", told.message(), absl::ToDoubleSeconds(time)));
  }
  bool news = false;
  std::optional<CoordinatorCalls> lost;
  {
    const engine::MutexLock lock(mutex_);
    news = told_ != told;
    told_ = told;
    whole_ = whole;
    if (!whole.ok()) {
      coordination_ = nullptr;
      lost = std::exchange(to_coordinator_, std::nullopt);
    }
    changed_.NotifyAll();
  }
  if (lost.has_value()) lost->epoch->End(whole);
  engine_->replicas().NoteWhole(whole);
  if (!news) return;
  if (whole.ok()) {
    Log(LogLevel::kInfo, "all replicas are there", {{"replicas", options_.place.replicas}});
  } else {
    Log(LogLevel::kWarning, "not all replicas are there", {{"reason", std::string(whole.message())}});
  }
}

bool MeetingReplica::Sleep(absl::Duration duration) {
  const auto deadline = DeadlineAfter(duration);
  const engine::MutexLock lock(mutex_);
  while (!stopping_ && changed_.WaitUntil(mutex_, deadline) != std::cv_status::timeout) {
  }
  return !stopping_;
}

void MeetingReplica::Run() {
  absl::Duration pause;
  do {
    const auto meeting = std::make_shared<Meeting>();
    {
      const engine::MutexLock lock(mutex_);
      if (stopping_) return;
      meeting_ = meeting;
    }
    const absl::Status ended = options_.place.coordinates() ? Coordinate(meeting) : Follow(meeting);
    // An exchange may wait for replicas that have left it, and does not notice by itself.
    meeting->Lose(ended);
    Tell(ended);
    // LeaveEpoch ends waits for other replicas, which AwaitQuiet would wait for.
    engine_->LeaveEpoch();
    AwaitQuiet();
    if (stopping()) return;
    pause = absl::IsUnavailable(ended) || absl::IsDeadlineExceeded(ended) ? kPause : kLongPause;
  } while (Sleep(pause));
}

absl::Status MeetingReplica::Coordinate(const std::shared_ptr<Meeting>& meeting) {
  const auto lost = [meeting](int32_t replica, const std::string& why) {
    meeting->Lose(absl::UnavailableError(absl::StrCat("replica ", replica, " was lost: ", why)));
  };
  absl::StatusOr<std::unique_ptr<GroupLeader>> leader =
      GroupLeader::Start({.address = options_.address,
                          .credentials = options_.credentials,
                          .identity = options_.identity,
                          .rank_timeout = options_.replica_timeout,
                          .services = {&passes_},
                          .calls = kCallsOfAReplica,
                          .on_lost = lost,
                          .on_late = LogLate});
  if (!leader.ok()) return leader.status();
  const Interruptible interruptible(*meeting, [&leader] { (*leader)->End(); });
  for (;;) {
    const absl::Status joined = (*leader)->AwaitRanks(kLookAgain);
    if (stopping()) return absl::CancelledError("this replica leaves");
    if (joined.ok()) break;
    if (!absl::IsDeadlineExceeded(joined)) return joined;
    Tell(absl::UnavailableError(joined.message()));
    TellAllWaiting(absl::UnavailableError(joined.message()));
  }
  std::optional<Ticker> telling(
      std::in_place, kLookWhoAgrees,
      [this, &leader, &meeting, since = absl::Now()] { TellAgreeing(**leader, *meeting, since); });
  std::shared_ptr<const engine::ReplicaCommunicators> replicas;
  const absl::StatusOr<engine::Agreement> agreement = Agree((*leader)->rendezvous(), *meeting, &replicas);
  if (!agreement.ok()) return agreement.status();
  const auto coordination = std::make_shared<Coordination>(
      Coordination{replicas, (*leader)->Questions(), std::make_shared<engine::CoordinatedEpoch>(), meeting});
  if (absl::Status settled = Settle(*agreement, coordination); !settled.ok()) return settled;
  telling.reset();
  TellSettled(agreement->history);
  {
    const engine::MutexLock lock(mutex_);
    coordination_ = coordination;
    changed_.NotifyAll();
  }
  Tell(absl::OkStatus());
  while (meeting->lost().ok() && !stopping()) meeting->AwaitLoss(absl::Seconds(1));
  if (stopping()) meeting->Lose(absl::CancelledError("this replica leaves"));
  Tell(meeting->lost());
  coordination->epoch->Close();
  return meeting->lost();
}

absl::Status MeetingReplica::Settle(const engine::Agreement& agreement,
                                    const std::shared_ptr<Coordination>& coordination) {
  const OtherReplicas others(coordination->questions, options_.place.replicas);
  const absl::StatusOr<engine::Engine::WentBack> went = engine_->GoBack(
      agreement,
      {.replicas = [this, coordination](const engine::Head& head) { return ReplicasOf(*coordination, head); },
       .create = [&others](const engine::HeadConfig& config) { return ReplaceAtOthers(others, config); },
       .drop = [&others](const std::string& name) { return DropHeadAtOthers(others, name); }});
  if (absl::Status lost = coordination->meeting->lost(); !lost.ok()) return lost;
  if (!went.ok()) {
    return absl::Status(went.status().code(),
                        absl::StrCat("the replicas are not alike, and could not go back to their newest "
                                     "checkpoints: ",
                                     went.status().message()));
  }
  for (const engine::CheckpointInfo& head : went->restored) {
    Log(LogLevel::kWarning, "a head went back to its newest checkpoint, since its replicas were not alike",
        {{"head", head.head},
         {"checkpoint", head.tag},
         {"generation", head.generation},
         {"optimizer_steps", head.optimizer_steps}});
  }
  for (const engine::Engine::GoneHead& gone : went->gone) LogGone(gone);
  group::v1::ReplicaCommand whole;
  whole.mutable_whole()->set_history(agreement.history);
  return others.Ask("SetIsWhole", whole);
}

void MeetingReplica::TellAgreeing(GroupLeader& leader, Meeting& meeting, absl::Time since) {
  // The thread of this epoch may wait for answers of replicas that wait for a lost one at their devices.
  if (!meeting.lost().ok()) return meeting.Interrupt();
  const AwaitedOffers awaited = leader.Awaited();
  const absl::Duration time = awaited.ranks.empty() ? absl::Now() - since : awaited.time;
  if (time < options_.replica_timeout) return;
  Tell(StillAgreeing(awaited, agreeing_.load()), time);
}

absl::Status MeetingReplica::Follow(const std::shared_ptr<Meeting>& meeting) {
  GroupMemberOptions options{.address = options_.address,
                             .credentials = options_.credentials,
                             .identity = options_.identity,
                             .rank = options_.place.replica,
                             .rank_timeout = options_.replica_timeout,
                             .on_lost = [meeting](const absl::Status& why) { meeting->Lose(why); },
                             .on_end = [meeting] { meeting->Lose(CoordinatorLeft()); }};
  options.start_timeout = search_;
  std::string why;
  options.on_waiting = [this, &why](const std::string& now) {
    why = now;
    return !stopping();
  };
  absl::StatusOr<std::unique_ptr<GroupMember>> member = GroupMember::Join(options);
  search_ = member.ok() ? kSearch : std::min(2 * search_, 8 * kSearch);
  if (absl::IsDeadlineExceeded(member.status())) {
    return absl::UnavailableError(absl::StrCat("replica 0 is missing: replica ", options_.place.replica,
                                               " found no leader at ", options_.address, ": ", why));
  }
  if (stopping()) return absl::CancelledError("this replica leaves");
  if (!member.ok()) return member.status();
  const Interruptible interruptible(*meeting, [&member] { (*member)->Leave(); });
  if (stopping()) return absl::CancelledError("this replica leaves");  // who interrupts may have come before
  std::shared_ptr<const engine::ReplicaCommunicators> replicas;
  const absl::StatusOr<engine::Agreement> agreement = Agree((*member)->rendezvous(), *meeting, &replicas);
  if (!agreement.ok()) return agreement.status();
  const CoordinatorCalls calls{
      .channel = (*member)->channel(),
      .identify = [credentials = options_.credentials](
                      grpc::ClientContext* context) { ShowToken(credentials, context); },
      .epoch = std::make_shared<EpochCalls>()};
  absl::Status ended = (*member)->Answer(
      [this, &replicas, &meeting, &calls](const std::string& command, GroupMember::Reply reply) {
        Take(command, std::move(reply), replicas, meeting, calls);
      },
      [this] { return stopping(); });
  {
    const engine::MutexLock lock(mutex_);
    when_drained_ = nullptr;
    // Who drains hears of no other coordinator any more.
    coordinator_drains_ = coordinator_drains_ && engine_->draining();
  }
  if (ended.ok()) ended = CoordinatorLeft();
  Tell(ended);
  return ended;
}

absl::StatusOr<engine::Agreement> MeetingReplica::Agree(
    Rendezvous& rendezvous, Meeting& meeting, std::shared_ptr<const engine::ReplicaCommunicators>* replicas) {
  group::v1::ReplicaHello own;
  ToProto(DescribeHeads(*engine_, history()), &own);
  own.set_new_history(RandomHistory());
  std::vector<std::string> said;
  agreeing_ = "what there is";
  if (absl::Status heard = AllGather(rendezvous, own.SerializeAsString(), &said); !heard.ok()) return heard;
  std::vector<engine::MetReplica> all;
  uint64_t new_history = 0;
  for (const std::string& one : said) {
    group::v1::ReplicaHello hello;
    if (!hello.ParseFromString(one)) return absl::InternalError("a hello cannot be read");
    if (all.empty()) new_history = hello.new_history();
    all.push_back(ToEngine(hello));
  }
  engine::Agreement agreement = engine::Agree(all, new_history);
  if (!agreement.go_back.empty()) engine_->replicas().NoteReturn();
  GoOnOrAbandon(*engine_, agreement);
  agreeing_ = "how to be reached";
  absl::StatusOr<std::shared_ptr<engine::ReplicaConnection>> connection =
      engine_->device().ConnectReplicas(NetworkOf(options_), rendezvous);
  // Without its device it would try for ever: it is to be started again.
  if (absl::IsInternal(connection.status())) engine_->OnDeviceFailure(connection.status());
  if (!connection.ok()) return connection.status();
  if (absl::Status lost = meeting.Take(*connection); !lost.ok()) return lost;
  *replicas = CommunicatorsOf(*std::move(connection));
  return agreement;
}

engine::JointReplicas MeetingReplica::ReplicasOf(const Coordination& coordination,
                                                 const engine::Head& head) const {
  engine::JointReplicas replicas{
      .own = coordination.own,
      .others = {},
      .epoch = coordination.epoch,
      .on_broken = [meeting = coordination.meeting](const absl::Status& why) { meeting->Lose(why); },
      .watch = &engine_->replicas()};
  for (int32_t replica = 1; replica < options_.place.replicas; ++replica) {
    replicas.others.push_back(std::make_shared<RemotePart>(coordination.questions, replica, head.config()));
  }
  return replicas;
}

void MeetingReplica::EndTogether(std::shared_ptr<engine::Head> head, engine::WindowEnd end) {
  work_->Run([this, head = std::move(head), end = std::move(end)] {
    const absl::StatusOr<std::shared_ptr<Coordination>> coordination = Coordinated();
    if (!coordination.ok()) return head->GiveUpEnding(coordination.status(), end);
    EndWindow(head, end, ReplicasOf(**coordination, *head));
  });
}

absl::StatusOr<std::shared_ptr<engine::ReplicaPart>> MeetingReplica::FindPart(const engine::Head& head,
                                                                              int32_t replica) {
  const absl::StatusOr<std::shared_ptr<Coordination>> coordination = Coordinated();
  if (!coordination.ok()) return coordination.status();
  return std::make_shared<RemotePart>((*coordination)->questions, replica, head.config());
}

void MeetingReplica::Take(const std::string& command, GroupMember::Reply reply,
                          const std::shared_ptr<const engine::ReplicaCommunicators>& replicas,
                          const std::shared_ptr<Meeting>& meeting, const CoordinatorCalls& calls) {
  auto parsed = std::make_shared<group::v1::ReplicaCommand>();
  if (!parsed->ParseFromString(command)) return reply(absl::InternalError("a command cannot be read"));
  if (IsHeadCommand(*parsed)) {
    work_->Run([this, parsed, reply = std::move(reply)] { reply(DoHeadCommand(*engine_, *parsed)); });
  } else if (SessionRouter::Takes(*parsed)) {
    about_sessions_->Run([this, parsed, reply = std::move(reply)] { reply(sessions_.Do(*parsed)); });
  } else if (parsed->has_drains()) {
    HearOfDrain(parsed->drains(), std::move(reply));
  } else if (parsed->has_whole()) {
    HearOfWhole(parsed->whole().history(), calls);
    reply("");
  } else {
    DoPart(*engine_, replicas, *parsed, std::move(reply),
           [meeting](const absl::Status& why) { meeting->Lose(why); });
  }
}

void MeetingReplica::AwaitQuiet() {
  for (std::optional<engine::WorkerPool>* pool : {&work_, &about_sessions_}) {
    std::promise<void> reached;
    (*pool)->Run([&reached] { reached.set_value(); });
    reached.get_future().wait();
  }
  engine_->AwaitExchanges();
}

void MeetingReplica::TellSettled(uint64_t history) {
  engine_->replicas().NoteMeeting(history);
  const engine::MutexLock lock(mutex_);
  settled_history_ = history;
  changed_.NotifyAll();
}

void MeetingReplica::HearOfWhole(uint64_t history, CoordinatorCalls calls) {
  TellSettled(history);
  {
    const engine::MutexLock lock(mutex_);
    to_coordinator_ = std::move(calls);
  }
  Tell(absl::OkStatus());
}

bool MeetingReplica::AwaitMeeting(const std::function<bool()>& told_to_end) {
  while (!told_to_end()) {
    const auto deadline = DeadlineAfter(kLookAgain);
    const engine::MutexLock lock(mutex_);
    while (!whole_.ok() && changed_.WaitUntil(mutex_, deadline) != std::cv_status::timeout) {
    }
    if (whole_.ok()) return true;
  }
  return false;
}

absl::StatusOr<CoordinatorCalls> MeetingReplica::Coordinator() const {
  const engine::MutexLock lock(mutex_);
  if (!to_coordinator_.has_value()) return NotWholeLocked();
  absl::StatusOr<std::shared_ptr<const void>> place = pass_places_.Take();
  if (!place.ok()) return place.status();
  CoordinatorCalls calls = *to_coordinator_;
  calls.place = *std::move(place);
  return calls;
}

absl::Status MeetingReplica::NotWholeLocked() const {
  return absl::UnavailableError(absl::StrCat("not all replicas are there: ", whole_.message()));
}

absl::StatusOr<std::shared_ptr<MeetingReplica::Coordination>> MeetingReplica::Coordinated() const {
  const engine::MutexLock lock(mutex_);
  if (coordination_ == nullptr) return NotWholeLocked();
  return coordination_;
}

absl::StatusOr<OtherReplicas> MeetingReplica::Others() const {
  const absl::StatusOr<std::shared_ptr<Coordination>> coordination = Coordinated();
  if (!coordination.ok()) return coordination.status();
  return OtherReplicas((*coordination)->questions, options_.place.replicas);
}

// A drain of all

void MeetingReplica::TellDraining() {
  told_draining_ = absl::Now();
  group::v1::ReplicaCommand command;
  command.mutable_drains();
  const absl::StatusOr<OtherReplicas> others = Others();
  // What goes wrong here AwaitOthersDrained finds out.
  if (others.ok()) others->Ask("CoordinatorDrains", command).IgnoreError();
}

absl::Status MeetingReplica::AwaitOthersDrained(absl::Time deadline) {
  group::v1::ReplicaCommand command;
  command.mutable_drains()->set_saves(true);
  const absl::Time soon = std::min(deadline, told_draining_ + kToldTogether);
  for (;;) {
    const absl::StatusOr<OtherReplicas> others = Others();
    if (!others.ok()) return others.status();
    const OtherReplicas::Answers answers = others->AskEach("CoordinatorDrains", command);
    if (absl::Status error = FirstError(answers); !error.ok()) return error;
    const bool all =
        std::all_of(answers.begin(), answers.end(), [](const auto& one) { return one->empty(); });
    if (all || absl::Now() >= soon) return absl::OkStatus();
    absl::SleepFor(kLookAgain);
  }
}

void MeetingReplica::HearOfDrain(const group::v1::CoordinatorDrains& drains, GroupMember::Reply reply) {
  const bool draining = engine_->draining();  // asked once: it may begin to at any time
  {
    const engine::MutexLock lock(mutex_);
    coordinator_drains_ = true;
    changed_.NotifyAll();
    if (drains.saves() && draining && !drained_) {
      when_drained_ = std::move(reply);
      return;
    }
  }
  reply(draining ? "" : "goes on");
}

bool MeetingReplica::StayForDrain(absl::Time deadline) {
  GroupMember::Reply reply;
  {
    const engine::MutexLock lock(mutex_);
    drained_ = true;
    reply = std::exchange(when_drained_, nullptr);
  }
  if (reply != nullptr) reply("");
  const absl::Time soon = std::min(deadline, absl::Now() + kToldTogether);
  const engine::MutexLock lock(mutex_);
  for (;;) {
    const absl::Duration left = (coordinator_drains_ ? deadline : soon) - absl::Now();
    if (!whole_.ok() || left <= absl::ZeroDuration()) return coordinator_drains_;
    changed_.WaitUntil(mutex_, DeadlineAfter(left));
  }
}

// Heads and their weights

absl::Status MeetingReplica::CreateTogether(const engine::HeadConfig& config) {
  const absl::StatusOr<OtherReplicas> others = Others();
  return others.ok() ? CreateAtOthers(*others, config) : others.status();
}

absl::Status MeetingReplica::CopyTogether(const engine::HeadCopy& copy,
                                          absl::FunctionRef<absl::Status()> copy_here) {
  std::promise<absl::Status> copied;
  work_->Run([this, &copy, copy_here, &copied] {
    const absl::StatusOr<OtherReplicas> others = Others();
    absl::Status status = others.status();
    if (status.ok()) status = copy_here();
    if (status.ok()) status = CopyAtOthers(*others, copy);
    copied.set_value(std::move(status));
  });
  return copied.get_future().get();
}

absl::StatusOr<bool> MeetingReplica::DeleteTogether(const std::string& name,
                                                    engine::Engine::DiscardGradient discard,
                                                    absl::FunctionRef<absl::Status()> delete_here) {
  const absl::StatusOr<OtherReplicas> others = Others();
  if (!others.ok()) return others.status();
  return DeleteAtAll(*others, name, discard, delete_here);
}

void MeetingReplica::PublishTogether(std::shared_ptr<engine::Head> head,
                                     std::shared_ptr<engine::StagedWrite> write) {
  work_->Run([this, head = std::move(head), write = std::move(write)] { Publish(head, write); });
}

void MeetingReplica::Publish(const std::shared_ptr<engine::Head>& head,
                             const std::shared_ptr<engine::StagedWrite>& write) {
  const absl::StatusOr<std::shared_ptr<Coordination>> coordination = Coordinated();
  if (!coordination.ok()) return head->DropPrepared(coordination.status());
  PublishAtAll(OtherReplicas((*coordination)->questions, options_.place.replicas), head, *write,
               [&coordination](const absl::Status& why) { (*coordination)->meeting->Lose(why); });
}

absl::StatusOr<engine::JointReplicas> MeetingReplica::FindReplicas(const engine::Head& head) {
  const absl::StatusOr<std::shared_ptr<Coordination>> coordination = Coordinated();
  if (!coordination.ok()) return coordination.status();
  return ReplicasOf(**coordination, head);
}

}  // namespace

std::unique_ptr<ReplicaSet> ReplicaSet::Create(ReplicaSetOptions options) {
  return std::make_unique<MeetingReplica>(std::move(options));
}

}  // namespace lossd::rpc
