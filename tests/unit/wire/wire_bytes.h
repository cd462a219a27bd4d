// Messages as strings, cut into slices, and put together again after decoding.
#ifndef LOSSD_TESTS_UNIT_WIRE_WIRE_BYTES_H_
#define LOSSD_TESTS_UNIT_WIRE_WIRE_BYTES_H_

#include <grpcpp/support/byte_buffer.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "proto/wire/compute_wire.h"

namespace lossd::wire {

// In slices of `size`, each in an allocation of exactly its size, so that AddressSanitizer sees what is read
// outside of it.
inline grpc::ByteBuffer InSlices(const std::string& bytes, size_t size) {
  std::vector<grpc::Slice> slices;
  for (size_t begin = 0; begin < bytes.size(); begin += size) {
    const size_t length = std::min(size, bytes.size() - begin);
    auto copy = std::make_unique<char[]>(length);
    std::memcpy(copy.get(), bytes.data() + begin, length);
    slices.emplace_back(copy.release(), length,
                        [](void* memory) { std::unique_ptr<char[]>(static_cast<char*>(memory)); });
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

inline std::string ToString(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  if (!buffer.Dump(&slices).ok()) return "no bytes";
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

inline std::string ToString(const Tensor& tensor) {
  std::string bytes(static_cast<size_t>(tensor.bytes), '\0');
  tensor.CopyTo(std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

// The message with its tensors back in place.
inline v1::ComputeRequest Whole(const ReceivedRequest& received) {
  v1::ComputeRequest whole = received.message;
  if (!whole.has_chunk()) return whole;
  whole.mutable_chunk()->set_labels(ToString(received.small));
  whole.mutable_chunk()->set_hidden_states(ToString(received.large));
  whole.mutable_chunk()->set_teacher_hidden_states(ToString(received.extra));
  return whole;
}
inline v1::ComputeResponse Whole(const ReceivedResponse& received) {
  v1::ComputeResponse whole = received.message;
  if (!whole.has_result()) return whole;
  whole.mutable_result()->set_losses(ToString(received.small));
  whole.mutable_result()->set_dx(ToString(received.large));
  return whole;
}

}  // namespace lossd::wire

#endif  // LOSSD_TESTS_UNIT_WIRE_WIRE_BYTES_H_
