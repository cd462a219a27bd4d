// The trace that a call belongs to, as W3C's Trace Context writes it: clients send it as metadata, servers
// name it in logs.
#ifndef LOSSD_PROTO_WIRE_TRACE_CONTEXT_H_
#define LOSSD_PROTO_WIRE_TRACE_CONTEXT_H_

#include <cstddef>
#include <string_view>

namespace lossd::wire {

inline constexpr char kTraceParentKey[] = "traceparent";
inline constexpr char kTraceStateKey[] = "tracestate";
inline constexpr size_t kMaxTraceState = 512;

// The trace id of a `traceparent` (32 lower-case hex digits, a part of `parent`); empty if it is not one. Of
// a version above 00, what 00 has is read.
std::string_view TraceIdOf(std::string_view parent);

// Whether it may be sent as a `tracestate`: printable ASCII of at most kMaxTraceState bytes, not empty.
bool IsTraceState(std::string_view state);

}  // namespace lossd::wire

#endif  // LOSSD_PROTO_WIRE_TRACE_CONTEXT_H_
