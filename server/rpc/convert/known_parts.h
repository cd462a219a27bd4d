// Refuses what a newer client may send and this server would drop: fields, and values of enums, that its
// .proto files do not name. Dropped, an option would leave gradients wrong without a word.
#ifndef LOSSD_SERVER_RPC_CONVERT_KNOWN_PARTS_H_
#define LOSSD_SERVER_RPC_CONVERT_KNOWN_PARTS_H_

#include <google/protobuf/message.h>

#include "absl/status/status.h"

namespace lossd::rpc {

// INVALID_ARGUMENT that names the first unknown field, or value, by its number, its message and this server's
// version; that of messages inside `request`, too.
absl::Status CheckKnown(const google::protobuf::Message& request);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CONVERT_KNOWN_PARTS_H_
