#ifndef LOSSD_SERVER_RPC_COMPRESSION_H_
#define LOSSD_SERVER_RPC_COMPRESSION_H_

#include <grpc/compression.h>
#include <grpcpp/server_builder.h>

namespace lossd::rpc {

// Compressed messages are answered with UNIMPLEMENTED as soon as their headers are there. gRPC would inflate
// them before it looks at their size, which is not bounded: 6 MB from a stranger took more than 5 GB.
inline void RefuseCompression(grpc::ServerBuilder& builder) {
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
}

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_COMPRESSION_H_
