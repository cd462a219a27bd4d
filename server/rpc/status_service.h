// StatusService: what the server is and what it holds, for operators.
#ifndef LOSSD_SERVER_RPC_STATUS_SERVICE_H_
#define LOSSD_SERVER_RPC_STATUS_SERVICE_H_

#include "lossd/v1/status.grpc.pb.h"
#include "server/engine/engine.h"

namespace lossd::rpc {

class StatusService final : public v1::StatusService::CallbackService {
 public:
  explicit StatusService(engine::Engine* engine) : engine_(engine) {}

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context,
                                      const v1::GetStatusRequest* request,
                                      v1::GetStatusResponse* response) override;
  grpc::ServerUnaryReactor* GetMemory(grpc::CallbackServerContext* context,
                                      const v1::GetMemoryRequest* request,
                                      v1::GetMemoryResponse* response) override;

 private:
  engine::Engine* const engine_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_STATUS_SERVICE_H_
