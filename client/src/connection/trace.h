// The trace that calls belong to, as they carry it.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_TRACE_H_
#define LOSSD_CLIENT_SRC_CONNECTION_TRACE_H_

#include <functional>

#include "grpcpp/client_context.h"
#include "lossd/client.h"

namespace lossd::internal {

// ClientOptions::trace.
using TraceSource = std::function<TraceContext()>;

// What `source` says in this moment, in this thread. None (an empty parent) if it says nothing that may be
// sent: gRPC would end the process over some of it.
TraceContext TraceNow(const TraceSource& source);

// Calls that this thread makes while it lives belong to `trace`, whatever their source would say.
class TraceScope {
 public:
  explicit TraceScope(const TraceContext* trace);
  ~TraceScope();
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  const TraceContext* const outer_;
};

// Before the call is started.
void AddTrace(const TraceSource& source, grpc::ClientContext* context);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_TRACE_H_
