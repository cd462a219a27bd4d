#include "server/rpc/lanes/relay_wire.h"

#include <grpcpp/support/slice.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "lossd/group/v1/relay.pb.h"
#include "server/rpc/convert/wire.h"

namespace lossd::rpc {
namespace {

absl::Status Senseless(const char* what) {
  return engine::MakeError(absl::StatusCode::kInvalidArgument, engine::RejectReason::kMalformed, "message",
                           absl::StrCat("a relayed message ", what));
}

bool IsPossible(const group::v1::HeldTensor& held, int element_bytes) {
  return held.bytes() >= 0 && held.non_finite() >= 0 && held.non_finite() <= held.bytes() / element_bytes;
}

}  // namespace

absl::Status ParseRelayed(grpc::ByteBuffer* bytes, RelayedRequest* relayed) {
  // The shortest of elements that hidden states are made of.
  constexpr int kElementBytes = 2;

  *relayed = {};
  const size_t length = bytes->Length();
  group::v1::RelayRequest message;
  if (!grpc::SerializationTraits<group::v1::RelayRequest>::Deserialize(bytes, &message).ok()) {
    return Malformed<group::v1::RelayRequest>(length);
  }
  // The rank, which is of this version, has looked for fields that are not known.
  const grpc::Slice slice(message.request());
  grpc::ByteBuffer inner(&slice, 1);
  if (!wire::Decode(&inner, &relayed->request)) {
    return Malformed<v1::ComputeRequest>(message.request().size());
  }
  if (relayed->request.large.bytes > 0 || relayed->request.extra.bytes > 0) {
    return Senseless("holds hidden states");
  }
  if (relayed->request.message.has_chunk() != (message.payload() > 0)) {
    return Senseless("numbers what is no chunk, or a chunk without a number");
  }
  if (!IsPossible(message.hidden_states(), kElementBytes) ||
      !IsPossible(message.teacher_hidden_states(), kElementBytes)) {
    return Senseless("names sizes that no tensor has");
  }
  if (message.has_hello()) {
    relayed->hello = {.epoch = message.hello().epoch(),
                      .rank = message.hello().rank(),
                      .relay = message.hello().relay(),
                      .peer = message.peer()};
  }
  relayed->held = {.rank = 0,
                   .number = message.payload(),
                   .hidden_bytes = message.hidden_states().bytes(),
                   .teacher_bytes = message.teacher_hidden_states().bytes(),
                   .non_finite = message.hidden_states().non_finite(),
                   .teacher_non_finite = message.teacher_hidden_states().non_finite()};
  return absl::OkStatus();
}

grpc::ByteBuffer WriteRelayed(const std::optional<RelayId>& hello, const v1::ComputeRequest& request,
                              const engine::HeldTensors& held) {
  group::v1::RelayRequest message;
  if (hello.has_value()) {
    message.mutable_hello()->set_epoch(hello->epoch);
    message.mutable_hello()->set_rank(hello->rank);
    message.mutable_hello()->set_relay(hello->relay);
    message.set_peer(hello->peer);
  }
  request.SerializeToString(message.mutable_request());
  if (held.number > 0) {
    message.set_payload(held.number);
    message.mutable_hidden_states()->set_bytes(held.hidden_bytes);
    message.mutable_hidden_states()->set_non_finite(held.non_finite);
    message.mutable_teacher_hidden_states()->set_bytes(held.teacher_bytes);
    message.mutable_teacher_hidden_states()->set_non_finite(held.teacher_non_finite);
  }
  return Serialize(message);
}

}  // namespace lossd::rpc
