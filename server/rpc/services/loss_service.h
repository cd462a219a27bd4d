// LossService: sessions, Compute streams and calls for logits.
#ifndef LOSSD_SERVER_RPC_SERVICES_LOSS_SERVICE_H_
#define LOSSD_SERVER_RPC_SERVICES_LOSS_SERVICE_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "lossd/v1/loss.grpc.pb.h"
#include "server/engine/common/mutex.h"
#include "server/engine/common/worker_pool.h"
#include "server/engine/engine.h"
#include "server/rpc/calls/call_reports.h"
#include "server/rpc/compute/compute_reactor.h"
#include "server/rpc/compute/compute_requests.h"
#include "server/rpc/convert/lane_addresses.h"
#include "server/rpc/services/session_placer.h"
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

  // Where sessions of heads over replicas are opened and closed; outlives this. Before the first call.
  void SetPlacer(SessionPlacer* placer) { placer_ = placer; }
  // Sessions of this server, as other replicas ask for them: for clients that reach it at `address`,
  // HOST:PORT.
  absl::Status OpenFor(const std::string& address, const v1::OpenSessionRequest& request,
                       v1::OpenSessionResponse* response);
  absl::Status Close(const v1::CloseSessionRequest& request);
  // What OpenSession tells of other ranks. Before the first call.
  void SetLanes(std::vector<RankLanes> lanes) { lanes_ = std::move(lanes); }
  // A Compute stream that comes by way of another rank; `on_done` is called when gRPC is done with it.
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ServeRelayed(
      grpc::CallbackServerContext* context, std::unique_ptr<ComputeRequests> requests,
      std::function<void()> on_done);
  // Waits until no such stream is left; those that are at `deadline` are cancelled. After Drain, when no more
  // come.
  void AwaitRelayed(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);

  // Every live stream answers what it accepted and ends with UNAVAILABLE.
  void Drain();
  // After tokens have changed: streams whose token no longer lets them in end as their calls would.
  void EndRevokedStreams();
  // To be called now and then: see ComputeReactor::CancelIfStuck.
  void CancelStuckStreams();

 private:
  struct Stream {
    std::weak_ptr<ComputeReactor> reactor = {};
    std::optional<TokenHash> token = {};
    bool relayed = false;
  };

  // Without the addresses of its lanes.
  absl::Status Open(const v1::OpenSessionRequest& request, const std::string& trace_id,
                    v1::OpenSessionResponse* response);
  void SetAddresses(const std::vector<std::string>& addresses, v1::OpenSessionResponse* response) const;
  ComputeReactor* Begin(grpc::CallbackServerContext* context, std::unique_ptr<CallRecord> record,
                        std::unique_ptr<ComputeRequests> requests, Stream stream,
                        std::function<void()> on_done) ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<std::shared_ptr<ComputeReactor>> Live() ABSL_LOCKS_EXCLUDED(mutex_);
  // A stream's, when it is over.
  void Forget(ComputeReactor* reactor) ABSL_LOCKS_EXCLUDED(mutex_);
  void NoteRelayedGone() ABSL_LOCKS_EXCLUDED(mutex_);

  engine::Engine* const engine_;
  const std::shared_ptr<const AccessControl> access_;
  CallReports* const reports_;
  SessionPlacer* placer_ = nullptr;  // null: there are no replicas
  std::vector<RankLanes> lanes_;     // from rank 1 on
  engine::WorkerPool writers_;       // of all streams
  engine::WorkerPool memory_{1};  // deterministic sessions take memory, one at a time, which may take seconds
  engine::Mutex mutex_;
  engine::CondVar relayed_gone_;
  int64_t relayed_ ABSL_GUARDED_BY(mutex_) = 0;  // streams that are not gone
  std::map<ComputeReactor*, Stream> streams_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_SERVICES_LOSS_SERVICE_H_
