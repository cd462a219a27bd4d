// Sees every call of every service, from the moment gRPC takes it until gRPC is done with it, and reports how
// it ended. Streams are seen as calls too; what is in them is not looked at.
#ifndef LOSSD_SERVER_RPC_CALL_OBSERVER_H_
#define LOSSD_SERVER_RPC_CALL_OBSERVER_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/server_interceptor.h>

#include <map>
#include <string>

#include "server/rpc/call_reports.h"

namespace lossd::rpc {

class CallObserver final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  // `reports` outlives the server.
  explicit CallObserver(CallReports* reports) : reports_(reports) {}

  // Null for services that are not lossd's: gRPC's own health and reflection.
  grpc::experimental::Interceptor* CreateServerInterceptor(grpc::experimental::ServerRpcInfo* info) override;

 private:
  CallReports* const reports_;
};

using CallMetadata = std::multimap<grpc::string_ref, grpc::string_ref>;

// The id of the trace that a call belongs to; empty if its client sent none, or one that is malformed.
std::string TraceIdOf(const CallMetadata& metadata);

// For who refuses calls before an observer sees them (grpc::AuthMetadataProcessor, with its InputMetadata).
void ReportRefused(CallReports& reports, const CallMetadata& metadata, const grpc::Status& status,
                   const std::string& peer = {});

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CALL_OBSERVER_H_
