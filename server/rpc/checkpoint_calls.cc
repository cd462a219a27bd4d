// HeadService's calls about checkpoints.
#include <utility>

#include "server/rpc/convert.h"
#include "server/rpc/grpc_status.h"
#include "server/rpc/head_service.h"

namespace lossd::rpc {

grpc::ServerUnaryReactor* HeadService::Later(grpc::CallbackServerContext* context,
                                             std::function<absl::Status()> work) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const absl::Status begun = disk_.TryRun(
      [this, reactor, work = std::move(work)] { reactor->Finish(ToGrpc(work(), engine_->counters())); });
  if (!begun.ok()) reactor->Finish(ToGrpc(begun, engine_->counters()));
  return reactor;
}

grpc::ServerUnaryReactor* HeadService::SaveCheckpoint(grpc::CallbackServerContext* context,
                                                      const v1::SaveCheckpointRequest* request,
                                                      v1::SaveCheckpointResponse* response) {
  return Later(context, [this, request, response] {
    engine::CheckpointPast expected{request->incarnation(), {}};
    if (request->has_restores()) expected.restores = request->restores();
    const absl::StatusOr<engine::SavedCheckpoint> saved =
        engine_->SaveCheckpoint(request->head(), request->tag(), expected);
    if (!saved.ok()) return saved.status();
    ToProto(saved->info, response->mutable_checkpoint());
    response->set_bytes_written(saved->bytes_written);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* HeadService::RestoreCheckpoint(grpc::CallbackServerContext* context,
                                                         const v1::RestoreCheckpointRequest* request,
                                                         v1::RestoreCheckpointResponse* response) {
  return Later(context, [this, request, response] {
    const absl::StatusOr<engine::CheckpointInfo> restored =
        engine_->RestoreCheckpoint(request->head(), request->tag());
    if (restored.ok()) ToProto(*restored, response->mutable_checkpoint());
    return restored.status();
  });
}

grpc::ServerUnaryReactor* HeadService::ListCheckpoints(grpc::CallbackServerContext* context,
                                                       const v1::ListCheckpointsRequest* request,
                                                       v1::ListCheckpointsResponse* response) {
  return Later(context, [this, request, response] {
    const absl::StatusOr<std::vector<engine::CheckpointInfo>> all = engine_->ListCheckpoints(request->head());
    if (!all.ok()) return all.status();
    for (const engine::CheckpointInfo& info : *all) ToProto(info, response->add_checkpoints());
    return absl::OkStatus();
  });
}

}  // namespace lossd::rpc
