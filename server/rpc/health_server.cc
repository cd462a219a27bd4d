#include "server/rpc/health_server.h"

#include <grpcpp/health_check_service_interface.h>

#include <chrono>

#include "absl/strings/str_cat.h"
#include "server/rpc/compression.h"
#include "server/rpc/connections/call_counts.h"
#include "server/rpc/no_plugins.h"

namespace lossd::rpc {
namespace {

constexpr char kLiveness[] = "liveness";
// The limit of a message of health, and of its headers.
constexpr int kMostBytes = 4096;
constexpr int kMostHealthStreams = 16;
constexpr int kIdleMs = 120'000;
// A connection is closed at this age; a client that watches for longer connects again.
constexpr int kOldestMs = 300'000;
constexpr int kGraceMs = 5'000;

}  // namespace

absl::StatusOr<std::unique_ptr<HealthServer>> HealthServer::Start(const std::string& listen) {
  std::unique_ptr<HealthServer> health(new HealthServer);
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  builder.SetOption(std::make_unique<NoPlugins>());
  builder.SetMaxReceiveMessageSize(kMostBytes);
  RefuseCompression(builder);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMostBytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMostHealthStreams);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleMs);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, kOldestMs);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS, kGraceMs);
  builder.RegisterCallbackGenericService(&health->nothing_else_);
  const absl::Status listening = health->acceptor_.Listen(listen, grpc::InsecureServerCredentials(), builder);
  if (!listening.ok()) return absl::UnavailableError(absl::StrCat("--health_listen: ", listening.message()));
  health->server_ = BuildAndStart(builder);
  if (health->server_ == nullptr) return absl::InternalError("the gRPC server of health does not start");
  health->Set(Ready::kNo);
  health->server_->GetHealthCheckService()->SetServingStatus(kLiveness, true);
  // Not before: gRPC's service says that everything is served as long as nobody has told it otherwise.
  if (absl::Status prepared = health->acceptor_.Prepare(); !prepared.ok()) return prepared;
  health->acceptor_.Start();
  return health;
}

void HealthServer::Set(Ready ready) {
  server_->GetHealthCheckService()->SetServingStatus("", ready == Ready::kYes);
}

HealthServer::~HealthServer() {
  acceptor_.Stop();
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());  // whoever watches is cut off
}

}  // namespace lossd::rpc
