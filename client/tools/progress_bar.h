// Progress of a transfer on standard error: a bar that redraws itself on a terminal, a line every few seconds
// in a log.
//
// Not thread-safe: one transfer, one thread.
#ifndef LOSSD_CLIENT_TOOLS_PROGRESS_BAR_H_
#define LOSSD_CLIENT_TOOLS_PROGRESS_BAR_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

namespace lossd::tools {

// Whether the environment's locale (LC_ALL, LC_CTYPE, LANG) says that bars may be drawn in Unicode.
bool UnicodeAllowed();

// `width` characters of which the given fraction (cut to 0..1; NaN is 0) is filled.
std::string DrawBar(double fraction, int width, bool unicode);

// "1.5 GiB"; exact below 1 KiB.
std::string FormatBytes(int64_t bytes);
// "3 h 12 min", "12 min 5 s", "7 s"; negative is 0.
std::string FormatSeconds(double seconds);

class ProgressBar {
 public:
  enum class Style {
    kBar,    // one line, redrawn, erased at the end
    kLines,  // a line every few seconds: a short transfer prints nothing
    kSilent,
  };
  // What suits standard error: kBar on a terminal, else kLines.
  static Style StyleOfStderr();

  using Clock = std::function<std::chrono::steady_clock::time_point()>;
  using Sink = std::function<void(const std::string&)>;

  // Writes to standard error. `label` says what is moving where.
  ProgressBar(std::string label, Style style);
  // For other sinks and for tests.
  ProgressBar(std::string label, Style style, Clock clock, Sink sink, bool unicode);
  ~ProgressBar();  // erases the bar
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // Bytes done of total so far. Cheap: draws only now and then, and at the end.
  void Update(int64_t done, int64_t total);

 private:
  std::string Describe(int64_t done, int64_t total) const;

  std::string label_;
  Style style_;
  Clock clock_;
  Sink sink_;
  bool unicode_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point next_draw_;
};

}  // namespace lossd::tools

#endif  // LOSSD_CLIENT_TOOLS_PROGRESS_BAR_H_
