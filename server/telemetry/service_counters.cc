#include "server/telemetry/service_counters.h"

#include <algorithm>
#include <utility>

namespace lossd::telemetry {

const char* StatusCodeName(int code) {
  static constexpr std::array<const char*, kStatusCodeCount> kNames = {
      "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
      "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
      "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
      "DATA_LOSS", "UNAUTHENTICATED"};
  return code >= 0 && code < kStatusCodeCount ? kNames[static_cast<size_t>(code)] : "UNKNOWN";
}

RpcCounters::RpcCounters(const std::vector<std::string>& methods) {
  for (const std::string& method : methods) methods_.push_back(std::make_unique<RpcMethod>(method));
}

RpcMethod* RpcCounters::Find(std::string_view name) {
  const auto found = std::find_if(methods_.begin(), methods_.end(),
                                  [&](const auto& method) { return method->name == name; });
  return found == methods_.end() ? nullptr : found->get();
}

void RecentErrors::Add(RecentError error) {
  const std::lock_guard lock(mutex_);
  errors_.push_front(std::move(error));
  if (errors_.size() > kMost) errors_.pop_back();
}

std::vector<RecentError> RecentErrors::Read() const {
  const std::lock_guard lock(mutex_);
  return {errors_.begin(), errors_.end()};
}

}  // namespace lossd::telemetry
