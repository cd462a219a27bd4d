// Where typed unary requests enter: in front of every method that decides numbers or state.
#ifndef LOSSD_SERVER_RPC_SERVICES_STRICT_SERVICE_H_
#define LOSSD_SERVER_RPC_SERVICES_STRICT_SERVICE_H_

#include <google/protobuf/descriptor.h>
#include <grpcpp/grpcpp.h>

#include "absl/status/status.h"
#include "server/engine/common/counters.h"
#include "server/rpc/convert/grpc_status.h"
#include "server/rpc/convert/known_parts.h"

namespace lossd::rpc {

// Base of a service, around the generated class. Methods whose messages come as bytes have Parse (wire.h)
// instead. A new unary method belongs to one of the two as well, unless its request only asks what there is:
// strict_requests_test.py calls every method of the .proto files.
template <typename Generated>
class StrictService : public Generated {
 protected:
  // `methods` of the derived class: requests come to them only if this server knows all that is in them
  // (CheckKnown). For its constructor; `counters` outlives the service.
  template <typename... Methods>
  void TakeKnownRequestsOnly(engine::Counters* counters, Methods... methods) {
    (Guard(counters, methods), ...);
  }

 private:
  template <typename Derived, typename Request, typename Response>
  void Guard(engine::Counters* counters,
             grpc::ServerUnaryReactor* (Derived::*method)(grpc::CallbackServerContext*, const Request*,
                                                          Response*)) {
    auto* const self = static_cast<Derived*>(this);
    // What the generated class has registered is replaced by the same with a check in front; gRPC owns it.
    this->MarkMethodCallback(IndexOf(Request::descriptor()),
                             new grpc::internal::CallbackUnaryHandler<Request, Response>(
                                 [self, counters, method](grpc::CallbackServerContext* context,
                                                          const Request* request, Response* response) {
                                   if (const absl::Status known = CheckKnown(*request); !known.ok()) {
                                     grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
                                     reactor->Finish(ToGrpc(known, *counters));
                                     return reactor;
                                   }
                                   return (self->*method)(context, request, response);
                                 }));
  }

  // The number of the method that takes this; each has its own request. gRPC counts methods as the file does.
  static int IndexOf(const google::protobuf::Descriptor* request) {
    const google::protobuf::ServiceDescriptor* const service = request->file()->service(0);
    int index = 0;
    while (service->method(index)->input_type() != request) ++index;
    return index;
  }
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_SERVICES_STRICT_SERVICE_H_
