#include "client/tools/progress_bar.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace lossd::tools {
namespace {

using std::chrono::steady_clock;

constexpr auto kRedrawInterval = std::chrono::milliseconds(100);
constexpr auto kLineInterval = std::chrono::seconds(5);
constexpr int kBarWidth = 24;
// Carriage return, then erase to the end of the line.
constexpr char kEraseLine[] = "\r\033[K";

}  // namespace

bool UnicodeAllowed() {
  for (const char* variable : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(variable);
    if (value != nullptr && *value != '\0') {
      const std::string locale = absl::AsciiStrToLower(value);
      return absl::StrContains(locale, "utf-8") || absl::StrContains(locale, "utf8");
    }
  }
  return false;
}

std::string DrawBar(double fraction, int width, bool unicode) {
  // Written so that NaN counts as nothing.
  const double cut = fraction > 0 ? std::min(fraction, 1.0) : 0.0;
  const int filled = static_cast<int>(std::lround(cut * width));
  std::string bar;
  for (int cell = 0; cell < width; ++cell) {
    if (unicode) {
      bar += cell < filled ? "█" : "░";
    } else {
      bar += cell < filled ? '#' : '.';
    }
  }
  return bar;
}

std::string FormatBytes(int64_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  if (std::abs(bytes) < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  // 1023.95 would be printed as 1024.0.
  while (std::abs(value) >= 1023.95 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string FormatSeconds(double seconds) {
  constexpr int64_t kDay = 86'400;
  const auto total = static_cast<int64_t>(std::llround(std::max(seconds, 0.0)));
  if (total >= kDay) return absl::StrCat(total / kDay, " d ", total / 3600 % 24, " h");
  if (total >= 3600) return absl::StrCat(total / 3600, " h ", total / 60 % 60, " min");
  if (total >= 60) return absl::StrCat(total / 60, " min ", total % 60, " s");
  return absl::StrCat(total, " s");
}

ProgressBar::Style ProgressBar::StyleOfStderr() {
  return isatty(STDERR_FILENO) == 1 ? Style::kBar : Style::kLines;
}

ProgressBar::ProgressBar(std::string label, Style style)
    : ProgressBar(
          std::move(label), style, [] { return steady_clock::now(); },
          [](const std::string& text) { std::fputs(text.c_str(), stderr); }, UnicodeAllowed()) {}

ProgressBar::ProgressBar(std::string label, Style style, Clock clock, Sink sink, bool unicode)
    : label_(std::move(label)),
      style_(style),
      clock_(std::move(clock)),
      sink_(std::move(sink)),
      unicode_(unicode),
      start_(clock_()),
      next_draw_(style == Style::kBar ? start_ : start_ + kLineInterval) {}

ProgressBar::~ProgressBar() {
  if (drawn_ && style_ == Style::kBar) sink_(kEraseLine);
}

void ProgressBar::Update(int64_t done, int64_t total) {
  if (style_ == Style::kSilent) return;
  const steady_clock::time_point now = clock_();
  const bool finished = done >= total && drawn_;
  if (now < next_draw_ && !finished) return;
  drawn_ = true;
  if (style_ == Style::kBar) {
    next_draw_ = now + kRedrawInterval;
    sink_(absl::StrCat(kEraseLine, Describe(done, total)));
  } else {
    next_draw_ = now + kLineInterval;
    sink_(absl::StrCat(Describe(done, total), "\n"));
  }
}

std::string ProgressBar::Describe(int64_t done, int64_t total) const {
  const double fraction = total > 0 ? static_cast<double>(done) / static_cast<double>(total) : 1.0;
  const double seconds = std::chrono::duration<double>(clock_() - start_).count();
  std::string text = absl::StrCat(label_, "  ");
  if (style_ == Style::kBar) absl::StrAppend(&text, DrawBar(fraction, kBarWidth, unicode_), " ");
  absl::StrAppendFormat(&text, "%3d %%  %s of %s", static_cast<int>(fraction * 100), FormatBytes(done),
                        FormatBytes(total));
  if (done > 0 && seconds > 0) {
    const double rate = static_cast<double>(done) / seconds;
    absl::StrAppend(&text, "  ", FormatBytes(static_cast<int64_t>(rate)), "/s");
    if (done < total) {
      absl::StrAppend(&text, "  ", FormatSeconds(static_cast<double>(total - done) / rate), " left");
    }
  }
  return text;
}

}  // namespace lossd::tools
