#include "server/rpc/group/group_state.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/engine/group/rank_channel.h"
#include "server/rpc/group/group_timing.h"
#include "server/rpc/group/group_wire.h"

namespace lossd::rpc {
namespace {

using group::v1::LeaderMessage;
using kernels::collectives::Code;
using kernels::collectives::Result;

// `member` is what messages call one of those that meet: a rank, or a replica.
template <typename Value>
absl::Status CheckSame(const std::string& member, const std::string& what, const Value& expected,
                       const Value& given) {
  if (expected == given) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(member, " 0 has ", what, " ", expected, ", the ", member, " that joins has ", given));
}

// Compares all flags that either end has.
absl::Status CheckAgreed(const std::string& member, const std::map<std::string, std::string>& group,
                         const google::protobuf::Map<std::string, std::string>& given) {
  const std::string leader = absl::StrCat(member, " 0");
  const std::string joining = absl::StrCat("the ", member, " that joins");
  constexpr char kOtherKind[] =
      " has no such flag: one is a rank of a group and the other a replica; is the port right?";
  std::map<std::string, std::string> both = group;
  both.insert(given.begin(), given.end());
  for (const auto& [flag, value] : both) {
    const auto expected = group.find(flag);
    const auto actual = given.find(flag);
    if (expected == group.end()) {
      return absl::FailedPreconditionError(
          absl::StrCat(joining, " has --", flag, "=", value, ", and ", leader, kOtherKind));
    }
    if (actual == given.end()) {
      return absl::FailedPreconditionError(
          absl::StrCat(leader, " has --", flag, "=", value, ", and ", joining, kOtherKind));
    }
    if (expected->second != actual->second) {
      return absl::FailedPreconditionError(absl::StrCat(leader, " has --", flag, "=", expected->second, ", ",
                                                        joining, " has --", flag, "=", actual->second,
                                                        "; start all with the same"));
    }
  }
  return absl::OkStatus();
}

std::shared_ptr<LeaderMessage> MessageOf(const engine::GroupCommand& command) {
  auto message = std::make_shared<LeaderMessage>();
  message->mutable_command()->set_command(SerializeCommand(command));
  message->mutable_command()->set_name(engine::NameOf(command));
  message->mutable_command()->set_interrupts(engine::Interrupts(command));
  return message;
}

absl::Status StatusOf(const group::v1::Reply& reply, const std::string& who = "") {
  if (reply.code() == 0) return absl::OkStatus();
  absl::Status status(static_cast<absl::StatusCode>(reply.code()), absl::StrCat(who, reply.message()));
  for (const auto& [type, payload] : reply.payloads()) status.SetPayload(type, absl::Cord(payload));
  return status;
}

}  // namespace

std::string RankList(const std::vector<int32_t>& ranks, const std::string& member) {
  return absl::StrCat(member, ranks.size() == 1 ? " " : "s ", absl::StrJoin(ranks, ", "));
}

std::vector<int32_t> GroupState::Round::Missing() const {
  std::vector<int32_t> missing;
  for (size_t rank = 0; rank < offers.size(); ++rank) {
    if (!offers[rank].has_value()) missing.push_back(static_cast<int32_t>(rank));
  }
  return missing;
}

bool GroupState::Question::answered() const {
  return std::all_of(replies.begin(), replies.end(), [](const auto& reply) { return reply.has_value(); });
}

GroupState::GroupState(GroupIdentity identity, absl::Duration rank_timeout, RankLost on_lost,
                       DrainAsked on_drain, AnswerLate on_late)
    : identity_(std::move(identity)),
      rank_timeout_(rank_timeout),
      on_lost_(std::move(on_lost)),
      on_drain_(std::move(on_drain)),
      on_late_(std::move(on_late)),
      members_(static_cast<size_t>(identity_.ranks)) {}

// Joining and leaving

absl::Status GroupState::Check(const group::v1::Hello& hello) const {
  if (!over_.ok()) return over_;
  const std::string& member = identity_.member;
  absl::Status status;
  if (hello.epoch() != 0) status = CheckSame(member, "epoch", identity_.epoch, int64_t{hello.epoch()});
  if (status.ok()) {
    const std::string number = absl::StrCat("a number of ", member, "s of");
    status = CheckSame(member, number, identity_.ranks, int32_t{hello.ranks()});
  }
  if (status.ok()) status = CheckSame(member, "version", identity_.version, hello.version());
  if (status.ok()) {
    status = CheckSame(member, "devices of the kind", identity_.device_kind, hello.device_kind());
  }
  if (status.ok()) status = CheckAgreed(member, identity_.agreed, hello.agreed());
  if (!status.ok()) return status;
  if (hello.rank() < 1 || hello.rank() >= identity_.ranks) {
    return absl::FailedPreconditionError(absl::StrCat("the ", member, " that joins is ", hello.rank(),
                                                      "; there are ", member, "s from 1 to ",
                                                      identity_.ranks - 1));
  }
  const Member& first = members_[static_cast<size_t>(hello.rank())];
  if (!first.joined) return absl::OkStatus();
  const std::string from = first.stream == nullptr ? "" : first.stream->Peer();
  return absl::AlreadyExistsError(
      absl::StrCat("the ", member, " that joins is ", hello.rank(), ", and so is one that has joined before",
                   from.empty() ? "" : absl::StrCat(", from ", from), "; give each its own number"));
}

absl::Status GroupState::Join(const group::v1::Hello& hello, std::shared_ptr<RankStream> stream) {
  const engine::MutexLock lock(mutex_);
  if (absl::Status status = Check(hello); !status.ok()) return status;
  auto welcome = std::make_shared<LeaderMessage>();
  welcome->mutable_welcome()->set_epoch(identity_.epoch);
  stream->Write(std::move(welcome));
  members_[static_cast<size_t>(hello.rank())] = {.stream = std::move(stream), .joined = true, .silent = 0};
  const group::v1::Lanes& lanes = hello.lanes();
  members_[static_cast<size_t>(hello.rank())].lanes = {
      .host = lanes.host(), .port = lanes.port(), .suffix = lanes.suffix()};
  changed_.NotifyAll();
  return absl::OkStatus();
}

std::vector<RankLanes> GroupState::Lanes() {
  std::vector<RankLanes> lanes;
  const engine::MutexLock lock(mutex_);
  for (size_t rank = 1; rank < members_.size(); ++rank) lanes.push_back(members_[rank].lanes);
  return lanes;
}

void GroupState::Leave(int32_t rank, const std::string& why) {
  bool first = false;
  {
    const engine::MutexLock lock(mutex_);
    members_[static_cast<size_t>(rank)].stream = nullptr;
    first = Lose(rank, why);
    changed_.NotifyAll();
  }
  if (first) TellLost(rank, why);
}

bool GroupState::Lose(int32_t rank, const std::string& why) {
  if (!over_.ok()) return false;
  over_ = absl::UnavailableError(absl::StrCat(identity_.member, " ", rank, " was lost: ", why));
  changed_.NotifyAll();
  return true;
}

void GroupState::TellLost(int32_t rank, const std::string& why) {
  if (on_lost_ != nullptr) on_lost_(rank, why);
  GiveUpAsked();
  const engine::MutexLock lock(mutex_);
  for (const Member& member : members_) {
    if (member.stream != nullptr) member.stream->Cancel();
  }
}

void GroupState::Beat() {
  int32_t lost = 0;
  std::string why;
  Unanswered unanswered;
  {
    const engine::MutexLock lock(mutex_);
    auto heartbeat = std::make_shared<LeaderMessage>();
    heartbeat->mutable_heartbeat();
    Broadcast(heartbeat);
    for (int32_t rank = 1; rank < ranks(); ++rank) {
      const std::string missed = Missed(members_[static_cast<size_t>(rank)]);
      if (missed.empty() || !Lose(rank, missed)) continue;
      lost = rank;
      why = missed;
    }
    unanswered = AgeAsked();
    if (unanswered.lost.has_value()) {
      const std::string did_not = absl::StrCat("it did not answer ", unanswered.lost->command, " for ",
                                               absl::FormatDuration(PatienceWithAnswers(rank_timeout_)));
      if (Lose(unanswered.lost->rank, did_not)) {
        lost = unanswered.lost->rank;
        why = did_not;
      }
    }
  }
  for (const Late& late : unanswered.late) {
    if (on_late_ != nullptr) on_late_(late.rank, late.command, PatienceWithCommands(rank_timeout_));
  }
  if (lost > 0) TellLost(lost, why);
}

GroupState::Unanswered GroupState::AgeAsked() {
  const absl::Duration interval = HeartbeatInterval(rank_timeout_);
  Unanswered unanswered;
  for (auto& [number, asked] : asked_) {
    const absl::Duration age = ++asked.age * interval;
    const absl::Duration before = age - interval;
    const auto reaches = [&](absl::Duration bound) { return before < bound && age >= bound; };
    if (reaches(PatienceWithCommands(rank_timeout_))) unanswered.late.push_back({asked.rank, asked.name});
    if (asked.answers != Answers::kSoon || age < PatienceWithAnswers(rank_timeout_)) continue;
    if (!unanswered.lost.has_value()) unanswered.lost = Late{asked.rank, asked.name};
  }
  return unanswered;
}

std::string GroupState::Missed(Member& member) const {
  if (member.stream == nullptr) return "";
  const int64_t most = HeartbeatsToLoss(rank_timeout_);
  const bool silent = ++member.silent >= most;
  member.stuck = member.stream->IsStuck() ? member.stuck + 1 : 0;
  if (!silent && member.stuck < most) return "";
  return absl::StrCat(silent ? "it was silent for " : "it took nothing for ",
                      absl::FormatDuration(rank_timeout_));
}

absl::Status GroupState::Await(absl::Duration timeout, IsThere is_there, const char* what) {
  const Clock::time_point deadline = DeadlineAfter(timeout);
  const engine::MutexLock lock(mutex_);
  for (;;) {
    if (!over_.ok()) return over_;
    std::vector<int32_t> missing;
    for (int32_t rank = 1; rank < ranks(); ++rank) {
      if (!is_there(members_[static_cast<size_t>(rank)])) missing.push_back(rank);
    }
    if (missing.empty()) return absl::OkStatus();
    if (Clock::now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat(RankList(missing, identity_.member), " of ", ranks(), " did not ", what));
    }
    changed_.WaitUntil(mutex_, deadline);
  }
}

absl::Status GroupState::AwaitRanks(absl::Duration timeout) {
  return Await(
      timeout, [](const Member& member) { return member.joined; }, "join");
}

absl::Status GroupState::AwaitReports(absl::Duration timeout) {
  return Await(
      timeout, [](const Member& member) { return member.report.has_value(); }, "become ready");
}

// Commands

void GroupState::Broadcast(const std::shared_ptr<const LeaderMessage>& message) {
  for (const Member& member : members_) {
    if (member.stream != nullptr) member.stream->Write(message);
  }
}

uint64_t GroupState::BroadcastCommand(const std::shared_ptr<LeaderMessage>& message) {
  message->mutable_command()->set_number(++last_command_);
  Broadcast(message);
  return last_command_;
}

void GroupState::Send(const engine::GroupCommand& command) {
  auto message = MessageOf(command);
  const engine::MutexLock lock(mutex_);
  if (!over_.ok()) return;
  if (const auto* batch = std::get_if<engine::StartBatchCommand>(&command)) answers_.Start(*batch);
  BroadcastCommand(message);
}

void GroupState::SendTo(int32_t rank, const engine::GroupCommand& command) {
  auto message = MessageOf(command);
  const engine::MutexLock lock(mutex_);
  const Member& member = members_[static_cast<size_t>(rank)];
  if (!over_.ok() || member.stream == nullptr) return;
  message->mutable_command()->set_number(++last_command_);
  member.stream->Write(std::move(message));
}

void GroupState::AskRank(int32_t rank, const std::string& name, std::string command, Answers answers,
                         RankAnswered done) {
  auto message = std::make_shared<LeaderMessage>();
  message->mutable_command()->set_command(std::move(command));
  message->mutable_command()->set_name(name);
  absl::Status over;
  {
    const engine::MutexLock lock(mutex_);
    over = over_;
    if (over.ok()) {
      message->mutable_command()->set_number(++last_command_);
      asked_[last_command_] = {.rank = rank, .name = name, .answers = answers, .done = std::move(done)};
      const Member& member = members_[static_cast<size_t>(rank)];
      if (member.stream != nullptr) member.stream->Write(std::move(message));
      return;
    }
  }
  done(over, over);
}

RankAnswered GroupState::TakeAsked(int32_t rank, uint64_t number) {
  const auto asked = asked_.find(number);
  if (asked == asked_.end() || asked->second.rank != rank) return nullptr;
  RankAnswered done = std::move(asked->second.done);
  asked_.erase(asked);
  return done;
}

void GroupState::GiveUpAsked() {
  std::map<uint64_t, Asked> asked;
  absl::Status over;
  {
    const engine::MutexLock lock(mutex_);
    asked.swap(asked_);
    over = over_;
  }
  for (const auto& [number, waiting] : asked) waiting.done(over, over);
}

absl::Status GroupState::Ask(const engine::GroupCommand& command) {
  auto message = MessageOf(command);
  const engine::MutexLock lock(mutex_);
  if (!over_.ok()) return over_;
  const uint64_t number = BroadcastCommand(message);
  Question& question = questions_[number];  // maps leave values where they are
  question.replies.resize(members_.size());
  question.replies[0] = absl::OkStatus();
  while (over_.ok() && !question.answered()) changed_.Wait(mutex_);
  absl::Status status = question.answered() ? absl::OkStatus() : over_;
  for (const auto& reply : question.replies) {
    if (status.ok()) status = *reply;
  }
  questions_.erase(number);
  return status;
}

absl::Status GroupState::Take(int32_t rank, const group::v1::MemberMessage& message) {
  // Large, and read without the lock that the device's loop needs, too.
  if (message.has_answered()) return TakeAnswered(rank, ParseAnswer(message.answered()));
  if (message.has_report()) return TakeReport(rank, ParseReport(message.report()));
  RankAnswered done;
  {
    const engine::MutexLock lock(mutex_);
    if (!over_.ok()) return absl::OkStatus();  // it is late
    members_[static_cast<size_t>(rank)].silent = 0;
    if (message.has_reply()) done = TakeAsked(rank, message.reply().number());
    if (done == nullptr && !message.has_drain()) return TakeLocked(rank, message);
    if (message.has_drain() && std::exchange(drain_asked_, true)) return absl::OkStatus();
  }
  if (done != nullptr) {
    const absl::Status replied = StatusOf(message.reply());
    done(absl::OkStatus(), replied.ok() ? absl::StatusOr<std::string>(message.reply().data()) : replied);
  } else if (on_drain_ != nullptr) {
    on_drain_(rank);
  }
  return absl::OkStatus();
}

absl::Status GroupState::TakeLocked(int32_t rank, const group::v1::MemberMessage& message) {
  switch (message.message_case()) {
    case group::v1::MemberMessage::kAnswered:
    case group::v1::MemberMessage::kDrain:
    case group::v1::MemberMessage::kHeartbeat:
    case group::v1::MemberMessage::kReport:
      return absl::OkStatus();
    case group::v1::MemberMessage::kOffer:
      return TakeOffer(rank, message.offer());
    case group::v1::MemberMessage::kReply:
      return TakeReply(rank, message.reply());
    case group::v1::MemberMessage::kApplied:
      return TakeApplied(rank);
    case group::v1::MemberMessage::kHello:
      return absl::InvalidArgumentError("hello came twice");
    case group::v1::MemberMessage::MESSAGE_NOT_SET:
      break;
  }
  return absl::InternalError("a message says nothing");
}

absl::Status GroupState::TakeReply(int32_t rank, const group::v1::Reply& reply) {
  const auto question = questions_.find(reply.number());
  if (question == questions_.end() || question->second.replies[static_cast<size_t>(rank)].has_value()) {
    return absl::InternalError(absl::StrCat("nobody waits for a reply to command ", reply.number()));
  }
  question->second.replies[static_cast<size_t>(rank)] =
      StatusOf(reply, absl::StrCat(identity_.member, " ", rank, ": "));
  changed_.NotifyAll();
  return absl::OkStatus();
}

absl::Status GroupState::TakeAnswered(int32_t rank, absl::StatusOr<engine::AnsweredChunk> chunk) {
  const engine::MutexLock lock(mutex_);
  if (!over_.ok()) return absl::OkStatus();  // it is late
  if (!chunk.ok()) return absl::InternalError(chunk.status().message());
  members_[static_cast<size_t>(rank)].silent = 0;
  if (absl::Status status = answers_.Take(rank, *chunk); !status.ok()) return status;
  const engine::MutexLock answered_lock(answered_mutex_);
  answered_.push_back(*std::move(chunk));
  any_answered_ = true;
  return absl::OkStatus();
}

std::vector<engine::AnsweredChunk> GroupState::TakeAnswered() {
  if (!any_answered_) return {};
  const engine::MutexLock lock(answered_mutex_);
  any_answered_ = false;
  return std::exchange(answered_, {});
}

absl::Status GroupState::TakeApplied(int32_t rank) {
  uint64_t& applied = members_[static_cast<size_t>(rank)].applied;
  if (applied == answers_.started()) {
    return absl::InternalError("it has applied more batches than were started");
  }
  if (absl::Status status = answers_.CheckApplied(rank, applied + 1); !status.ok()) return status;
  ++applied;
  uint64_t fewest = std::numeric_limits<uint64_t>::max();
  for (size_t member = 1; member < members_.size(); ++member) {
    fewest = std::min(fewest, members_[member].applied);
  }
  batches_applied_ = fewest;
  return absl::OkStatus();
}

absl::Status GroupState::TakeReport(int32_t rank, absl::StatusOr<engine::RankReport> report) {
  const engine::MutexLock lock(mutex_);
  if (!over_.ok()) return absl::OkStatus();  // it is late
  if (!report.ok()) return absl::InternalError(report.status().message());
  Member& member = members_[static_cast<size_t>(rank)];
  member.silent = 0;
  member.report = *std::move(report);
  changed_.NotifyAll();
  return absl::OkStatus();
}

engine::GroupReport GroupState::Report() {
  engine::GroupReport group{
      .epoch = identity_.epoch, .patience = PatienceWithCommands(rank_timeout_), .ranks = {}};
  const engine::MutexLock lock(mutex_);
  for (const Member& member : members_) group.ranks.push_back(member.report.value_or(engine::RankReport()));
  return group;
}

// Rendezvous

GroupState::Round& GroupState::RoundOf(int64_t number) {
  Round& round = rounds_[number];
  round.offers.resize(members_.size());
  return round;
}

absl::Status GroupState::TakeOffer(int32_t rank, const group::v1::Offer& offer) {
  // The others need the leader's offer of a round before they come to the next one.
  const bool was = rounds_.count(offer.round()) == 0 && offer.round() <= own_round_ && rank != 0;
  if (was || offer.round() < 1 || offer.round() > own_round_ + 1) {
    return absl::InternalError(
        absl::StrCat("an offer in round ", offer.round(), ", when the leader is at ", own_round_));
  }
  Round& round = RoundOf(offer.round());
  std::optional<std::string>& own = round.offers[static_cast<size_t>(rank)];
  if (own.has_value()) return absl::InternalError(absl::StrCat("a second offer in round ", offer.round()));
  own = offer.data();
  auto message = std::make_shared<LeaderMessage>();
  const std::vector<int32_t> missing = round.Missing();
  if (missing.empty()) {
    message->mutable_gathered()->set_round(offer.round());
    for (const auto& data : round.offers) message->mutable_gathered()->add_data(*data);
  } else {
    message->mutable_waiting()->set_round(offer.round());
    message->mutable_waiting()->mutable_missing()->Assign(missing.begin(), missing.end());
  }
  Broadcast(message);
  changed_.NotifyAll();
  return absl::OkStatus();
}

Result GroupState::AwaitOffers(const Round& round, Clock::time_point deadline) {
  for (;;) {
    const std::vector<int32_t> missing = round.Missing();
    if (missing.empty()) return {};
    if (!over_.ok()) return {Code::kPeerLost, std::string(over_.message())};
    if (Clock::now() >= deadline) {
      return {Code::kTimeout,
              absl::StrCat("rendezvous: ", RankList(missing, identity_.member), " did not come in time")};
    }
    changed_.WaitUntil(mutex_, deadline);
  }
}

Result GroupState::AllGather(std::string own, std::chrono::milliseconds timeout,
                             std::vector<std::string>* all) {
  const Clock::time_point deadline = DeadlineAfter(absl::FromChrono(timeout));
  const engine::MutexLock lock(mutex_);
  if (!over_.ok()) return {Code::kPeerLost, std::string(over_.message())};
  const int64_t number = ++own_round_;
  group::v1::Offer offer;
  offer.set_round(number);
  offer.set_data(std::move(own));
  if (const absl::Status status = TakeOffer(0, offer); !status.ok()) {
    return {Code::kFailed, std::string(status.message())};
  }
  Round& round = rounds_[number];
  own_round_since_ = Clock::now();
  const Result awaited = AwaitOffers(round, deadline);
  own_round_since_.reset();
  if (!awaited.ok()) return awaited;
  all->clear();
  for (auto& data : round.offers) all->push_back(*std::move(data));
  rounds_.erase(number);
  return {};
}

AwaitedOffers GroupState::Awaited() {
  const engine::MutexLock lock(mutex_);
  if (!own_round_since_.has_value()) return {};
  return {.ranks = rounds_[own_round_].Missing(), .time = absl::FromChrono(Clock::now() - *own_round_since_)};
}

// The end

void GroupState::SetServing(bool ready) {
  const engine::MutexLock lock(mutex_);
  if (!over_.ok() || draining_ || serving_ == ready) return;
  serving_ = ready;
  auto message = std::make_shared<LeaderMessage>();
  message->mutable_serving()->set_ready(ready);
  Broadcast(message);
}

void GroupState::TellDraining() {
  const engine::MutexLock lock(mutex_);
  if (!over_.ok() || draining_) return;
  draining_ = true;
  auto message = std::make_shared<LeaderMessage>();
  message->mutable_serving()->set_draining(true);
  Broadcast(message);
}

bool GroupState::End() {
  {
    const engine::MutexLock lock(mutex_);
    if (!over_.ok()) return false;
    over_ = absl::UnavailableError("the group has ended");
    auto end = std::make_shared<LeaderMessage>();
    end->mutable_end();
    Broadcast(end);
    for (const Member& member : members_) {
      if (member.stream != nullptr) member.stream->Close();
    }
    changed_.NotifyAll();
  }
  GiveUpAsked();
  return true;
}

void GroupState::AwaitLeft(absl::Duration timeout) {
  const Clock::time_point deadline = DeadlineAfter(timeout);
  const engine::MutexLock lock(mutex_);
  const auto there = [](const Member& member) { return member.stream != nullptr; };
  while (Clock::now() < deadline && std::any_of(members_.begin(), members_.end(), there)) {
    changed_.WaitUntil(mutex_, deadline);
  }
}

}  // namespace lossd::rpc
