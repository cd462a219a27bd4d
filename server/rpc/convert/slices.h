// Results as gRPC sends them, without a copy.
#ifndef LOSSD_SERVER_RPC_CONVERT_SLICES_H_
#define LOSSD_SERVER_RPC_CONVERT_SLICES_H_

#include <grpcpp/support/slice.h>

#include <cstddef>
#include <memory>

#include "server/engine/memory/payload.h"

namespace lossd::rpc {

// Keeps the memory until gRPC drops it.
inline grpc::Slice SliceOf(engine::ResultBytes bytes) {
  if (bytes.size() == 0) return {};
  using Owner = std::shared_ptr<std::byte[]>;
  auto owner = std::make_unique<Owner>(bytes.owner());
  return grpc::Slice(
      bytes.data(), static_cast<size_t>(bytes.size()),
      [](void* held) { std::unique_ptr<Owner>(static_cast<Owner*>(held)).reset(); }, owner.release());
}

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CONVERT_SLICES_H_
