// LossService: sessions, Compute streams and calls for logits.
#ifndef LOSSD_SERVER_RPC_SERVICES_LOSS_SERVICE_H_
#define LOSSD_SERVER_RPC_SERVICES_LOSS_SERVICE_H_

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "lossd/v1/loss.grpc.pb.h"
#include "server/engine/common/mutex.h"
#include "server/engine/engine.h"
#include "server/rpc/calls/call_reports.h"
#include "server/rpc/compute/compute_reactor.h"
#include "server/rpc/compute/worker_pool.h"
#include "server/rpc/services/strict_service.h"
#include "server/rpc/transport/access.h"

namespace lossd::rpc {

using LossServiceCalls = v1::LossService::WithRawCallbackMethod_Compute<
    v1::LossService::WithRawCallbackMethod_Logits<v1::LossService::WithCallbackMethod_OpenSession<
        v1::LossService::WithCallbackMethod_CloseSession<v1::LossService::Service>>>>;

class LossService final : public StrictService<LossServiceCalls> {
 public:
  // `access` is null if no token is asked for. `reports`: where Compute streams are reported, which
  // CallObserver leaves out; outlives this, and may be null.
  LossService(engine::Engine* engine, std::shared_ptr<const AccessControl> access, CallReports* reports);

  grpc::ServerUnaryReactor* OpenSession(grpc::CallbackServerContext* context,
                                        const v1::OpenSessionRequest* request,
                                        v1::OpenSessionResponse* response) override;
  grpc::ServerUnaryReactor* CloseSession(grpc::CallbackServerContext* context,
                                         const v1::CloseSessionRequest* request,
                                         v1::CloseSessionResponse* response) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Compute(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* Logits(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* response) override;

  // Every live stream answers what it accepted and ends with UNAVAILABLE.
  void Drain();
  // After tokens have changed: streams whose token no longer lets them in end as their calls would.
  void EndRevokedStreams();
  // To be called now and then: see ComputeReactor::CancelIfStuck.
  void CancelStuckStreams();

 private:
  struct Stream {
    std::weak_ptr<ComputeReactor> reactor;
    std::optional<TokenHash> token;
  };

  std::vector<std::shared_ptr<ComputeReactor>> Live() ABSL_LOCKS_EXCLUDED(mutex_);
  // A stream's, when it is over.
  void Forget(ComputeReactor* reactor) ABSL_LOCKS_EXCLUDED(mutex_);

  engine::Engine* const engine_;
  const std::shared_ptr<const AccessControl> access_;
  CallReports* const reports_;
  WorkerPool writers_;  // of all streams
  engine::Mutex mutex_;
  std::map<ComputeReactor*, Stream> streams_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_SERVICES_LOSS_SERVICE_H_
