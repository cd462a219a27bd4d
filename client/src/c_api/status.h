// The border between the client library and C: no exception crosses it, and errors are lossd_status.
#ifndef LOSSD_CLIENT_SRC_C_API_STATUS_H_
#define LOSSD_CLIENT_SRC_C_API_STATUS_H_

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "lossd/c_api.h"

struct lossd_status {
  int32_t code = LOSSD_OK;
  std::string message;
  std::string flush_id = {};  // that lossd::FlushOf tells of the status, or empty
};

namespace lossd::c_api {

// NULL of OK. Where there is no memory left even for this, a status that need not be freed.
lossd_status* ToC(const absl::Status& status) noexcept;
lossd_status* OutOfMemory() noexcept;

absl::Status NullArgument(absl::string_view name);
// INVALID_ARGUMENT, with the name, if the pointer is NULL.
template <typename T>
absl::Status NotNull(const T* pointer, absl::string_view name) {
  return pointer == nullptr ? NullArgument(name) : absl::OkStatus();
}

// INTERNAL, or what OutOfMemory gives if there is none left for `what`.
lossd_status* UnexpectedError(const char* what) noexcept;

// The status that `function` returns, or what it throws as one.
template <typename Function>
lossd_status* Guarded(Function&& function) noexcept {
  try {
    return ToC(std::forward<Function>(function)());
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  } catch (const std::exception& error) {
    return UnexpectedError(error.what());
  } catch (...) {
    return UnexpectedError("an exception of unknown type was thrown");
  }
}

// A copy that lossd_string_free frees. Throws std::bad_alloc.
char* CopyText(const std::string& text);

}  // namespace lossd::c_api

#endif  // LOSSD_CLIENT_SRC_C_API_STATUS_H_
