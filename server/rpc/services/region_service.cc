#include "server/rpc/services/region_service.h"

#include <memory>

#include "server/rpc/convert/convert.h"
#include "server/rpc/convert/grpc_status.h"

namespace lossd::rpc {

grpc::ServerUnaryReactor* RegionService::CreateRegion(grpc::CallbackServerContext* context,
                                                      const v1::CreateRegionRequest* request,
                                                      v1::CreateRegionResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const absl::Status begun = creator_.TryRun([this, reactor, request, response] {
    reactor->Finish(ToGrpc(Create(*request, response), engine_->counters()));
  });
  if (!begun.ok()) reactor->Finish(ToGrpc(begun, engine_->counters()));
  return reactor;
}

grpc::ServerUnaryReactor* RegionService::DeleteRegion(grpc::CallbackServerContext* context,
                                                      const v1::DeleteRegionRequest* request,
                                                      v1::DeleteRegionResponse* /*response*/) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpc(Delete(*request), engine_->counters()));
  return reactor;
}

absl::Status RegionService::Create(const v1::CreateRegionRequest& request,
                                   v1::CreateRegionResponse* response) {
  if (absl::Status status = engine_->CheckServing(); !status.ok()) return status;
  const absl::StatusOr<engine::RegionKind> kind = ToEngine(request.kind());
  if (!kind.ok()) return kind.status();
  const absl::StatusOr<std::shared_ptr<const engine::Region>> region =
      engine_->regions().Create(*kind, request.bytes());
  if (!region.ok()) return region.status();
  response->set_handle((*region)->handle().bytes());
  response->set_bytes((*region)->size());
  response->set_socket_path(socket_path_);
  return absl::OkStatus();
}

absl::Status RegionService::Delete(const v1::DeleteRegionRequest& request) {
  const absl::StatusOr<engine::RegionHandle> handle = engine::RegionHandle::Parse(request.handle(), "handle");
  if (!handle.ok()) return handle.status();
  return engine_->regions().Drop(*handle);
}

}  // namespace lossd::rpc
