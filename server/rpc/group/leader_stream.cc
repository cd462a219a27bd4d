#include "server/rpc/group/leader_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/rpc/group/group_state.h"
#include "server/rpc/group/group_timing.h"

namespace lossd::rpc {

using group::v1::LeaderMessage;
using group::v1::MemberMessage;
using kernels::collectives::Code;
using kernels::collectives::Result;

LeaderStream::LeaderStream(group::v1::GroupService::Stub* stub, std::string member,
                           absl::Duration rank_timeout, Events events)
    : stub_(stub), member_(std::move(member)), rank_timeout_(rank_timeout), events_(std::move(events)) {}

LeaderStream::~LeaderStream() {
  const engine::MutexLock lock(mutex_);
  leaving_ = true;
  if (!started_) return;
  if (!done_) context_.TryCancel();
  while (!done_) changed_.Wait(mutex_);
}

// Beginning and end

void LeaderStream::Begin(const GroupCredentials& credentials, const group::v1::Hello& hello) {
  ShowToken(credentials, &context_);
  auto first = std::make_shared<MemberMessage>();
  *first->mutable_hello() = hello;
  const engine::MutexLock lock(mutex_);
  started_ = open_ = true;
  stub_->async()->Join(&context_, this);
  StartRead(&incoming_);
  Write(std::move(first));
  StartCall();
}

absl::Status LeaderStream::AwaitWelcome(Clock::time_point until) {
  const engine::MutexLock lock(mutex_);
  while (!welcome_ && !done_ && Clock::now() < until) changed_.WaitUntil(mutex_, until);
  if (welcome_) return absl::OkStatus();
  if (!done_) return absl::DeadlineExceededError("the leader did not answer");
  return done_status_.ok() ? absl::UnavailableError("the leader ended the stream") : done_status_;
}

void LeaderStream::OnDone(const grpc::Status& status) {
  bool news = false;
  absl::Status why;
  {
    const engine::MutexLock lock(mutex_);
    done_status_ = absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
    if (welcome_ && !ended_ && !leaving_) {
      news =
          Lose(status.ok() ? "its stream ended" : absl::StrCat("its stream ended: ", status.error_message()));
    }
    why = lost_;
  }
  if (news && events_.on_lost != nullptr) events_.on_lost(why);
  const engine::MutexLock lock(mutex_);
  done_ = true;  // from here on the destructor does not wait
  changed_.NotifyAll();
}

bool LeaderStream::Lose(const std::string& why) {
  if (!lost_.ok()) return false;
  lost_ = absl::UnavailableError(absl::StrCat("the leader (", member_, " 0) was lost: ", why));
  changed_.NotifyAll();
  return true;
}

void LeaderStream::Beat() {
  absl::Status why;
  {
    const engine::MutexLock lock(mutex_);
    if (ended_ || !open_) return;
    auto heartbeat = std::make_shared<MemberMessage>();
    heartbeat->mutable_heartbeat();
    Write(std::move(heartbeat));
    if (++silent_ < HeartbeatsToLoss(rank_timeout_)) return;
    if (!Lose(absl::StrCat("it was silent for ", absl::FormatDuration(rank_timeout_)))) return;
    why = lost_;
  }
  // The leader may still hear this rank, which it does not know to be deaf.
  context_.TryCancel();
  if (events_.on_lost != nullptr) events_.on_lost(why);
}

// Messages

void LeaderStream::Write(std::shared_ptr<const MemberMessage> message) {
  if (!open_) return;
  if (const MemberMessage* now = outgoing_.Push(std::move(message)); now != nullptr) StartWrite(now);
}

void LeaderStream::OnWriteDone(bool ok) {
  const engine::MutexLock lock(mutex_);
  if (!ok) {
    open_ = false;
    outgoing_.Clear();
  } else if (const MemberMessage* next = outgoing_.Pop(); next != nullptr) {
    StartWrite(next);
  } else if (ended_) {
    LeaveInOrder();
  }
}

// The leader's stream is over when it hears that nothing more comes from here.
void LeaderStream::LeaveInOrder() {
  if (!open_ || !outgoing_.empty()) return;
  open_ = false;
  StartWritesDone();
}

void LeaderStream::OnReadDone(bool ok) {
  std::optional<Serving> news;
  bool interrupts = false;
  bool ends = false;
  {
    const engine::MutexLock lock(mutex_);
    if (!ok) {
      open_ = false;
      return;
    }
    silent_ = 0;
    interrupts = incoming_.command().interrupts();
    const Serving before = serving_;
    Take();
    ends = incoming_.has_end();
    if (serving_ != before) news = serving_;
    changed_.NotifyAll();
  }
  // The next message, which may bring other news, has yet to be read.
  if (news.has_value() && events_.on_serving != nullptr) events_.on_serving(*news);
  if (ends && events_.on_end != nullptr) events_.on_end();
  if (interrupts) {
    const engine::MutexLock lock(interrupt_mutex_);
    if (interrupt_ != nullptr) interrupt_(incoming_.command().command());
  }
  StartRead(&incoming_);
}

void LeaderStream::SetInterrupt(Interrupt interrupt) {
  const engine::MutexLock lock(interrupt_mutex_);
  interrupt_ = std::move(interrupt);
}

void LeaderStream::Take() {
  switch (incoming_.message_case()) {
    case LeaderMessage::kWelcome:
      welcome_ = true;
      epoch_ = incoming_.welcome().epoch();
      return;
    case LeaderMessage::kServing:
      serving_ = incoming_.serving().ready() ? Serving::kReady : Serving::kNotReady;
      if (incoming_.serving().draining()) serving_ = Serving::kDraining;
      return;
    case LeaderMessage::kGathered: {
      auto& data = *incoming_.mutable_gathered()->mutable_data();
      gathered_[incoming_.gathered().round()].assign(data.begin(), data.end());
      return;
    }
    case LeaderMessage::kWaiting:
      waiting_ = std::move(*incoming_.mutable_waiting());
      return;
    case LeaderMessage::kCommand:
      if (incoming_.command().interrupts()) return;
      commands_.push_back({std::move(*incoming_.mutable_command()), Clock::now()});
      return;
    case LeaderMessage::kEnd:
      ended_ = true;
      LeaveInOrder();
      return;
    case LeaderMessage::kHeartbeat:
    case LeaderMessage::MESSAGE_NOT_SET:
      return;
  }
}

absl::StatusOr<std::optional<group::v1::NumberedCommand>> LeaderStream::Next(Clock::time_point until) {
  const engine::MutexLock lock(mutex_);
  while (lost_.ok() && commands_.empty() && !ended_) {
    if (until == Clock::time_point::max()) {
      changed_.Wait(mutex_);
    } else if (changed_.WaitUntil(mutex_, until) == std::cv_status::timeout) {
      return std::nullopt;
    }
  }
  if (!lost_.ok()) return lost_;
  if (commands_.empty()) return absl::CancelledError("the group has ended");
  group::v1::NumberedCommand command = std::move(commands_.front().command);
  commands_.pop_front();
  return command;
}

void LeaderStream::Reply(uint64_t number, const absl::StatusOr<std::string>& data) {
  auto message = std::make_shared<MemberMessage>();
  const absl::Status& status = data.status();
  group::v1::Reply& reply = *message->mutable_reply();
  reply.set_number(number);
  reply.set_code(static_cast<int>(status.code()));
  reply.set_message(std::string(status.message()));
  if (data.ok()) reply.set_data(*data);
  status.ForEachPayload([&reply](absl::string_view type, const absl::Cord& payload) {
    (*reply.mutable_payloads())[std::string(type)] = std::string(payload);
  });
  const engine::MutexLock lock(mutex_);
  Write(std::move(message));
}

LeaderStream::Waiting LeaderStream::OldestWaiting() {
  const engine::MutexLock lock(mutex_);
  if (commands_.empty()) return {};
  const std::chrono::duration<double> waited = Clock::now() - commands_.front().at;
  return {commands_.front().command.name(), waited.count()};
}

void LeaderStream::Report(std::string report) {
  auto message = std::make_shared<MemberMessage>();
  message->set_report(std::move(report));
  const engine::MutexLock lock(mutex_);
  Write(std::move(message));
}

void LeaderStream::TellAnswered(std::string answered) {
  auto message = std::make_shared<MemberMessage>();
  message->set_answered(std::move(answered));
  const engine::MutexLock lock(mutex_);
  Write(std::move(message));
}

void LeaderStream::TellApplied() {
  auto message = std::make_shared<MemberMessage>();
  message->mutable_applied();
  const engine::MutexLock lock(mutex_);
  Write(std::move(message));
}

void LeaderStream::RequestDrain() {
  auto message = std::make_shared<MemberMessage>();
  message->mutable_drain();
  const engine::MutexLock lock(mutex_);
  Write(std::move(message));
}

void LeaderStream::Break() {
  const engine::MutexLock lock(mutex_);
  if (started_ && !done_) context_.TryCancel();
}

int64_t LeaderStream::epoch() {
  const engine::MutexLock lock(mutex_);
  return epoch_;
}

bool LeaderStream::ended() {
  const engine::MutexLock lock(mutex_);
  return ended_;
}

Serving LeaderStream::serving() {
  const engine::MutexLock lock(mutex_);
  return serving_;
}

// Rendezvous

std::string LeaderStream::WhoIsMissing() const {
  if (waiting_.round() != round_) return absl::StrCat(member_, " 0");
  return RankList({waiting_.missing().begin(), waiting_.missing().end()}, member_);
}

Result LeaderStream::AllGather(std::string own, std::chrono::milliseconds timeout,
                               std::vector<std::string>* all) {
  const Clock::time_point deadline = DeadlineAfter(absl::FromChrono(timeout));
  auto message = std::make_shared<MemberMessage>();
  message->mutable_offer()->set_data(std::move(own));
  const engine::MutexLock lock(mutex_);
  message->mutable_offer()->set_round(++round_);
  Write(std::move(message));
  for (;;) {
    if (const auto found = gathered_.find(round_); found != gathered_.end()) {
      *all = std::move(found->second);
      gathered_.erase(found);
      return {};
    }
    if (!lost_.ok()) return {Code::kPeerLost, std::string(lost_.message())};
    if (ended_) return {Code::kPeerLost, "the group has ended"};
    if (Clock::now() >= deadline) {
      return {Code::kTimeout, absl::StrCat("rendezvous: ", WhoIsMissing(), " did not come in time")};
    }
    changed_.WaitUntil(mutex_, deadline);
  }
}

}  // namespace lossd::rpc
