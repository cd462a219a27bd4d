#include "server/telemetry/common/service_counters.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"

namespace lossd::telemetry {

const char* StatusCodeName(int code) {
  // Its numbers are gRPC's.
  static const auto& names = *new auto([] {
    std::array<std::string, kStatusCodeCount> all;
    for (int i = 0; i < kStatusCodeCount; ++i) {
      all[static_cast<size_t>(i)] = absl::StatusCodeToString(static_cast<absl::StatusCode>(i));
    }
    return all;
  }());
  return code >= 0 && code < kStatusCodeCount ? names[static_cast<size_t>(code)].c_str() : "UNKNOWN";
}

RpcCounters::RpcCounters(const std::vector<std::string>& methods) {
  for (const std::string& method : methods) methods_.push_back(std::make_unique<RpcMethod>(method));
}

RpcMethod* RpcCounters::Find(std::string_view name) {
  const auto found = std::find_if(methods_.begin(), methods_.end(),
                                  [&](const auto& method) { return method->name == name; });
  return found == methods_.end() ? nullptr : found->get();
}

std::string WithoutIds(std::string_view text) {
  constexpr std::ptrdiff_t kShortestId = 16;  // digits
  constexpr size_t kKept = 6;
  const auto is_digit = [](char c) { return absl::ascii_isxdigit(static_cast<unsigned char>(c)); };
  const auto is_decimal = [](char c) { return absl::ascii_isdigit(static_cast<unsigned char>(c)); };
  std::string shown;
  while (!text.empty()) {
    // Hyphens are between the digits of an id, not before them.
    const size_t begin = static_cast<size_t>(std::find_if(text.begin(), text.end(), is_digit) - text.begin());
    shown += text.substr(0, begin);
    text.remove_prefix(begin);
    const auto end =
        std::find_if_not(text.begin(), text.end(), [&](char c) { return c == '-' || is_digit(c); });
    const std::string_view run = text.substr(0, static_cast<size_t>(end - text.begin()));
    const bool id = std::count_if(run.begin(), run.end(), is_digit) >= kShortestId &&
                    !std::all_of(run.begin(), run.end(), is_decimal);
    shown += id ? run.substr(0, kKept) : run;
    if (id) shown += "…";
    text.remove_prefix(run.size());
  }
  return shown;
}

void RecentErrors::Add(RecentError error) {
  error.message = WithoutIds(error.message);
  const engine::MutexLock lock(mutex_);
  errors_.push_front(std::move(error));
  if (errors_.size() > kMost) errors_.pop_back();
}

std::vector<RecentError> RecentErrors::Read() const {
  const engine::MutexLock lock(mutex_);
  return {errors_.begin(), errors_.end()};
}

}  // namespace lossd::telemetry
