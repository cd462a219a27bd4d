// Size of the messages in a stream of rows.
#ifndef LOSSD_SERVER_RPC_CONVERT_ROW_MESSAGES_H_
#define LOSSD_SERVER_RPC_CONVERT_ROW_MESSAGES_H_

#include <cstdint>

namespace lossd::rpc {

// Bytes of rows in one message: fewer than the 4 MiB that gRPC clients accept by default.
inline constexpr int64_t kRowMessageBytes = int64_t{2} << 20;

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CONVERT_ROW_MESSAGES_H_
