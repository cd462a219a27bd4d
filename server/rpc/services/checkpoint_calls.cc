// HeadService's calls about checkpoints.
#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/common/errors.h"
#include "server/rpc/convert/convert.h"
#include "server/rpc/convert/grpc_status.h"
#include "server/rpc/services/head_service.h"
#include "server/telemetry/common/logging.h"

namespace lossd::rpc {

namespace {

using telemetry::Log;
using telemetry::LogLevel;

// Not of a caller's mistake: the disk is full, broken, or not to be written to.
bool IsOfDisk(const absl::Status& status) {
  return engine::ReasonOf(status) == engine::RejectReason::kCheckpoint && !absl::IsInvalidArgument(status);
}

}  // namespace

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
    if (absl::Status marks = CheckMarks(request->marks()); !marks.ok()) return marks;
    engine::CheckpointPast expected{.incarnation = request->incarnation(),
                                    .history = request->history(),
                                    .marks = ToEngine(request->marks())};
    if (request->has_restores()) expected.restores = request->restores();
    const absl::StatusOr<engine::SavedCheckpoint> saved =
        engine_->SaveCheckpoint(request->head(), request->tag(), expected);
    LogSave(*request, saved);
    if (!saved.ok()) return saved.status();
    ToProto(saved->info, response->mutable_checkpoint());
    response->set_bytes_written(saved->bytes_written);
    for (const std::string& tag : saved->deleted) response->add_deleted(tag);
    return absl::OkStatus();
  });
}

void HeadService::LogSave(const v1::SaveCheckpointRequest& request,
                          const absl::StatusOr<engine::SavedCheckpoint>& saved) {
  if (!saved.ok()) {
    if (!IsOfDisk(saved.status()) || engine_->options().checkpoints == nullptr) return;
    const std::optional<uint64_t> left_out = save_failures_.Take(std::chrono::steady_clock::now());
    if (!left_out.has_value()) return;
    std::vector<telemetry::LogField> fields = {
        {"head", request.head()}, {"tag", request.tag()}, {"reason", std::string(saved.status().message())}};
    if (*left_out > 0) fields.emplace_back("lines_left_out", *left_out);
    Log(LogLevel::kError, "a checkpoint could not be saved: the one before stays", fields);
    return;
  }
  if (!saved->deleted.empty()) {
    Log(LogLevel::kInfo, "deleted checkpoints beyond --checkpoint_keep",
        {{"head", request.head()}, {"tags", saved->deleted}, {"because_of", request.tag()}});
  }
  if (!saved->not_deleted.ok()) {
    Log(LogLevel::kWarning, "a checkpoint beyond --checkpoint_keep could not be deleted",
        {{"head", request.head()}, {"reason", std::string(saved->not_deleted.message())}});
  }
}

grpc::ServerUnaryReactor* HeadService::RestoreCheckpoint(grpc::CallbackServerContext* context,
                                                         const v1::RestoreCheckpointRequest* request,
                                                         v1::RestoreCheckpointResponse* response) {
  return Later(context, [this, request, response] {
    const absl::StatusOr<engine::CheckpointInfo> restored =
        engine_->RestoreCheckpoint(request->head(), request->tag());
    if (!restored.ok()) return restored.status();
    ToProto(*restored, response->mutable_checkpoint());
    return absl::OkStatus();
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

grpc::ServerUnaryReactor* HeadService::DeleteCheckpoint(grpc::CallbackServerContext* context,
                                                        const v1::DeleteCheckpointRequest* request,
                                                        v1::DeleteCheckpointResponse* response) {
  return Later(context, [this, request, response] {
    const absl::StatusOr<engine::DeletedCheckpoint> deleted =
        engine_->DeleteCheckpoint(request->head(), request->tag());
    if (!deleted.ok()) return deleted.status();
    ToProto(deleted->info, response->mutable_checkpoint());
    response->set_bytes_freed(deleted->bytes_freed);
    return absl::OkStatus();
  });
}

}  // namespace lossd::rpc
