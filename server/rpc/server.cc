#include "server/rpc/server.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <chrono>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/rpc/calls/call_observer.h"
#include "server/rpc/calls/call_reports.h"
#include "server/rpc/calls/methods.h"
#include "server/rpc/calls/open_calls.h"
#include "server/rpc/compression.h"
#include "server/rpc/connections/acceptor.h"
#include "server/rpc/connections/call_counts.h"
#include "server/rpc/connections/server_setup.h"
#include "server/rpc/lanes/relay_service.h"
#include "server/rpc/replicas/passed_calls.h"
#include "server/rpc/replicas/replica_set.h"
#include "server/rpc/services/gradient_service.h"
#include "server/rpc/services/head_service.h"
#include "server/rpc/services/loss_service.h"
#include "server/rpc/services/region_service.h"
#include "server/rpc/services/status_service.h"
#include "server/rpc/transport/access.h"
#include "server/rpc/transport/listen_address.h"
#include "server/rpc/transport/region_socket.h"
#include "server/rpc/transport/tls.h"
#include "server/telemetry/common/logging.h"

namespace lossd::rpc {
namespace {

// How long a drain waits for those who watch health and do not read that it has begun.
constexpr std::chrono::milliseconds kTellWatches(2000);
// How long clients that have had their answers may take to close their connections by themselves.
constexpr std::chrono::milliseconds kFarewell(100);
// How long their last answers may be on their way.
constexpr std::chrono::milliseconds kLastAnswers(1000);
// How often they are asked to, before they are cut off.
constexpr int kMostFarewells = 30;

void Observe(grpc::ServerBuilder& builder, CallReports* reports, CallObserver::PassesOn passes_on) {
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> factories;
  factories.push_back(std::make_unique<CallObserver>(reports, passes_on));
  builder.experimental().SetInterceptorCreators(std::move(factories));
}

Acceptor::Counters CountersOf(telemetry::ServiceCounters* counters) {
  if (counters == nullptr) return {};
  return {.refused = &counters->connections_refused, .flooding = &counters->connections_flooding};
}

CallReports::TokenNames TokenNamesOf(const std::shared_ptr<const AccessControl>& access) {
  if (access == nullptr) return nullptr;
  return [access](const CallMetadata& metadata) { return access->NameOf(metadata); };
}

class GrpcServer final : public Server {
 public:
  GrpcServer(engine::Engine* engine, const ServerOptions& options);
  ~GrpcServer() override;
  // Takes the addresses. Once, before everything else.
  absl::Status Open(const ServerOptions& options);

  void Serve() override;
  int port() const override { return acceptor_.port(); }
  std::string region_socket_path() const override {
    return region_socket_ == nullptr ? "" : region_socket_->path();
  }
  void SetReady(bool ready) override;
  void Tick() override { loss_service_.CancelStuckStreams(); }
  void EndRevokedStreams() override { loss_service_.EndRevokedStreams(); }
  void Drain(absl::Duration timeout) override;

 private:
  void RegisterServices(grpc::ServerBuilder& builder);
  void ServeReplicas();
  absl::Status Listen(const ServerOptions& options, grpc::ServerBuilder& builder);
  // Until the drain is over: closes connections as soon as no call is under way.
  void CloseStrangers();

  engine::Engine* const engine_;
  const std::unique_ptr<telemetry::ServiceCounters> own_counters_;  // null: the caller has some
  telemetry::ServiceCounters* const counters_;
  CallReports reports_;
  HeadService head_service_;
  LossService loss_service_;
  GradientService gradient_service_;
  StatusService status_service_;
  RegionService region_service_;
  std::unique_ptr<RegionSocket> region_socket_;
  Acceptor acceptor_;
  RelayService* const relays_;
  const RelayGroup group_;
  ReplicaSet* const replicas_;
  const std::string advertised_host_;
  std::unique_ptr<PassedCalls> passed_calls_;  // null: all calls are served here
  bool drained_ = false;
  std::unique_ptr<grpc::Server> server_;
};

GrpcServer::GrpcServer(engine::Engine* engine, const ServerOptions& options)
    : engine_(engine),
      own_counters_(options.counters == nullptr ? std::make_unique<telemetry::ServiceCounters>(MethodNames())
                                                : nullptr),
      counters_(own_counters_ == nullptr ? options.counters : own_counters_.get()),
      reports_(counters_, TokenNamesOf(options.access)),
      head_service_(engine, options.weights_dir, options.row_message_bytes),
      loss_service_(engine, options.access, &reports_),
      gradient_service_(engine, options.row_message_bytes),
      status_service_(engine, options.on_drain),
      region_service_(engine),
      acceptor_(Acceptor::For::kClients, CountersOf(counters_)),
      relays_(options.relays),
      group_(options.group),
      replicas_(options.replicas),
      advertised_host_(options.advertised_host) {
  loss_service_.SetLanes(options.lanes);
  if (replicas_ == nullptr) return;
  loss_service_.SetPlacer(&replicas_->sessions());
  head_service_.SetPlacer(&replicas_->sessions());
  if (replicas_->place().coordinates()) return;
  passed_calls_ =
      std::make_unique<PassedCalls>([replicas = replicas_] { return replicas->Coordinator(); }, &reports_);
}

absl::Status GrpcServer::Open(const ServerOptions& options) {
  if (engine_->regions().enabled()) {
    auto socket = RegionSocket::Start(options.region_socket_dir, &engine_->regions());
    if (!socket.ok()) return socket.status();
    region_socket_ = *std::move(socket);
    region_service_.set_socket_path(region_socket_->path());
  }
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  LimitServer(engine_->options().chunk_limits, engine_->options().staging_bytes, options.connections,
              builder);
  RefuseCompression(builder);
  RegisterServices(builder);
  return Listen(options, builder);
}

// Heads and their windows are the coordinator's: other replicas pass calls about them on.
void GrpcServer::RegisterServices(grpc::ServerBuilder& builder) {
  const bool passes_on = passed_calls_ != nullptr;
  Observe(builder, &reports_, passes_on ? CallObserver::PassesOn::kYes : CallObserver::PassesOn::kNo);
  if (passes_on) {
    builder.RegisterCallbackGenericService(passed_calls_.get());
  } else {
    builder.RegisterService(&head_service_);
    builder.RegisterService(&gradient_service_);
  }
  builder.RegisterService(&loss_service_);
  builder.RegisterService(&status_service_);
  builder.RegisterService(&region_service_);
}

void GrpcServer::ServeReplicas() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  const std::string address = absl::StrCat(advertised_host_, ":", port());
  replicas_->Serve(
      {.open =
           [this, address](const v1::OpenSessionRequest& request, v1::OpenSessionResponse* response) {
             return loss_service_.OpenFor(address, request, response);
           },
       .close = [this](const v1::CloseSessionRequest& request) { return loss_service_.Close(request); }},
      server_->InProcessChannel(arguments));
}

void GrpcServer::Serve() {
  server_->GetHealthCheckService()->SetServingStatus(true);
  if (replicas_ != nullptr) ServeReplicas();
  if (relays_ != nullptr) relays_->Open(&loss_service_, group_);
  acceptor_.Start();
  counters_->serving = true;
}

void GrpcServer::SetReady(bool ready) { server_->GetHealthCheckService()->SetServingStatus(ready); }

absl::Status GrpcServer::Listen(const ServerOptions& options, grpc::ServerBuilder& builder) {
  const absl::StatusOr<std::vector<std::string>> addresses = ParseListen(options.listen);
  if (!addresses.ok()) return addresses.status();
  if (const auto check = CheckTls(options.tls); !check.ok()) return check.status();
  const ServerCredentials credentials(options.tls, options.access);
  for (const std::string& address : *addresses) {
    if (absl::Status status = acceptor_.Listen(address, credentials.For(address), builder); !status.ok()) {
      return absl::Status(status.code(), absl::StrCat("--listen: ", status.message()));
    }
  }
  server_ = BuildAndStart(builder);
  if (server_ == nullptr) return absl::InternalError("the gRPC server does not start");
  return acceptor_.Prepare();
}

GrpcServer::~GrpcServer() {
  if (!drained_ && server_ != nullptr) Drain(absl::ZeroDuration());
}

void GrpcServer::Drain(absl::Duration timeout) {
  drained_ = true;
  const auto deadline = absl::ToChronoTime(absl::Now() + timeout);
  reports_.open_calls().BeginDrain();
  server_->GetHealthCheckService()->SetServingStatus(false);
  engine_->BeginDrain();
  loss_service_.Drain();
  acceptor_.Stop();
  if (replicas_ != nullptr) replicas_->StopServing();
  if (relays_ != nullptr) relays_->Close();
  std::thread closing;
  try {
    closing = std::thread([this] { CloseStrangers(); });
  } catch (const std::system_error& error) {
    telemetry::Log(telemetry::LogLevel::kDebug, "the drain waits for every connection",
                   {{"reason", error.what()}});
  }
  // They are another server's calls.
  loss_service_.AwaitRelayed(absl::FromChrono(deadline));
  // Streams that are cancelled at the deadline take with them what they had queued; what is on the device by
  // then is finished.
  server_->Shutdown(deadline);
  reports_.open_calls().Stop();
  if (closing.joinable()) closing.join();
  engine_->WaitIdle();
}

// gRPC's Shutdown waits until every client has answered a ping and closed its connection, whether it ever
// said anything or not. Again and again: what was in the middle of its handshake is a connection later.
void GrpcServer::CloseStrangers() {
  OpenCalls& calls = reports_.open_calls();
  for (int farewells = 0; calls.AwaitEnd(kTellWatches);) {
    if (!calls.AwaitFarewell(kFarewell, kLastAnswers)) continue;
    grpc_server_cancel_all_calls(server_->c_server());
    // Nobody calls any more. gRPC (1.51) writes to a connection, and closes it, when it has read what has
    // come: one that sends faster than that would keep the server from ending.
    if (++farewells % kMostFarewells != 0) continue;
    if (const int cut = acceptor_.CutOffAll(); cut > 0) {
      telemetry::Log(telemetry::LogLevel::kWarning, "connections were cut off that did not end",
                     {{"connections", cut}});
    }
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Open(const ServerOptions& options, engine::Engine* engine) {
  auto server = std::make_unique<GrpcServer>(engine, options);
  if (absl::Status status = server->Open(options); !status.ok()) return status;
  return server;
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options, engine::Engine* engine) {
  absl::StatusOr<std::unique_ptr<Server>> server = Open(options, engine);
  if (server.ok()) (*server)->Serve();
  return server;
}

}  // namespace lossd::rpc
