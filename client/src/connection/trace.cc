#include "client/src/connection/trace.h"

#include <utility>

#include "proto/wire/trace_context.h"

namespace lossd::internal {
namespace {

thread_local const TraceContext* scoped_trace = nullptr;

}  // namespace

TraceContext TraceNow(const TraceSource& source) {
  if (scoped_trace != nullptr) return *scoped_trace;
  if (source == nullptr) return {};
  TraceContext trace = source();
  if (wire::TraceIdOf(trace.parent).empty()) return {};
  if (!wire::IsTraceState(trace.state)) trace.state.clear();
  return trace;
}

TraceScope::TraceScope(const TraceContext* trace) : outer_(std::exchange(scoped_trace, trace)) {}

TraceScope::~TraceScope() { scoped_trace = outer_; }

void AddTrace(const TraceSource& source, grpc::ClientContext* context) {
  const TraceContext trace = TraceNow(source);
  if (trace.parent.empty()) return;
  context->AddMetadata(wire::kTraceParentKey, trace.parent);
  if (!trace.state.empty()) context->AddMetadata(wire::kTraceStateKey, trace.state);
}

}  // namespace lossd::internal
