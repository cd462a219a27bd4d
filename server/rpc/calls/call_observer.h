// Sees the calls of every service, from the moment gRPC takes them until it is done with them, and has each
// reported. But for Compute: gRPC sends every message of an observed call through its queue once more, so
// LossService keeps the record of its stream itself.
#ifndef LOSSD_SERVER_RPC_CALLS_CALL_OBSERVER_H_
#define LOSSD_SERVER_RPC_CALLS_CALL_OBSERVER_H_

#include <grpcpp/support/server_interceptor.h>

#include "server/rpc/calls/call_reports.h"

namespace lossd::rpc {

inline constexpr char kComputePath[] = "/lossd.v1.LossService/Compute";
inline constexpr char kWatchPath[] = "/grpc.health.v1.Health/Watch";

class CallObserver final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  enum class PassesOn { kYes, kNo };
  // `reports` outlives the server. Of one that passes calls on (IsPassedOn), which come to it as bytes, who
  // does so keeps the record.
  CallObserver(CallReports* reports, PassesOn passes_on) : reports_(reports), passes_on_(passes_on) {}

  // Null for gRPC's own services, health and reflection, except for calls that watch the server's health: a
  // drain has to reach them.
  grpc::experimental::Interceptor* CreateServerInterceptor(grpc::experimental::ServerRpcInfo* info) override;

 private:
  CallReports* const reports_;
  const PassesOn passes_on_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CALLS_CALL_OBSERVER_H_
