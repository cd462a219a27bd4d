// Messages of a Compute stream. The first byte says which of the two, and how it is cut into slices.
#include <google/protobuf/stubs/logging.h>

#include <algorithm>
#include <string>

#include "proto/wire/compute_wire.h"
#include "tests/fuzz/fuzz.h"
#include "tests/unit/wire/wire_bytes.h"

namespace lossd::fuzz {
namespace {

grpc::ByteBuffer EncodeAgain(const wire::ReceivedRequest& received) {
  const std::string labels = wire::ToString(received.small);
  return wire::Encode(received.message.chunk(), std::as_bytes(std::span(labels)),
                      grpc::Slice(wire::ToString(received.large)),
                      grpc::Slice(wire::ToString(received.extra)));
}
grpc::ByteBuffer EncodeAgain(const wire::ReceivedResponse& received) {
  const std::string losses = wire::ToString(received.small);
  return wire::Encode(received.message.result(), std::as_bytes(std::span(losses)),
                      grpc::Slice(wire::ToString(received.large)));
}

bool HasBody(const v1::ComputeRequest& request) { return request.has_chunk(); }
bool HasBody(const v1::ComputeResponse& response) { return response.has_result(); }

void CheckSizes(size_t size, int64_t tensors, int64_t kept) {
  Expect(tensors <= static_cast<int64_t>(size), "tensors are parts of what came");
  Expect(kept >= tensors, "whoever keeps tensors keeps at least their bytes");
}

// Protobuf's own parser says what is right.
template <typename Message>
void Check(const std::string& bytes, size_t slice_size) {
  Message expected;
  const bool valid = expected.ParseFromString(bytes);
  grpc::ByteBuffer buffer = wire::InSlices(bytes, slice_size);
  wire::Received<Message> received;
  Expect(wire::Decode(&buffer, &received) == valid, "it is accepted exactly if protobuf accepts it");
  if (!valid) return;
  CheckSizes(bytes.size(), received.small.bytes + received.large.bytes + received.extra.bytes,
             received.kept_bytes);
  const std::string same = expected.SerializeAsString();
  Expect(wire::Whole(received).SerializeAsString() == same, "the content is what protobuf makes of it");
  if (!HasBody(expected)) return;

  grpc::ByteBuffer encoded = EncodeAgain(received);
  Message read;
  Expect(read.ParseFromString(wire::ToString(encoded)), "protobuf accepts what is written");
  // Unknown fields of the outer message are not in the header that is written.
  Expect(HasBody(read), "what is written has the body");
  wire::Received<Message> again;
  Expect(wire::Decode(&encoded, &again), "what is written is accepted");
  Expect(wire::Whole(again).SerializeAsString() == read.SerializeAsString(),
         "it is read as protobuf reads it");
  Expect(wire::ToString(again.large) == wire::ToString(received.large) &&
             wire::ToString(again.small) == wire::ToString(received.small) &&
             wire::ToString(again.extra) == wire::ToString(received.extra),
         "the tensors are the same again");
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const google::protobuf::LogSilencer kSilent;  // it reports every string that is no UTF-8
  if (size == 0) return 0;
  const std::string bytes(lossd::fuzz::TextOf(data + 1, size - 1));
  // Few slices of a long message: each is an allocation.
  const size_t slice_size = std::max<size_t>(1 + (data[0] >> 1), bytes.size() / 16);
  if ((data[0] & 1) == 0) {
    lossd::fuzz::Check<lossd::v1::ComputeRequest>(bytes, slice_size);
  } else {
    lossd::fuzz::Check<lossd::v1::ComputeResponse>(bytes, slice_size);
  }
  return 0;
}
