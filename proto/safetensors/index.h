// The index of a model that is spread over several safetensors files: a JSON object whose "weight_map" names
// the file of each tensor.
#ifndef LOSSD_PROTO_SAFETENSORS_INDEX_H_
#define LOSSD_PROTO_SAFETENSORS_INDEX_H_

#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lossd {

// Tensors' names to the files', as they are written. INVALID_ARGUMENT if it is not JSON with such an object
// of text, or names a tensor twice. What else there is in it is passed over; nothing is allocated beyond a
// small multiple of `json`. Thread-safe.
absl::StatusOr<std::map<std::string, std::string>> ParseSafetensorsIndex(absl::string_view json);

}  // namespace lossd

#endif  // LOSSD_PROTO_SAFETENSORS_INDEX_H_
