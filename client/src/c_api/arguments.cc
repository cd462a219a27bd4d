#include "client/src/c_api/arguments.h"

#include "absl/strings/str_cat.h"

namespace lossd::c_api {

absl::Status UnknownValue(absl::string_view name, int32_t given, size_t values) {
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is ", given, "; it must be in [0, ", values - 1, "] (lossd/c_api.h)"));
}

absl::StatusOr<DataType> DataTypeOf(int32_t given, absl::string_view name) {
  static constexpr std::array kTypes = {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16};
  return EnumOf(kTypes, given, name);
}

absl::StatusOr<int64_t> ElementsOf(absl::string_view rows_name, int64_t rows, absl::string_view columns_name,
                                   int64_t columns) {
  int64_t elements = 0;
  if (!__builtin_mul_overflow(rows, columns, &elements)) return elements;
  return absl::InvalidArgumentError(absl::StrCat(rows_name, " is ", rows, " and ", columns_name, " ", columns,
                                                 ": no array has as many elements"));
}

Progress ProgressOf(lossd_progress progress, void* user) {
  if (progress == nullptr) return {};
  return [progress, user](int64_t done, int64_t total) { progress(user, done, total); };
}

}  // namespace lossd::c_api
