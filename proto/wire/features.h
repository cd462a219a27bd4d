// What a server can do, by the names that the .proto files give as options (types.proto): servers list them,
// clients look before they send. Thread-safe.
#ifndef LOSSD_PROTO_WIRE_FEATURES_H_
#define LOSSD_PROTO_WIRE_FEATURES_H_

#include <google/protobuf/message.h>

#include <optional>
#include <set>
#include <string>

namespace lossd::wire {

using Features = std::set<std::string>;

// Every name in this program's .proto files.
const Features& KnownFeatures();

struct MissingFeature {
  std::string name;
  // What needs it, from the message that was searched: "options.distillation"; empty: that message itself.
  std::string path;
};

// The first feature that `message`, or anything that is set in it, needs and `server` does not have.
std::optional<MissingFeature> FindMissingFeature(const google::protobuf::Message& message,
                                                 const Features& server);

}  // namespace lossd::wire

#endif  // LOSSD_PROTO_WIRE_FEATURES_H_
