// Results as C takes them.
#ifndef LOSSD_CLIENT_SRC_C_API_OUTPUT_H_
#define LOSSD_CLIENT_SRC_C_API_OUTPUT_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/c_api/json.h"
#include "client/src/c_api/status.h"

namespace lossd::c_api {

template <typename T>
absl::Status PutJson(const absl::StatusOr<T>& value, char** json) {
  if (!value.ok()) return value.status();
  *json = CopyText(TextOf(ToJson(*value)));
  return absl::OkStatus();
}

// A new handle, which holds the value.
template <typename Handle, typename T>
absl::Status PutHandle(absl::StatusOr<T> value, Handle** handle) {
  if (!value.ok()) return value.status();
  *handle = new Handle{*std::move(value)};
  return absl::OkStatus();
}

// `version` may be NULL.
inline absl::Status PutVersion(const absl::StatusOr<uint64_t>& value, uint64_t* version) {
  if (value.ok() && version != nullptr) *version = *value;
  return value.status();
}

}  // namespace lossd::c_api

#endif  // LOSSD_CLIENT_SRC_C_API_OUTPUT_H_
