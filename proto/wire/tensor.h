// The bytes of a tensor in a received message, where they arrived.
#ifndef LOSSD_PROTO_WIRE_TENSOR_H_
#define LOSSD_PROTO_WIRE_TENSOR_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lossd::wire {

// A `bytes` field of a received message: where its bytes lie, in order. Owns nothing.
struct Tensor {
  std::vector<std::span<const std::byte>> parts;
  int64_t bytes = 0;

  // `target` has `bytes` bytes.
  void CopyTo(std::span<std::byte> target) const;
  // The same for a target in several pieces, filled one after the other.
  void CopyTo(std::span<const std::span<std::byte>> targets) const;
};

}  // namespace lossd::wire

#endif  // LOSSD_PROTO_WIRE_TENSOR_H_
