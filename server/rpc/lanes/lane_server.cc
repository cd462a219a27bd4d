#include "server/rpc/lanes/lane_server.h"

#include <grpc/grpc.h>
#include <grpcpp/health_check_service_interface.h>

#include <algorithm>
#include <chrono>
#include <string_view>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/rpc/calls/call_observer.h"
#include "server/rpc/calls/call_record.h"
#include "server/rpc/calls/methods.h"
#include "server/rpc/compression.h"
#include "server/rpc/connections/call_counts.h"
#include "server/rpc/transport/listen_address.h"

namespace lossd::rpc {
namespace {

// How long last answers may be on their way to clients before connections are closed.
constexpr std::chrono::milliseconds kLastAnswers(100);

class RefusedCall final : public grpc::ServerGenericBidiReactor {
 public:
  explicit RefusedCall(const grpc::Status& status) { Finish(status); }
  void OnDone() override { delete this; }  // NOLINT(cppcoreguidelines-owning-memory): gRPC is done with it
};

Acceptor::Counters CountersOf(telemetry::ServiceCounters* counters) {
  return {.refused = &counters->connections_refused, .flooding = &counters->connections_flooding};
}

CallReports::TokenNames TokenNamesOf(const std::shared_ptr<const AccessControl>& access) {
  if (access == nullptr) return nullptr;
  return [access](const CallMetadata& metadata) { return access->NameOf(metadata); };
}

}  // namespace

LaneServer::LaneServer(const LaneServerOptions& options)
    : access_(options.access),
      max_streams_(std::min(options.max_streams, kMostStreams)),
      reports_(options.counters, TokenNamesOf(options.access)),
      rank_{.leader_place = options.leader_place,
            .limits = options.chunk_limits,
            .lane_credit_bytes = options.lane_credit_bytes,
            .staging_bytes = options.staging_bytes,
            .under_way = &under_way_,
            .counters = &counters_},
      acceptor_(Acceptor::For::kClients, CountersOf(options.counters)) {}

absl::StatusOr<std::unique_ptr<LaneServer>> LaneServer::Open(const LaneServerOptions& options) {
  std::unique_ptr<LaneServer> server(new LaneServer(options));
  if (absl::Status listening = server->Listen(options); !listening.ok()) return listening;
  return server;
}

absl::Status LaneServer::Listen(const LaneServerOptions& options) {
  const absl::StatusOr<std::vector<std::string>> addresses = ParseListen(options.listen);
  if (!addresses.ok()) return addresses.status();
  if (const auto check = CheckTls(options.tls); !check.ok()) return check.status();
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  LimitServer(options.chunk_limits, options.staging_bytes, options.connections, builder);
  RefuseCompression(builder);
  builder.RegisterCallbackGenericService(&calls_);
  const ServerCredentials credentials(options.tls, options.access);
  for (const std::string& address : *addresses) {
    if (absl::Status status = acceptor_.Listen(address, credentials.For(address), builder); !status.ok()) {
      return status;
    }
  }
  server_ = BuildAndStart(builder);
  if (server_ == nullptr) return absl::InternalError("the gRPC server of lanes does not start");
  SetReady(false);
  return acceptor_.Prepare();
}

LaneServer::~LaneServer() {
  if (!drained_ && server_ != nullptr) Drain(absl::ZeroDuration());
}

void LaneServer::Serve(LaneRelay::Stage stage, engine::RankPayloads* payloads, LeaderCalls leader) {
  rank_.stage = std::move(stage);
  rank_.payloads = payloads;
  rank_.leader = std::move(leader);
  acceptor_.Start();
}

void LaneServer::SetReady(bool ready) { server_->GetHealthCheckService()->SetServingStatus(ready); }

LaneServer::Stream* LaneServer::Begin(grpc::GenericCallbackServerContext* context) {
  const std::string& path = context->method();
  if (path != kComputePath) {
    if (reports_.Find(path) == nullptr) {
      return new RefusedCall({grpc::StatusCode::UNIMPLEMENTED, absl::StrCat("there is no method ", path)});
    }
    return new RefusedCall(
        {grpc::StatusCode::FAILED_PRECONDITION,
         absl::StrCat("rank ", rank_.leader.rank, " of a group takes Compute streams alone: call ",
                      rank_.leader_place)});
  }
  auto record = CallRecord::Begin(&reports_, path, *context);
  const std::optional<TokenHash> token =
      access_ == nullptr ? std::nullopt : AccessControl::TokenOf(context->client_metadata());
  std::shared_ptr<LaneRelay> relay;
  {
    const engine::MutexLock lock(mutex_);
    const bool full = static_cast<int64_t>(live_.size()) >= max_streams_;
    const char* refusal = full ? "this rank has as many streams as it may" : nullptr;
    if (draining_) refusal = "the server is shutting down";
    if (refusal == nullptr && !begun_.Take(std::chrono::steady_clock::now()).has_value()) {
      refusal = "streams are opened faster than this rank takes them; try again";
    }
    if (refusal != nullptr) {
      const grpc::Status status(grpc::StatusCode::UNAVAILABLE, refusal);
      record->NoteStatus(status);
      record.reset();
      return new RefusedCall(status);
    }
    relay = std::make_shared<LaneRelay>(&rank_, ++last_relay_, context, std::move(record),
                                        [this](LaneRelay* done) { Forget(done); });
    live_.emplace(relay.get(), Live{.relay = relay, .token = token});
  }
  relay->Start();
  // Tokens may have changed before it was among the streams.
  if (token.has_value()) {
    const grpc::Status status = access_->Check(*token, MethodOfPath(kComputePath));
    if (!status.ok()) relay->Revoke(status);
  }
  return relay.get();
}

std::vector<std::pair<std::shared_ptr<LaneRelay>, std::optional<TokenHash>>> LaneServer::Relays() {
  std::vector<std::pair<std::shared_ptr<LaneRelay>, std::optional<TokenHash>>> relays;
  const engine::MutexLock lock(mutex_);
  for (const auto& [key, live] : live_) {
    std::shared_ptr<LaneRelay> relay = live.relay.lock();
    if (relay != nullptr) relays.emplace_back(std::move(relay), live.token);
  }
  return relays;
}

void LaneServer::Forget(LaneRelay* relay) {
  const engine::MutexLock lock(mutex_);
  live_.erase(relay);
  if (live_.empty()) none_left_.NotifyAll();
}

void LaneServer::Tick() {
  for (const auto& [relay, token] : Relays()) relay->CancelIfStuck();
}

void LaneServer::EndRevokedStreams() {
  for (const auto& [relay, token] : Relays()) {
    if (!token.has_value()) continue;
    const grpc::Status status = access_->Check(*token, MethodOfPath(kComputePath));
    if (!status.ok()) relay->Revoke(status);
  }
}

bool LaneServer::AwaitRelays(std::optional<absl::Duration> timeout) {
  const auto until =
      std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(timeout.value_or(absl::ZeroDuration()));
  const engine::MutexLock lock(mutex_);
  while (!live_.empty()) {
    if (!timeout.has_value()) {
      none_left_.Wait(mutex_);
    } else if (none_left_.WaitUntil(mutex_, until) == std::cv_status::timeout) {
      return live_.empty();
    }
  }
  return true;
}

void LaneServer::Drain(absl::Duration timeout) {
  drained_ = true;
  SetReady(false);
  acceptor_.Stop();
  {
    const engine::MutexLock lock(mutex_);
    draining_ = true;
  }
  if (!AwaitRelays(timeout)) {
    for (const auto& [relay, token] : Relays()) relay->Cancel();
    AwaitRelays(std::nullopt);
  }
  // What was said last is on its way; whoever stays connected is cut off.
  server_->Shutdown(std::chrono::system_clock::now() + kLastAnswers);
}

}  // namespace lossd::rpc
