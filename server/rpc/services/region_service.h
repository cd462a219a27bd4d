// RegionService: memory shared with clients on the same host.
#ifndef LOSSD_SERVER_RPC_SERVICES_REGION_SERVICE_H_
#define LOSSD_SERVER_RPC_SERVICES_REGION_SERVICE_H_

#include <string>
#include <utility>

#include "lossd/v1/region.grpc.pb.h"
#include "server/engine/common/worker_pool.h"
#include "server/engine/engine.h"
#include "server/rpc/services/strict_service.h"

namespace lossd::rpc {

class RegionService final : public StrictService<v1::RegionService::CallbackService> {
 public:
  explicit RegionService(engine::Engine* engine) : engine_(engine), creator_(1) {
    TakeKnownRequestsOnly(&engine->counters(), &RegionService::CreateRegion, &RegionService::DeleteRegion);
  }

  // Where clients attach. Before the first call.
  void set_socket_path(std::string path) { socket_path_ = std::move(path); }

  grpc::ServerUnaryReactor* CreateRegion(grpc::CallbackServerContext* context,
                                         const v1::CreateRegionRequest* request,
                                         v1::CreateRegionResponse* response) override;
  grpc::ServerUnaryReactor* DeleteRegion(grpc::CallbackServerContext* context,
                                         const v1::DeleteRegionRequest* request,
                                         v1::DeleteRegionResponse* response) override;

 private:
  absl::Status Create(const v1::CreateRegionRequest& request, v1::CreateRegionResponse* response);
  absl::Status Delete(const v1::DeleteRegionRequest& request);

  engine::Engine* const engine_;
  std::string socket_path_;
  engine::WorkerPool
      creator_;  // large regions take the system a second, which gRPC's own threads do not have
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_SERVICES_REGION_SERVICE_H_
