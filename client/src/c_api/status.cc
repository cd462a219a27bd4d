#include "client/src/c_api/status.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "lossd/client.h"

namespace lossd::c_api {
namespace {

// Made when the library is loaded, while there is memory.
lossd_status out_of_memory{.code = LOSSD_RESOURCE_EXHAUSTED,
                           .message = "this process has no memory left for the call"};

}  // namespace

lossd_status* OutOfMemory() noexcept { return &out_of_memory; }

lossd_status* ToC(const absl::Status& status) noexcept {
  if (status.ok()) return nullptr;
  try {
    // absl's codes are gRPC's, and so are ours.
    const int32_t code = IsWindowLost(status) ? LOSSD_WINDOW_LOST : static_cast<int32_t>(status.code());
    const auto flush = FlushOf(status);
    return new lossd_status{.code = code,
                            .message = std::string(status.message()),
                            .flush_id = flush.has_value() ? flush->flush_id : std::string()};
  } catch (...) {
    return OutOfMemory();
  }
}

lossd_status* UnexpectedError(const char* what) noexcept {
  try {
    return ToC(absl::InternalError(what));
  } catch (...) {
    return OutOfMemory();
  }
}

absl::Status NullArgument(absl::string_view name) {
  return absl::InvalidArgumentError(absl::StrCat(name, " is NULL"));
}

char* CopyText(const std::string& text) {
  char* copy = new char[text.size() + 1];
  std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

}  // namespace lossd::c_api

uint32_t lossd_api_version(void) { return LOSSD_C_API_VERSION; }

const char* lossd_version(void) { return LOSSD_VERSION; }

int32_t lossd_status_code(const lossd_status* status) { return status == nullptr ? LOSSD_OK : status->code; }

const char* lossd_status_message(const lossd_status* status) {
  return status == nullptr ? "" : status->message.c_str();
}

const char* lossd_status_flush_id(const lossd_status* status) {
  return status == nullptr ? "" : status->flush_id.c_str();
}

void lossd_status_free(lossd_status* status) {
  if (status != lossd::c_api::OutOfMemory()) delete status;
}

void lossd_string_free(char* text) { delete[] text; }
