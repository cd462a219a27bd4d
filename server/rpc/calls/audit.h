// The calls that change what others rely on: heads, weights, checkpoints, the server itself. Each of them has
// a line in the log at info, whatever became of it (CallReports); here is which they are, and what their
// messages say of what was done to what.
#ifndef LOSSD_SERVER_RPC_CALLS_AUDIT_H_
#define LOSSD_SERVER_RPC_CALLS_AUDIT_H_

#include <google/protobuf/message.h>

#include <string_view>
#include <vector>

#include "server/telemetry/common/logging.h"

namespace lossd::rpc {

// A method that is audited. gRPC's interceptors have messages of its calls as void pointers.
struct AuditedMethod {
  std::string_view name;  // "HeadService/CreateHead"
  const google::protobuf::Message& (*request)(const void*);
  const google::protobuf::Message& (*response)(const void*);
};

// Null if the method is not audited. Valid for ever.
const AuditedMethod* FindAudited(std::string_view method);

// Adds head, tag, generation and the like, as far as the message has them; they take the place of what an
// earlier message said. Nothing in them lets anybody speak for a session or a flush.
void AddFacts(const google::protobuf::Message& message, std::vector<telemetry::LogField>* facts);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CALLS_AUDIT_H_
