#include "server/telemetry/common/logging.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>

namespace lossd::telemetry {
namespace {

std::atomic<LogFormat> log_format = LogFormat::kText;
std::atomic<int> log_rank = -1;  // none

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

// Invalid UTF-8 in a value must not make a log line fail.
std::string Dump(const nlohmann::json& value) {
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

void InitLogging(LogFormat format, LogLevel level, std::optional<int> rank) {
  log_format = format;
  log_rank = rank.value_or(-1);
  auto logger = spdlog::stderr_logger_mt("lossd");
  logger->set_level(ToSpdlog(level));
  logger->flush_on(spdlog::level::trace);
  if (format == LogFormat::kJson) {
    logger->set_pattern(R"({"time":"%Y-%m-%dT%H:%M:%S.%e%z","level":"%l","thread":%t,%v})");
  } else {
    logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e%z %L %v");
  }
  spdlog::set_default_logger(std::move(logger));
}

LogFormat Format() { return log_format; }

void Log(LogLevel level, const std::string& event, std::initializer_list<LogField> fields) {
  Log(level, event, std::vector<LogField>(fields));
}

void Log(LogLevel level, const std::string& event, const std::vector<LogField>& fields) {
  if (!Logs(level)) return;
  std::string line;
  const int rank = log_rank;
  if (log_format == LogFormat::kJson) {
    line = "\"event\":" + Dump(event);
    for (const auto& [name, value] : fields) line += "," + Dump(name) + ":" + Dump(value);
    if (rank >= 0) line += ",\"rank\":" + std::to_string(rank);
  } else {
    line = event;
    for (const auto& [name, value] : fields) line += " " + std::string(name) + "=" + Dump(value);
    if (rank >= 0) line += " rank=" + std::to_string(rank);
  }
  spdlog::default_logger_raw()->log(ToSpdlog(level), spdlog::string_view_t(line.data(), line.size()));
}

bool Logs(LogLevel level) { return spdlog::default_logger_raw()->should_log(ToSpdlog(level)); }

}  // namespace lossd::telemetry
