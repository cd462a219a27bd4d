// What a rank passes on to the leader of a client's stream.
#include <google/protobuf/stubs/logging.h>

#include <string>

#include "server/rpc/lanes/relay_wire.h"
#include "tests/fuzz/fuzz.h"
#include "tests/unit/wire/wire_bytes.h"

namespace lossd::fuzz {
namespace {

void Check(const rpc::RelayedRequest& relayed) {
  const engine::HeldTensors& held = relayed.held;
  Expect(relayed.request.large.bytes == 0 && relayed.request.extra.bytes == 0, "no hidden states have come");
  Expect(relayed.request.message.has_chunk() == (held.number > 0),
         "chunks have numbers, and nothing else has");
  Expect(held.hidden_bytes >= 0 && held.teacher_bytes >= 0, "tensors have sizes");
  Expect(held.non_finite >= 0 && held.non_finite <= held.hidden_bytes,
         "what is not finite is a part of them");

  v1::ComputeRequest request = relayed.request.message;
  if (request.has_chunk()) request.mutable_chunk()->set_labels(wire::ToString(relayed.request.small));
  grpc::ByteBuffer bytes = rpc::WriteRelayed(relayed.hello, request, held);
  rpc::RelayedRequest again;
  Expect(rpc::ParseRelayed(&bytes, &again).ok(), "what is written is accepted");
  Expect(again.hello == relayed.hello, "the same rank says hello");
  Expect(wire::Whole(again.request).SerializeAsString() == request.SerializeAsString(),
         "the request is the same");
  Expect(again.held.number == held.number, "the number is the same");
  // Without a chunk the sizes are of nothing.
  if (held.number == 0) return;
  Expect(again.held.hidden_bytes == held.hidden_bytes && again.held.teacher_bytes == held.teacher_bytes &&
             again.held.non_finite == held.non_finite &&
             again.held.teacher_non_finite == held.teacher_non_finite,
         "the tensors are the same");
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const google::protobuf::LogSilencer kSilent;  // it reports every string that is no UTF-8
  grpc::ByteBuffer bytes = lossd::wire::InSlices(std::string(lossd::fuzz::TextOf(data, size)), size + 1);
  lossd::rpc::RelayedRequest relayed;
  if (lossd::rpc::ParseRelayed(&bytes, &relayed).ok()) lossd::fuzz::Check(relayed);
  return 0;
}
