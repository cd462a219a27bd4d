// StatusService: what the server is and what it holds, for operators.
#ifndef LOSSD_SERVER_RPC_SERVICES_STATUS_SERVICE_H_
#define LOSSD_SERVER_RPC_SERVICES_STATUS_SERVICE_H_

#include <functional>
#include <utility>

#include "lossd/v1/status.grpc.pb.h"
#include "server/engine/engine.h"
#include "server/rpc/services/strict_service.h"

namespace lossd::rpc {

class StatusService final : public StrictService<v1::StatusService::CallbackService> {
 public:
  // `on_drain` makes the process end as SIGTERM does, soon; it may be null.
  StatusService(engine::Engine* engine, std::function<void()> on_drain)
      : engine_(engine), on_drain_(std::move(on_drain)) {
    TakeKnownRequestsOnly(&engine->counters(), &StatusService::Drain);  // the others only ask what there is
  }

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context,
                                      const v1::GetStatusRequest* request,
                                      v1::GetStatusResponse* response) override;
  grpc::ServerUnaryReactor* GetMemory(grpc::CallbackServerContext* context,
                                      const v1::GetMemoryRequest* request,
                                      v1::GetMemoryResponse* response) override;

  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context, const v1::DrainRequest* request,
                                  v1::DrainResponse* response) override;

 private:
  engine::Engine* const engine_;
  const std::function<void()> on_drain_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_SERVICES_STATUS_SERVICE_H_
