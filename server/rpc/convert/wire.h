// Messages of client streams as bytes. gRPC's typed streams report a message that cannot be parsed just as
// they report the client's end, so it would pass for a stream that ended well: streams that read take bytes
// and parse them here.
#ifndef LOSSD_SERVER_RPC_CONVERT_WIRE_H_
#define LOSSD_SERVER_RPC_CONVERT_WIRE_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/wire/compute_wire.h"
#include "server/engine/common/errors.h"
#include "server/rpc/convert/known_parts.h"

namespace lossd::rpc {

template <typename Message>
absl::Status Malformed(size_t length) {
  return engine::MakeError(absl::StatusCode::kInvalidArgument, engine::RejectReason::kMalformed, "message",
                           absl::StrCat("the message of ", length, " bytes is no valid ",
                                        std::string(Message::descriptor()->full_name())));
}

// Takes the bytes. INVALID_ARGUMENT if they are no `Message`, whose content is then unspecified, or hold what
// this server does not know (CheckKnown).
template <typename Message>
absl::Status Parse(grpc::ByteBuffer* bytes, Message* message) {
  const size_t length = bytes->Length();
  if (!grpc::SerializationTraits<Message>::Deserialize(bytes, message).ok()) {
    return Malformed<Message>(length);
  }
  return CheckKnown(*message);
}

// The same of a message of a Compute stream, whose tensors stay where they are.
template <typename Message>
absl::Status Parse(grpc::ByteBuffer* bytes, wire::Received<Message>* received) {
  const size_t length = bytes->Length();
  return wire::Decode(bytes, received) ? CheckKnown(received->message) : Malformed<Message>(length);
}

template <typename Message>
grpc::ByteBuffer Serialize(const Message& message) {
  grpc::ByteBuffer bytes;
  bool own_buffer = false;
  // Fails only beyond 2 GiB, which the limits on chunks rule out.
  grpc::SerializationTraits<Message>::Serialize(message, &bytes, &own_buffer);
  return bytes;
}

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CONVERT_WIRE_H_
