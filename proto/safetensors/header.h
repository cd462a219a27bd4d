// The header of a safetensors file: a JSON object that names each tensor, its dtype, its shape and its bytes.
// Layout of a file: header length (8 bytes, little-endian), header, tensor data.
// https://github.com/huggingface/safetensors#format
//
// Pure functions of their arguments; thread-safe. Offsets and sizes are in bytes.
#ifndef LOSSD_PROTO_SAFETENSORS_HEADER_H_
#define LOSSD_PROTO_SAFETENSORS_HEADER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lossd {

// The format's own limit, so that a damaged length cannot make a reader allocate without bound.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;

struct SafetensorsEntry {
  std::string name{};
  std::string dtype{};  // as the file spells it: "F32", "BF16", ...
  std::vector<int64_t> shape{};
  int64_t begin = 0;  // offsets into the tensor data
  int64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> tensors{};  // in the order of their data
  std::map<std::string, std::string> metadata{};
};

// Bytes of a tensor. INVALID_ARGUMENT if the dtype is unknown, a size is negative, the product overflows, or
// the elements do not fill whole bytes.
absl::StatusOr<int64_t> SafetensorsBytes(absl::string_view dtype, const std::vector<int64_t>& shape);

// Parses and checks a header whose file holds `data_bytes` of tensor data. The tensors must cover the data
// exactly, without gap or overlap. Keys of an entry that the format did not have are skipped; a dtype that it
// did not have is kept as it stands. INVALID_ARGUMENT says what is wrong; nothing is allocated beyond a small
// multiple of `json`.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json, int64_t data_bytes);

// The JSON of a header, padded with spaces so that the data behind the 8-byte length starts at a multiple
// of 8. INVALID_ARGUMENT for what ParseSafetensorsHeader would refuse, or if a name is not UTF-8.
absl::StatusOr<std::string> SerializeSafetensorsHeader(const SafetensorsHeader& header);

}  // namespace lossd

#endif  // LOSSD_PROTO_SAFETENSORS_HEADER_H_
