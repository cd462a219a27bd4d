// HeadService's call that puts a head aside.
#include "absl/status/statusor.h"
#include "server/rpc/convert/convert.h"
#include "server/rpc/convert/grpc_status.h"
#include "server/rpc/services/head_service.h"

namespace lossd::rpc {

grpc::ServerUnaryReactor* HeadService::ParkHead(grpc::CallbackServerContext* context,
                                                const v1::ParkHeadRequest* request,
                                                v1::ParkHeadResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  // It waits for checkpoints.
  const absl::Status begun = disk_.TryRun([this, reactor, request, response] {
    const absl::StatusOr<engine::HeadInfo> parked = engine_->ParkHead(request->name());
    if (parked.ok()) ToProto(*parked, response->mutable_head());
    reactor->Finish(ToGrpc(parked.status(), engine_->counters()));
  });
  if (!begun.ok()) reactor->Finish(ToGrpc(begun, engine_->counters()));
  return reactor;
}

}  // namespace lossd::rpc
