#include "server/rpc/group/group_member.h"

#include <grpcpp/grpcpp.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/engine/common/worker_pool.h"
#include "server/rpc/group/group_timing.h"
#include "server/rpc/group/group_wire.h"
#include "server/rpc/group/leader_stream.h"
#include "server/rpc/group/ticker.h"

namespace lossd::rpc {
namespace {

using Clock = std::chrono::steady_clock;

// Between two tries to reach a leader that is not there yet; it doubles with each.
constexpr std::chrono::milliseconds kRetry{50};
constexpr std::chrono::milliseconds kMostRetry{1000};
// How long one try waits for an address that does not answer: a name may mean another one by then.
constexpr int kConnectMs = 5000;
// How long one try waits for a welcome, if rank_timeout is not longer: what listens there may be no leader,
// or one whose connection is gone without a word.
constexpr absl::Duration kLeastPatience = absl::Seconds(10);
// How often a member that waits for its leader, or for commands, looks whether it is to leave.
constexpr std::chrono::milliseconds kLookAgain{100};
// How soon the end of a batch is noticed, where a device computes beside this thread.
constexpr std::chrono::microseconds kPollInterval{30};

// A new one for each try, since a channel looks a name up again only after half a minute.
std::shared_ptr<grpc::Channel> ChannelTo(const GroupMemberOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMs);
  arguments.SetInt(GRPC_ARG_DNS_ARES_QUERY_TIMEOUT_MS, kConnectMs);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(options.address, ChannelCredentialsOf(options.credentials), arguments);
}

group::v1::Hello HelloOf(const GroupMemberOptions& options) {
  group::v1::Hello hello;
  hello.set_epoch(options.identity.epoch);
  hello.set_rank(options.rank);
  hello.set_ranks(options.identity.ranks);
  hello.set_version(options.identity.version);
  hello.set_device_kind(options.identity.device_kind);
  hello.mutable_lanes()->set_host(options.lanes.host);
  hello.mutable_lanes()->set_port(options.lanes.port);
  hello.mutable_lanes()->set_suffix(options.lanes.suffix);
  hello.mutable_agreed()->insert(options.identity.agreed.begin(), options.identity.agreed.end());
  return hello;
}

// Whether a try that came to this is followed by another one.
bool MayBeBetterLater(const absl::Status& opened, bool number_may_become_free) {
  if (absl::IsAlreadyExists(opened)) return number_may_become_free;
  // CANCELLED: the leader's process ended, or did not get to hear this rank in time.
  return absl::IsUnavailable(opened) || absl::IsDeadlineExceeded(opened) ||
         absl::IsResourceExhausted(opened) || absl::IsCancelled(opened);
}

// What to look at, where gRPC's words for a connection that did not come about do not say it.
struct Hint {
  enum class When { kTls, kPlain, kBoth };
  const char* says;  // gRPC
  When when;
  const char* hint;
};
constexpr Hint kHints[] = {
    {"verify failed", Hint::When::kTls,
     "--group_tls_ca is not the authority of the certificate that the leader shows"},
    {"wrong version number", Hint::When::kTls, "the leader has no --group_tls_certificate"},
    {"Socket closed", Hint::When::kTls,
     "the authority of --group_tls_certificate may not be the leader's --group_tls_ca"},
    {"reset by peer", Hint::When::kTls,
     "the authority of --group_tls_certificate may not be the leader's --group_tls_ca"},
    {"Socket closed", Hint::When::kPlain,
     "the leader may have certificates: then every rank needs --group_tls_certificate"},
    {"reset by peer", Hint::When::kPlain,
     "the leader may have certificates: then every rank needs --group_tls_certificate"},
    {"Connection refused", Hint::When::kBoth, "nothing listens there: is the leader started, on this port?"},
    {"http1.x server", Hint::When::kBoth, "what listens there is no lossd: is the port right?"},
    {"Failed parsing HTTP/2", Hint::When::kBoth, "what listens there is no lossd: is the port right?"},
    {"before receiving SETTINGS", Hint::When::kBoth,
     "what listens there says nothing: it is no lossd, or stands still"},
    {"imed out", Hint::When::kBoth, "is that host up, and does no firewall drop what goes there?"},
};
constexpr absl::string_view kNameUnknown = "DNS resolution failed";

// Why a try came to nothing, and what to look at.
std::string Explain(const absl::Status& why, const GroupMemberOptions& options) {
  const absl::string_view said = why.message();
  if (absl::StartsWith(said, kNameUnknown)) {
    // The rest of what the resolver says is another with each try.
    const std::string cause(said.substr(said.rfind(": ") + 2));
    const std::string name = options.address.substr(0, options.address.rfind(':'));
    return absl::StrCat("this host does not know the name ", name, ", or not yet (", cause,
                        "): see 'getent hosts ", name, "', or give an address as --",
                        options.identity.member == "rank" ? "group" : options.identity.member, "_leader");
  }
  const auto when = options.credentials.tls() ? Hint::When::kTls : Hint::When::kPlain;
  for (const Hint& each : kHints) {
    if (each.when != Hint::When::kBoth && each.when != when) continue;
    if (absl::StrContains(said, each.says)) return absl::StrCat(said, " (", each.hint, ")");
  }
  return std::string(said);
}

class MemberRendezvous final : public kernels::collectives::Rendezvous {
 public:
  explicit MemberRendezvous(LeaderStream* stream) : stream_(stream) {}

  kernels::collectives::Result AllGather(std::string own, std::chrono::milliseconds timeout,
                                         std::vector<std::string>* all) override {
    return stream_->AllGather(std::move(own), timeout, all);
  }

 private:
  LeaderStream* const stream_;
};

// As long as it lives, what interrupts commands is executed as soon as it comes.
class Interrupting {
 public:
  Interrupting(LeaderStream& stream, engine::RankExecutor& executor) : stream_(stream) {
    stream_.SetInterrupt([&executor](const std::string& command) {
      absl::StatusOr<engine::GroupCommand> parsed = ParseCommand(command);
      if (parsed.ok()) executor.Execute(*std::move(parsed)).IgnoreError();
    });
  }
  ~Interrupting() { stream_.SetInterrupt(nullptr); }
  Interrupting(const Interrupting&) = delete;
  Interrupting& operator=(const Interrupting&) = delete;

 private:
  LeaderStream& stream_;
};

class JoinedMember final : public GroupMember {
 public:
  explicit JoinedMember(const GroupMemberOptions& options)
      : channel_(ChannelTo(options)),
        stub_(group::v1::GroupService::NewStub(channel_)),
        interval_(HeartbeatInterval(options.rank_timeout)) {}

  // One try. CANCELLED: `goes_on` has ended it.
  absl::Status Open(const GroupMemberOptions& options, Clock::time_point deadline,
                    const std::function<bool()>& goes_on);

  int64_t epoch() const override { return stream_->epoch(); }
  bool ended() const override { return stream_->ended(); }
  Serving serving() const override { return stream_->serving(); }
  void RequestDrain() override { stream_->RequestDrain(); }
  void Leave() override { stream_->Break(); }
  kernels::collectives::Rendezvous& rendezvous() override { return *rendezvous_; }
  std::shared_ptr<grpc::Channel> channel() const override { return channel_; }
  absl::Status Run(engine::RankExecutor& executor) override;
  absl::Status Answer(const Take& take, const std::function<bool()>& stop) override;

 private:
  // An error ends the rank. What is executed beside other commands goes to `beside_`, and what interrupts
  // them does not come here.
  absl::Status Execute(const group::v1::NumberedCommand& command, engine::RankExecutor& executor);
  // Tells the leader what the rank has and does. One thread's.
  void Report(const engine::RankExecutor& executor);

  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<group::v1::GroupService::Stub> stub_;
  const absl::Duration interval_;
  std::shared_ptr<LeaderStream> stream_;
  std::unique_ptr<MemberRendezvous> rendezvous_;
  std::unique_ptr<Ticker> heartbeats_;  // it uses the above
  // Both wait for what they do when they go: at the end in order. After an error that may take for ever, and
  // the process ends without it.
  std::unique_ptr<Ticker> reporting_;
  std::optional<engine::WorkerPool> beside_{1};
};

absl::Status JoinedMember::Open(const GroupMemberOptions& options, Clock::time_point deadline,
                                const std::function<bool()>& goes_on) {
  stream_ = std::make_shared<LeaderStream>(
      stub_.get(), options.identity.member, options.rank_timeout,
      LeaderStream::Events{options.on_lost, options.on_end, options.on_serving});
  stream_->Begin(options.credentials, HelloOf(options));
  absl::Status opened;
  do {
    opened = stream_->AwaitWelcome(std::min(deadline, Clock::now() + kLookAgain));
  } while (absl::IsDeadlineExceeded(opened) && Clock::now() < deadline && goes_on());
  if (!opened.ok()) return opened;
  rendezvous_ = std::make_unique<MemberRendezvous>(stream_.get());
  heartbeats_ = std::make_unique<Ticker>(interval_, [this] { stream_->Beat(); });
  return absl::OkStatus();
}

void JoinedMember::Report(const engine::RankExecutor& executor) {
  engine::RankReport report = executor.Report();
  if (report.activity.command.empty()) {
    const LeaderStream::Waiting waiting = stream_->OldestWaiting();
    report.activity.command = waiting.command;
    report.activity.command_seconds = waiting.seconds;
  }
  stream_->Report(SerializeReport(report));
}

absl::Status JoinedMember::Run(engine::RankExecutor& executor) {
  // Short waits of this thread end when they should; others may be off by 50 µs. No matter if it is refused.
  (void)prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
  executor.TellAnswersTo(
      [this](const engine::AnsweredChunk& chunk) { stream_->TellAnswered(SerializeAnswer(chunk)); });
  const Interrupting interrupting(*stream_, executor);
  Report(executor);
  // Not with the heartbeats: a device may keep a report waiting.
  reporting_ = std::make_unique<Ticker>(interval_, [this, &executor] { Report(executor); });
  uint64_t told = 0;  // batches that the leader knows of
  for (;;) {
    const absl::StatusOr<engine::BatchProgress> progress = executor.Poll();
    if (!progress.ok()) return progress.status();
    for (; told < progress->applied; ++told) stream_->TellApplied();
    const Clock::time_point until =
        progress->under_way() ? Clock::now() + kPollInterval : Clock::time_point::max();
    const absl::StatusOr<std::optional<group::v1::NumberedCommand>> command = stream_->Next(until);
    if (absl::IsCancelled(command.status())) {
      beside_.reset();
      reporting_.reset();
      return absl::OkStatus();
    }
    if (!command.ok()) return command.status();
    if (!command->has_value()) continue;
    if (absl::Status executed = Execute(**command, executor); !executed.ok()) return executed;
  }
}

absl::Status JoinedMember::Answer(const Take& take, const std::function<bool()>& stop) {
  for (;;) {
    const absl::StatusOr<std::optional<group::v1::NumberedCommand>> command =
        stream_->Next(Clock::now() + kLookAgain);
    if (absl::IsCancelled(command.status())) return absl::OkStatus();
    if (!command.ok()) return command.status();
    if (stop()) return absl::CancelledError("the member leaves");
    if (!command->has_value()) continue;
    take((*command)->command(), [stream = std::weak_ptr(stream_),
                                 number = (*command)->number()](const absl::StatusOr<std::string>& data) {
      if (const std::shared_ptr<LeaderStream> open = stream.lock(); open != nullptr) {
        open->Reply(number, data);
      }
    });
  }
}

absl::Status JoinedMember::Execute(const group::v1::NumberedCommand& command,
                                   engine::RankExecutor& executor) {
  absl::StatusOr<engine::GroupCommand> parsed = ParseCommand(command.command());
  if (!parsed.ok()) return parsed.status();
  const bool replied_to = engine::IsRepliedTo(*parsed);
  if (engine::IsExecutedBeside(*parsed)) {
    beside_->Run([this, &executor, replied_to, number = command.number(), taken = *std::move(parsed)] {
      const absl::Status executed = executor.Execute(taken);
      if (replied_to) stream_->Reply(number, executed);
    });
    return absl::OkStatus();
  }
  absl::Status executed = executor.Execute(*std::move(parsed));
  if (!replied_to) return executed;
  stream_->Reply(command.number(), executed);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<GroupMember>> GroupMember::Join(const GroupMemberOptions& options) {
  if (absl::Status usable = CheckCredentials(options.credentials); !usable.ok()) return usable;
  const Clock::time_point deadline = DeadlineAfter(options.start_timeout);
  const Clock::time_point borne_until = DeadlineAfter(options.rank_timeout);
  absl::Status why;  // of the last try that the leader answered, or the network
  bool ended = false;
  const auto goes_on = [&] {
    const bool going = options.on_waiting == nullptr ||
                       options.on_waiting(why.ok() ? "it has not answered yet" : Explain(why, options));
    ended = ended || !going;
    return going;
  };
  for (std::chrono::milliseconds pause = kRetry;; pause = std::min(2 * pause, kMostRetry)) {
    auto member = std::make_unique<JoinedMember>(options);
    const Clock::time_point patience = DeadlineAfter(std::max(options.rank_timeout, kLeastPatience));
    absl::Status opened = member->Open(options, std::min(deadline, patience), goes_on);
    if (opened.ok()) return member;
    if (ended) return absl::CancelledError("told to look for the leader no longer");
    if (absl::IsUnimplemented(opened)) {
      return absl::FailedPreconditionError(absl::StrCat("what listens at ", options.address,
                                                        " is not the control of ", options.identity.member,
                                                        " 0; clients are served at another port than it"));
    }
    if (!MayBeBetterLater(opened, Clock::now() < borne_until)) return opened;
    if (why.ok() || !absl::IsDeadlineExceeded(opened)) why = opened;
    for (const auto next = std::min(Clock::now() + pause, deadline); Clock::now() < next;) {
      std::this_thread::sleep_until(std::min<Clock::time_point>(next, Clock::now() + kLookAgain));
      if (!goes_on()) return absl::CancelledError("told to look for the leader no longer");
    }
    if (Clock::now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat(options.identity.member, " ", options.rank, " found no leader at ", options.address,
                       " within ", absl::FormatDuration(options.start_timeout), ": ", Explain(why, options)));
    }
  }
}

}  // namespace lossd::rpc
