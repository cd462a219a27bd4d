// GradientService: the two-phase flush, and the optimizer.
#ifndef LOSSD_SERVER_RPC_SERVICES_GRADIENT_SERVICE_H_
#define LOSSD_SERVER_RPC_SERVICES_GRADIENT_SERVICE_H_

#include <cstdint>

#include "lossd/v1/gradient.grpc.pb.h"
#include "server/engine/engine.h"
#include "server/rpc/services/strict_service.h"

namespace lossd::rpc {

using GradientServiceCalls = v1::GradientService::WithRawCallbackMethod_ReadGradient<
    v1::GradientService::WithCallbackMethod_BeginFlush<v1::GradientService::WithCallbackMethod_CommitFlush<
        v1::GradientService::WithCallbackMethod_AbortFlush<
            v1::GradientService::WithCallbackMethod_GradientStats<
                v1::GradientService::WithCallbackMethod_ApplyStep<v1::GradientService::Service>>>>>>;

class GradientService final : public StrictService<GradientServiceCalls> {
 public:
  GradientService(engine::Engine* engine, int64_t row_message_bytes)
      : engine_(engine), row_message_bytes_(row_message_bytes) {
    TakeKnownRequestsOnly(&engine->counters(), &GradientService::BeginFlush, &GradientService::CommitFlush,
                          &GradientService::AbortFlush, &GradientService::GradientStats,
                          &GradientService::ApplyStep);
  }

  grpc::ServerUnaryReactor* BeginFlush(grpc::CallbackServerContext* context,
                                       const v1::BeginFlushRequest* request,
                                       v1::BeginFlushResponse* response) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* ReadGradient(grpc::CallbackServerContext* context,
                                                           const grpc::ByteBuffer* bytes) override;
  grpc::ServerUnaryReactor* CommitFlush(grpc::CallbackServerContext* context,
                                        const v1::CommitFlushRequest* request,
                                        v1::CommitFlushResponse* response) override;
  grpc::ServerUnaryReactor* AbortFlush(grpc::CallbackServerContext* context,
                                       const v1::AbortFlushRequest* request,
                                       v1::AbortFlushResponse* response) override;
  grpc::ServerUnaryReactor* GradientStats(grpc::CallbackServerContext* context,
                                          const v1::GradientStatsRequest* request,
                                          v1::GradientStatsResponse* response) override;
  grpc::ServerUnaryReactor* ApplyStep(grpc::CallbackServerContext* context,
                                      const v1::ApplyStepRequest* request,
                                      v1::ApplyStepResponse* response) override;

 private:
  engine::Engine* const engine_;
  const int64_t row_message_bytes_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_SERVICES_GRADIENT_SERVICE_H_
