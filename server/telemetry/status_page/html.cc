#include "server/telemetry/status_page/html.h"

#include <array>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace lossd::telemetry {

std::string Escape(std::string_view text) {
  std::string escaped;
  escaped.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

std::string BytesText(double bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? absl::StrFormat("%.0f B", bytes) : absl::StrFormat("%.1f %s", bytes, kUnits[unit]);
}

std::string CountText(double count) {
  if (count < 1000) return absl::StrFormat("%.*f", count == std::floor(count) ? 0 : 1, count);
  if (count < 10'000) {
    const auto whole = static_cast<int64_t>(count);
    return absl::StrFormat("%d,%03d", whole / 1000, whole % 1000);
  }
  constexpr std::array kUnits = {"k", "M", "G", "T"};
  size_t unit = 0;
  count /= 1000;
  while (count >= 1000 && unit + 1 < kUnits.size()) {
    count /= 1000;
    ++unit;
  }
  return absl::StrFormat("%.3g %s", count, kUnits[unit]);
}

std::string ValueText(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return absl::StrFormat("%.5g", value);
}

std::string DurationText(double seconds) {
  if (seconds < 60) return absl::StrFormat("%.1f s", seconds);
  const auto whole = static_cast<int64_t>(seconds);
  constexpr int64_t kHour = 3600;
  constexpr int64_t kDay = 24 * kHour;
  if (whole < kHour) return absl::StrCat(whole / 60, " min ", whole % 60, " s");
  if (whole < kDay) return absl::StrCat(whole / kHour, " h ", whole % kHour / 60, " min");
  return absl::StrCat(whole / kDay, " d ", whole % kDay / kHour, " h");
}

}  // namespace lossd::telemetry
