// Messages of streams of rows. The first byte says which, and how it is cut into slices.
#include <google/protobuf/stubs/logging.h>

#include <algorithm>
#include <string>

#include "proto/wire/row_wire.h"
#include "tests/fuzz/fuzz.h"
#include "tests/unit/wire/wire_bytes.h"

namespace lossd::fuzz {
namespace {

void SetRows(const std::string& rows, v1::ReadGradientResponse* message) { message->set_gradient(rows); }
void SetRows(const std::string& rows, v1::ReadWeightsResponse* message) { message->set_weights(rows); }

template <typename Message>
std::string Whole(const wire::ReceivedRows<Message>& received) {
  Message whole = received.message;
  SetRows(wire::ToString(received.rows), &whole);
  return whole.SerializeAsString();
}

// Protobuf's own parser says what is right.
template <typename Message>
void Check(const std::string& bytes, size_t slice_size) {
  Message expected;
  const bool valid = expected.ParseFromString(bytes);
  grpc::ByteBuffer buffer = wire::InSlices(bytes, slice_size);
  wire::ReceivedRows<Message> received;
  Expect(wire::Decode(&buffer, &received) == valid, "it is accepted exactly if protobuf accepts it");
  if (!valid) return;
  Expect(received.rows.bytes <= static_cast<int64_t>(bytes.size()), "the rows are a part of what came");
  const std::string same = expected.SerializeAsString();
  Expect(Whole(received) == same, "the content is what protobuf makes of it");

  grpc::ByteBuffer encoded = wire::Encode(received.message, grpc::Slice(wire::ToString(received.rows)));
  wire::ReceivedRows<Message> again;
  Expect(wire::Decode(&encoded, &again), "what is written is accepted");
  Expect(Whole(again) == same, "what is written is read again");
}

// They are only written.
void CheckLogits(const std::string& bytes) {
  v1::LogitsResponse expected;
  if (!expected.ParseFromString(bytes)) return;
  v1::LogitsResponse header = expected;
  header.clear_logits();
  v1::LogitsResponse read;
  Expect(read.ParseFromString(wire::ToString(wire::Encode(header, grpc::Slice(expected.logits())))),
         "protobuf accepts what is written");
  Expect(read.SerializeAsString() == expected.SerializeAsString(), "protobuf reads what was meant");
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const google::protobuf::LogSilencer kSilent;  // it reports every string that is no UTF-8
  if (size == 0) return 0;
  const std::string bytes(lossd::fuzz::TextOf(data + 1, size - 1));
  // Few slices of a long message: each is an allocation.
  const size_t slice_size = std::max<size_t>(1 + (data[0] >> 2), bytes.size() / 16);
  switch (data[0] & 3) {
    case 0:
      lossd::fuzz::Check<lossd::v1::ReadGradientResponse>(bytes, slice_size);
      break;
    case 1:
      lossd::fuzz::Check<lossd::v1::ReadWeightsResponse>(bytes, slice_size);
      break;
    default:
      lossd::fuzz::CheckLogits(bytes);
  }
  return 0;
}
