// Structs that begin with their size: how they are filled with defaults, read from a caller that was compiled
// for another version of the library, and written back to one.
#ifndef LOSSD_CLIENT_SRC_C_API_STRUCTS_H_
#define LOSSD_CLIENT_SRC_C_API_STRUCTS_H_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/src/c_api/status.h"

namespace lossd::c_api {

// What the ..._init functions fill in, struct_size apart.
template <typename Struct>
Struct Defaults();
template <>
lossd_client_options Defaults();
template <>
lossd_optimizer_config Defaults();
template <>
lossd_head_config Defaults();
template <>
lossd_session_options Defaults();
template <>
lossd_distillation Defaults();
template <>
lossd_target_lists Defaults();
template <>
lossd_batch Defaults();
template <>
lossd_outputs Defaults();
template <>
lossd_result Defaults();
template <>
lossd_flush_options Defaults();
template <>
lossd_flush_result Defaults();
template <>
lossd_gradient_stats Defaults();
template <>
lossd_step_options Defaults();
template <>
lossd_step_result Defaults();
template <>
lossd_logits Defaults();

// INVALID_ARGUMENT unless a struct of this size is one of a version that this library knows.
absl::Status CheckSize(absl::string_view name, size_t given, size_t known);

// The first `struct_size` bytes of the defaults: there may be no room for more. Beyond what is known here
// they are zeros.
template <typename Struct>
void Initialize(Struct* target, size_t struct_size) {
  static_assert(std::is_trivially_copyable_v<Struct>);
  if (target == nullptr || struct_size < sizeof(struct_size)) return;
  std::memset(static_cast<void*>(target), 0, struct_size);
  const Struct defaults = Defaults<Struct>();
  std::memcpy(static_cast<void*>(target), &defaults, std::min(struct_size, sizeof(Struct)));
  std::memcpy(static_cast<void*>(target), &struct_size, sizeof(struct_size));
}

// A copy in which fields that the caller does not know have their defaults. `name` is the argument's.
template <typename Struct>
absl::StatusOr<Struct> Read(const Struct* given, absl::string_view name) {
  if (absl::Status status = NotNull(given, name); !status.ok()) return status;
  size_t size = 0;
  std::memcpy(&size, given, sizeof(size));
  if (absl::Status status = CheckSize(name, size, sizeof(Struct)); !status.ok()) return status;
  Struct copy = Defaults<Struct>();
  std::memcpy(static_cast<void*>(&copy), given, size);
  return copy;
}

// Checks a struct that is to be written, before the work is done. It may be NULL.
template <typename Struct>
absl::Status CheckResult(const Struct* target, absl::string_view name) {
  return target == nullptr ? absl::OkStatus() : CheckSize(name, target->struct_size, sizeof(Struct));
}

// As much of `value` as the caller knows.
template <typename Struct>
void Write(Struct value, Struct* target) {
  if (target == nullptr) return;
  value.struct_size = target->struct_size;
  std::memcpy(static_cast<void*>(target), &value, value.struct_size);
}

}  // namespace lossd::c_api

#endif  // LOSSD_CLIENT_SRC_C_API_STRUCTS_H_
