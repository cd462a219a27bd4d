// What gRPC has to say goes into the server's log, as lines like the others, and no faster than somebody can
// read: what it says of broken handshakes and lacking files is caused by whoever connects.
#ifndef LOSSD_SERVER_RPC_CALLS_GRPC_LOG_H_
#define LOSSD_SERVER_RPC_CALLS_GRPC_LOG_H_

namespace lossd::rpc {

// Once, after the log was set up.
void LogWhatGrpcSays();

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CALLS_GRPC_LOG_H_
