// HeadService: life of heads, weights in and out, checkpoints.
#ifndef LOSSD_SERVER_RPC_SERVICES_HEAD_SERVICE_H_
#define LOSSD_SERVER_RPC_SERVICES_HEAD_SERVICE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "lossd/v1/head.grpc.pb.h"
#include "server/engine/common/worker_pool.h"
#include "server/engine/engine.h"
#include "server/rpc/calls/rate_limit.h"
#include "server/rpc/services/session_placer.h"
#include "server/rpc/services/strict_service.h"
#include "server/rpc/services/weight_loader.h"

namespace lossd::rpc {

using HeadServiceCalls = v1::HeadService::WithRawCallbackMethod_WriteWeights<
    v1::HeadService::WithCallbackMethod_CreateHead<v1::HeadService::WithCallbackMethod_DeleteHead<
        v1::HeadService::WithCallbackMethod_ListHeads<v1::HeadService::WithCallbackMethod_GetHead<
            v1::HeadService::WithCallbackMethod_BeginWrite<v1::HeadService::WithCallbackMethod_CommitWrite<
                v1::HeadService::WithRawCallbackMethod_ReadWeights<
                    v1::HeadService::WithCallbackMethod_LoadWeights<
                        v1::HeadService::WithCallbackMethod_SaveCheckpoint<
                            v1::HeadService::WithCallbackMethod_RestoreCheckpoint<
                                v1::HeadService::WithCallbackMethod_ListCheckpoints<
                                    v1::HeadService::WithCallbackMethod_DeleteCheckpoint<
                                        v1::HeadService::WithCallbackMethod_CopyHead<
                                            v1::HeadService::WithCallbackMethod_BlendHead<
                                                v1::HeadService::WithCallbackMethod_ParkHead<
                                                    v1::HeadService::Service>>>>>>>>>>>>>>>>;

class HeadService final : public StrictService<HeadServiceCalls> {
 public:
  // `weights_dir`: WeightLoader's folder.
  HeadService(engine::Engine* engine, std::string weights_dir, int64_t row_message_bytes);

  // Before the first call, if there are replicas: what heads are told of is theirs, too. It outlives this.
  void SetPlacer(SessionPlacer* placer) { placer_ = placer; }

  grpc::ServerUnaryReactor* CreateHead(grpc::CallbackServerContext* context,
                                       const v1::CreateHeadRequest* request, v1::Head* response) override;
  grpc::ServerUnaryReactor* DeleteHead(grpc::CallbackServerContext* context,
                                       const v1::DeleteHeadRequest* request,
                                       v1::DeleteHeadResponse* response) override;
  grpc::ServerUnaryReactor* ListHeads(grpc::CallbackServerContext* context,
                                      const v1::ListHeadsRequest* request,
                                      v1::ListHeadsResponse* response) override;
  grpc::ServerUnaryReactor* GetHead(grpc::CallbackServerContext* context, const v1::GetHeadRequest* request,
                                    v1::Head* response) override;
  grpc::ServerUnaryReactor* BeginWrite(grpc::CallbackServerContext* context,
                                       const v1::BeginWriteRequest* request,
                                       v1::BeginWriteResponse* response) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* WriteWeights(grpc::CallbackServerContext* context,
                                                          grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* CommitWrite(grpc::CallbackServerContext* context,
                                        const v1::CommitWriteRequest* request,
                                        v1::CommitWriteResponse* response) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* ReadWeights(grpc::CallbackServerContext* context,
                                                          const grpc::ByteBuffer* bytes) override;
  grpc::ServerUnaryReactor* LoadWeights(grpc::CallbackServerContext* context,
                                        const v1::LoadWeightsRequest* request,
                                        v1::LoadWeightsResponse* response) override;

  grpc::ServerUnaryReactor* SaveCheckpoint(grpc::CallbackServerContext* context,
                                           const v1::SaveCheckpointRequest* request,
                                           v1::SaveCheckpointResponse* response) override;
  grpc::ServerUnaryReactor* RestoreCheckpoint(grpc::CallbackServerContext* context,
                                              const v1::RestoreCheckpointRequest* request,
                                              v1::RestoreCheckpointResponse* response) override;
  grpc::ServerUnaryReactor* ListCheckpoints(grpc::CallbackServerContext* context,
                                            const v1::ListCheckpointsRequest* request,
                                            v1::ListCheckpointsResponse* response) override;
  grpc::ServerUnaryReactor* DeleteCheckpoint(grpc::CallbackServerContext* context,
                                             const v1::DeleteCheckpointRequest* request,
                                             v1::DeleteCheckpointResponse* response) override;

  grpc::ServerUnaryReactor* CopyHead(grpc::CallbackServerContext* context, const v1::CopyHeadRequest* request,
                                     v1::CopyHeadResponse* response) override;
  grpc::ServerUnaryReactor* BlendHead(grpc::CallbackServerContext* context,
                                      const v1::BlendHeadRequest* request,
                                      v1::BlendHeadResponse* response) override;
  grpc::ServerUnaryReactor* ParkHead(grpc::CallbackServerContext* context, const v1::ParkHeadRequest* request,
                                     v1::ParkHeadResponse* response) override;

 private:
  static constexpr int kLoadingThreads = 2;

  // Whether that can be the caller's name for a write of weights.
  static absl::Status CheckKey(absl::string_view field, const std::string& key);
  // On a thread that may wait for the disk; the call ends with what `work` says.
  grpc::ServerUnaryReactor* Later(grpc::CallbackServerContext* context, std::function<absl::Status()> work);
  // What somebody has to look after: a disk that took no checkpoint, and what became of older ones.
  void LogSave(const v1::SaveCheckpointRequest& request,
               const absl::StatusOr<engine::SavedCheckpoint>& saved);

  // The call ends with what `work` says, which waits for other replicas if there are any.
  grpc::ServerUnaryReactor* Asked(grpc::CallbackServerContext* context, std::function<absl::Status()> work);
  // As all replicas have it; may wait for the others.
  absl::Status Describe(const engine::Head& head, v1::Head* response) const;

  engine::Engine* const engine_;
  SessionPlacer* placer_ = nullptr;  // null: there are no replicas
  const WeightLoader loader_;
  const int64_t row_message_bytes_;
  RateLimit save_failures_{10, 1};  // lines about them; of disk_'s one thread
  engine::WorkerPool disk_{1};      // checkpoints are made, heads deleted and parked, one at a time
  engine::WorkerPool memory_{1};    // heads are created one at a time, which may take seconds
  engine::WorkerPool loads_{kLoadingThreads};  // which read files
  engine::WorkerPool asking_{1};               // waits for other replicas
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_SERVICES_HEAD_SERVICE_H_
