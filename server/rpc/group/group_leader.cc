#include "server/rpc/group/group_leader.h"

#include <grpcpp/ext/health_check_service_server_builder_option.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lossd/group/v1/group.grpc.pb.h"
#include "server/rpc/compression.h"
#include "server/rpc/connections/acceptor.h"
#include "server/rpc/connections/call_counts.h"
#include "server/rpc/group/group_timing.h"
#include "server/rpc/group/lobby.h"
#include "server/rpc/group/member_stream.h"
#include "server/rpc/group/ticker.h"
#include "server/rpc/no_plugins.h"

namespace lossd::rpc {
namespace {

// How long the end waits for ranks that do not take what was sent to them.
constexpr absl::Duration kFarewell = absl::Seconds(5);

constexpr int kMostMetadataBytes = 16 << 10;
constexpr size_t kMostHelloBytes = 64 << 10;
// Calls that have shown the token and not yet said hello.
constexpr size_t kMostInLobby = 64;
// Threads of calls that are about to be refused, or to end, and those that wait for the next one.
constexpr int kMoreThreads = 16;

int Milliseconds(absl::Duration duration) {
  return static_cast<int>(std::clamp<int64_t>(absl::ToInt64Milliseconds(duration), 1, 1 << 30));
}

// Not to be guessed from the one before; short enough for a metric and for people.
GroupIdentity WithEpoch(GroupIdentity identity) {
  std::random_device random;
  std::uniform_int_distribution<int64_t> any(1, std::numeric_limits<int32_t>::max());
  if (identity.epoch == 0) identity.epoch = any(random);
  return identity;
}

class GroupService final : public group::v1::GroupService::Service {
 public:
  GroupService(std::shared_ptr<GroupState> state, GroupCredentials credentials, absl::Duration hello_timeout)
      : state_(std::move(state)), credentials_(std::move(credentials)), lobby_(kMostInLobby, hello_timeout) {}

  grpc::Status Join(grpc::ServerContext* context, MemberStream::Stream* stream) override {
    if (!ShowsToken(credentials_, *context)) {
      return {grpc::StatusCode::PERMISSION_DENIED,
              "the token is not that of this group; --group_token_file must hold the same at every node"};
    }
    group::v1::MemberMessage first;
    {
      const Lobby::Visit visit(&lobby_, context);
      if (!visit.admitted()) {
        return {grpc::StatusCode::RESOURCE_EXHAUSTED, "too many ranks have yet to say hello; try again"};
      }
      if (!stream->Read(&first)) return {grpc::StatusCode::CANCELLED, "nobody said hello"};
    }
    // Look() may have cancelled it just before: a rank that joins must not break as soon as it has.
    if (context->IsCancelled()) return {grpc::StatusCode::CANCELLED, "hello came too late"};
    if (first.ByteSizeLong() > kMostHelloBytes) {
      return {grpc::StatusCode::INVALID_ARGUMENT,
              absl::StrCat("hello has ", first.ByteSizeLong(), " bytes; at most ", kMostHelloBytes,
                           " are taken of a rank that has yet to join")};
    }
    return MemberStream::Serve(state_, first, context, stream);
  }

  // Every second or so.
  void Look() { lobby_.Look(); }

 private:
  const std::shared_ptr<GroupState> state_;
  const GroupCredentials credentials_;
  Lobby lobby_;
};

class LeaderRendezvous final : public kernels::collectives::Rendezvous {
 public:
  explicit LeaderRendezvous(std::shared_ptr<GroupState> state) : state_(std::move(state)) {}

  kernels::collectives::Result AllGather(std::string own, std::chrono::milliseconds timeout,
                                         std::vector<std::string>* all) override {
    return state_->AllGather(std::move(own), timeout, all);
  }

 private:
  const std::shared_ptr<GroupState> state_;
};

class LeaderChannel final : public engine::RankChannel {
 public:
  explicit LeaderChannel(std::shared_ptr<GroupState> state) : state_(std::move(state)) {}

  void Send(engine::GroupCommand command) override { state_->Send(command); }
  absl::Status Ask(engine::GroupCommand command) override { return state_->Ask(command); }
  void SendTo(int32_t rank, engine::GroupCommand command) override { state_->SendTo(rank, command); }
  std::vector<engine::AnsweredChunk> TakeAnswered() override { return state_->TakeAnswered(); }
  uint64_t BatchesApplied() const override { return state_->batches_applied(); }
  engine::GroupReport Report() const override { return state_->Report(); }

 private:
  const std::shared_ptr<GroupState> state_;
};

class LeaderQuestions final : public RankQuestions {
 public:
  explicit LeaderQuestions(std::shared_ptr<GroupState> state) : state_(std::move(state)) {}

  void Ask(int32_t rank, const std::string& name, std::string command, Answers answers,
           RankAnswered done) override {
    state_->AskRank(rank, name, std::move(command), answers, std::move(done));
  }

 private:
  const std::shared_ptr<GroupState> state_;
};

class LeaderServer final : public GroupLeader {
 public:
  explicit LeaderServer(GroupLeaderOptions options)
      : state_(std::make_shared<GroupState>(WithEpoch(std::move(options.identity)), options.rank_timeout,
                                            std::move(options.on_lost), std::move(options.on_drain),
                                            std::move(options.on_late))),
        interval_(HeartbeatInterval(options.rank_timeout)),
        hello_timeout_(options.hello_timeout),
        calls_(options.calls),
        rendezvous_(state_),
        others_(std::move(options.services)),
        credentials_(ServerCredentialsOf(options.credentials)),
        service_(state_, std::move(options.credentials), options.hello_timeout) {}
  ~LeaderServer() override;

  absl::Status Listen(const std::string& address);

  int64_t epoch() const override { return state_->epoch(); }
  int port() const override { return acceptor_.port(); }
  absl::Status AwaitRanks(absl::Duration timeout) override { return state_->AwaitRanks(timeout); }
  absl::Status AwaitReports(absl::Duration timeout) override { return state_->AwaitReports(timeout); }
  kernels::collectives::Rendezvous& rendezvous() override { return rendezvous_; }
  AwaitedOffers Awaited() override { return state_->Awaited(); }
  std::vector<RankLanes> Lanes() override { return state_->Lanes(); }
  std::shared_ptr<RankQuestions> Questions() override { return std::make_shared<LeaderQuestions>(state_); }
  std::unique_ptr<engine::RankChannel> Channel() override { return std::make_unique<LeaderChannel>(state_); }
  void SetServing(bool ready) override { state_->SetServing(ready); }
  void TellDraining() override { state_->TellDraining(); }
  void End() override;

 private:
  void Limit(grpc::ServerBuilder& builder) const;

  const std::shared_ptr<GroupState> state_;
  const absl::Duration interval_;
  const absl::Duration hello_timeout_;
  const int calls_;
  LeaderRendezvous rendezvous_;
  const std::vector<grpc::Service*> others_;
  const std::shared_ptr<grpc::ServerCredentials> credentials_;
  GroupService service_;
  Acceptor acceptor_{Acceptor::For::kMembers, {}};
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Ticker> heartbeats_;
};

// What a stranger who reaches the port may take.
void LeaderServer::Limit(grpc::ServerBuilder& builder) const {
  // Answers have up to 544 bytes a token, of as many tokens as --max_chunk_tokens says. Nothing is read of
  // who has not shown the token or a certificate.
  builder.SetMaxReceiveMessageSize(-1);
  RefuseCompression(builder);
  builder.SetOption(std::make_unique<NoPlugins>());
  // gRPC's own, which the process may have enabled for another server.
  builder.SetOption(std::make_unique<grpc::HealthCheckServiceServerBuilderOption>(nullptr));
  // Each call of Join has a thread, also one that was reset before it had begun. Who finds none is told
  // RESOURCE_EXHAUSTED, and a rank tries again.
  grpc::ResourceQuota threads("control");
  threads.SetMaxThreads(state_->ranks() + static_cast<int>(kMostInLobby) + kMoreThreads);
  builder.SetResourceQuota(threads);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMostMetadataBytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, calls_);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, Milliseconds(hello_timeout_));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, Milliseconds(hello_timeout_));
}

absl::Status LeaderServer::Listen(const std::string& address) {
  grpc::ServerBuilder builder;
  Limit(builder);
  builder.SetMaxSendMessageSize(-1);
  builder.RegisterService(&service_);
  for (grpc::Service* service : others_) builder.RegisterService(service);
  const auto refused = [](const absl::Status& why) {
    return absl::UnavailableError(absl::StrCat("control: ", why.message()));
  };
  absl::Status listening = acceptor_.Listen(address, credentials_, builder);
  if (!listening.ok()) return refused(listening);
  server_ = BuildAndStart(builder);
  if (server_ == nullptr) return refused(absl::InternalError("its gRPC server does not start"));
  if (absl::Status prepared = acceptor_.Prepare(); !prepared.ok()) return refused(prepared);
  acceptor_.Start();
  heartbeats_ = std::make_unique<Ticker>(interval_, [this] {
    state_->Beat();
    service_.Look();
  });
  return absl::OkStatus();
}

void LeaderServer::End() {
  if (state_->End()) state_->AwaitLeft(kFarewell);
}

LeaderServer::~LeaderServer() {
  End();
  heartbeats_.reset();
  acceptor_.Stop();
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
}

}  // namespace

absl::StatusOr<std::unique_ptr<GroupLeader>> GroupLeader::Start(GroupLeaderOptions options) {
  if (absl::Status usable = CheckCredentials(options.credentials); !usable.ok()) return usable;
  const std::string address = options.address;
  auto leader = std::make_unique<LeaderServer>(std::move(options));
  if (absl::Status listening = leader->Listen(address); !listening.ok()) return listening;
  return leader;
}

}  // namespace lossd::rpc
