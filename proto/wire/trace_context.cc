#include "proto/wire/trace_context.h"

#include <algorithm>

namespace lossd::wire {
namespace {

// version "-" trace-id "-" parent-id "-" flags
constexpr size_t kVersionSize = 2;
constexpr size_t kTraceIdAt = 3;
constexpr size_t kTraceIdSize = 32;
constexpr size_t kParentIdAt = 36;
constexpr size_t kParentIdSize = 16;
constexpr size_t kFlagsAt = 53;
constexpr size_t kFlagsSize = 2;
constexpr size_t kSize = 55;

bool IsHex(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool IsPrintable(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

bool IsId(std::string_view text) {
  return IsHex(text) && text.find_first_not_of('0') != std::string_view::npos;
}

}  // namespace

std::string_view TraceIdOf(std::string_view parent) {
  if (parent.size() < kSize) return {};
  const std::string_view version = parent.substr(0, kVersionSize);
  if (!IsHex(version) || version == "ff") return {};
  // Versions to come may add fields behind another dash.
  if (parent.size() > kSize && (version == "00" || parent[kSize] != '-')) return {};
  // It is sent on as it is, so that the rest has to be fit for that.
  if (!IsPrintable(parent.substr(kSize))) return {};
  for (const size_t dash : {kTraceIdAt, kParentIdAt, kFlagsAt}) {
    if (parent[dash - 1] != '-') return {};
  }
  const std::string_view trace_id = parent.substr(kTraceIdAt, kTraceIdSize);
  if (!IsId(trace_id) || !IsId(parent.substr(kParentIdAt, kParentIdSize))) return {};
  return IsHex(parent.substr(kFlagsAt, kFlagsSize)) ? trace_id : std::string_view{};
}

bool IsTraceState(std::string_view state) {
  return !state.empty() && state.size() <= kMaxTraceState && IsPrintable(state);
}

}  // namespace lossd::wire
