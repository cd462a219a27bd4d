// What a received message holds that this program's .proto files do not name: the work of a newer one.
#ifndef LOSSD_PROTO_WIRE_UNKNOWN_PARTS_H_
#define LOSSD_PROTO_WIRE_UNKNOWN_PARTS_H_

#include <google/protobuf/message.h>

#include <optional>
#include <string>

namespace lossd::wire {

// A field that its message does not have, or has as another type; or a value that an enum does not have.
struct UnknownPart {
  const google::protobuf::Descriptor* message = nullptr;  // the one that holds it
  int field = 0;                                          // its number there
  // Where it is, from the message that was searched: "options.distillation.divergence", or "options.11" for
  // field 11 of `options`.
  std::string path;
  const google::protobuf::EnumDescriptor* enumeration = nullptr;  // null: the field itself is unknown
  int value = 0;                                                  // of that enum
};

// The first one in `message` or in any message inside it; none if all of it is known. Costs some ten
// nanoseconds for each field of a message or enum type that is set, and allocates nothing if none is found.
std::optional<UnknownPart> FindUnknownPart(const google::protobuf::Message& message);

}  // namespace lossd::wire

#endif  // LOSSD_PROTO_WIRE_UNKNOWN_PARTS_H_
