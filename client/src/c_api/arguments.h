// Arguments as C gives them, checked and turned into what lossd/client.h takes.
#ifndef LOSSD_CLIENT_SRC_C_API_ARGUMENTS_H_
#define LOSSD_CLIENT_SRC_C_API_ARGUMENTS_H_

#include <array>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/src/c_api/status.h"
#include "lossd/client.h"

namespace lossd::c_api {

// The value of an enum by its number in C. INVALID_ARGUMENT, with the name, for numbers that have none.
absl::Status UnknownValue(absl::string_view name, int32_t given, size_t values);
template <typename Enum, size_t kValues>
absl::StatusOr<Enum> EnumOf(const std::array<Enum, kValues>& values, int32_t given, absl::string_view name) {
  if (given < 0 || static_cast<size_t>(given) >= kValues) return UnknownValue(name, given, kValues);
  return values.at(static_cast<size_t>(given));
}
absl::StatusOr<DataType> DataTypeOf(int32_t given, absl::string_view name);

// Unset if it is NaN.
template <typename Number>
std::optional<Number> OptionalOf(Number given) {
  return std::isnan(given) ? std::nullopt : std::optional<Number>(given);
}

// Empty of NULL.
inline std::string TextOf(const char* given) { return given == nullptr ? std::string() : given; }

// `given` may be NULL; `count` is at least 0.
template <typename T>
std::span<T> SpanOf(T* given, int64_t count) {
  return given == nullptr ? std::span<T>() : std::span<T>(given, static_cast<size_t>(count));
}

// How many elements an array [rows, columns] has. INVALID_ARGUMENT, with both names, if no memory has as
// many.
absl::StatusOr<int64_t> ElementsOf(absl::string_view rows_name, int64_t rows, absl::string_view columns_name,
                                   int64_t columns);

Progress ProgressOf(lossd_progress progress, void* user);

}  // namespace lossd::c_api

#endif  // LOSSD_CLIENT_SRC_C_API_ARGUMENTS_H_
