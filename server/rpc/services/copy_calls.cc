// HeadService's calls about copies of heads.
#include <memory>

#include "absl/status/statusor.h"
#include "server/rpc/convert/convert.h"
#include "server/rpc/convert/grpc_status.h"
#include "server/rpc/services/head_service.h"

namespace lossd::rpc {

grpc::ServerUnaryReactor* HeadService::CopyHead(grpc::CallbackServerContext* context,
                                                const v1::CopyHeadRequest* request,
                                                v1::CopyHeadResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  memory_.Run([this, reactor, request, response] {
    absl::Status status = CheckKey("copy_id", request->copy_id());
    if (status.ok()) {
      const absl::StatusOr<engine::CopiedHead> copy = engine_->CopyHead(ToEngine(*request));
      status = copy.status();
      if (status.ok()) {
        response->set_weight_version(copy->weight_version);
        status = Describe(*copy->head, response->mutable_head());
      }
    }
    reactor->Finish(ToGrpc(status, engine_->counters()));
  });
  return reactor;
}

grpc::ServerUnaryReactor* HeadService::BlendHead(grpc::CallbackServerContext* context,
                                                 const v1::BlendHeadRequest* request,
                                                 v1::BlendHeadResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const auto finish = [this, reactor, response](const absl::StatusOr<uint64_t>& version) {
    if (version.ok()) response->set_weight_version(*version);
    reactor->Finish(ToGrpc(version.status(), engine_->counters()));
  };
  const absl::Status key = CheckKey("blend_id", request->blend_id());
  const auto target = engine_->FindHead(request->head());
  const auto source = engine_->FindHead(request->source());
  for (const absl::Status& status : {key, target.status(), source.status()}) {
    if (status.ok()) continue;
    finish(status);
    return reactor;
  }
  (*target)->Blend(*source, ToEngine(*request), finish);
  return reactor;
}

}  // namespace lossd::rpc
