// Structured log lines on standard error: one event a line, with named fields. Nothing waits for the reader
// of standard error: lines that it leaves no room for are dropped and counted.
#ifndef LOSSD_SERVER_TELEMETRY_COMMON_LOGGING_H_
#define LOSSD_SERVER_TELEMETRY_COMMON_LOGGING_H_

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lossd::telemetry {

enum class LogFormat { kText, kJson };  // text: event key=value ...
enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Once, before the first line. Every line of a rank of a group names the rank.
void InitLogging(LogFormat format, LogLevel level, std::optional<int> rank = {});

// What InitLogging was told; text before.
LogFormat Format();

using LogField = std::pair<const char*, nlohmann::json>;

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
