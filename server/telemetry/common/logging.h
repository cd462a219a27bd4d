// Structured log lines on standard error: one event a line, with named fields. Nothing waits for the reader
// of standard error: lines that it leaves no room for are dropped and counted.
#ifndef LOSSD_SERVER_TELEMETRY_COMMON_LOGGING_H_
#define LOSSD_SERVER_TELEMETRY_COMMON_LOGGING_H_

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lossd::telemetry {

enum class LogFormat { kText, kJson };  // text: event key=value ...
enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Once, before the first line. Every line of a rank of a group names the rank.
void InitLogging(LogFormat format, LogLevel level, std::optional<int> rank = {});

// What InitLogging was told; text before.
LogFormat Format();

// The value of a log field, kept as its text in JSON. Numbers, strings and lists of them convert implicitly.
// A list of objects is made with nlohmann::json and passed to Of(). Infinity and NaN, which JSON does not
// have, become null.
class LogValue {
 public:
  // NOLINTBEGIN(google-explicit-constructor)
  LogValue(std::same_as<bool> auto value) : json_(value ? "true" : "false") {}
  template <std::integral Integer>
  requires(!std::same_as<Integer, bool>) LogValue(Integer value) : json_(std::to_string(value)) {}
  LogValue(double value);
  // Bytes that are no UTF-8 are replaced: they must not make a line fail.
  LogValue(std::string_view text);
  LogValue(const std::string& text) : LogValue(std::string_view(text)) {}
  LogValue(const char* text) : json_("null") {
    if (text != nullptr) *this = LogValue(std::string_view(text));
  }
  LogValue(std::nullptr_t) = delete;
  template <typename Value>
  LogValue(const std::vector<Value>& values) {
    for (const Value& value : values) json_ += (json_.empty() ? "[" : ",") + LogValue(value).json_;
    json_ += json_.empty() ? "[]" : "]";
  }
  // NOLINTEND(google-explicit-constructor)
  static LogValue Of(const nlohmann::json& value);

  const std::string& json() const { return json_; }

 private:
  LogValue() = default;

  std::string json_;
};

using LogField = std::pair<const char*, LogValue>;

// Thread-safe. `event` is a constant sentence without values in it; values are fields.
void Log(LogLevel level, const std::string& event, std::initializer_list<LogField> fields = {});
void Log(LogLevel level, const std::string& event, const std::vector<LogField>& fields);

// Gives the reader up to two seconds to take the lines so far. Ends of the process that skip exit() call it;
// exit() does. Safe in a signal handler.
void FlushLog();

// Lines dropped since the start.
int64_t DroppedLines();

// Whether lines of this level are written at all.
bool Logs(LogLevel level);

}  // namespace lossd::telemetry

#endif  // LOSSD_SERVER_TELEMETRY_COMMON_LOGGING_H_
