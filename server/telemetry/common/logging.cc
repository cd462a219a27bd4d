#include "server/telemetry/common/logging.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string_view>

#include "server/telemetry/common/log_writer.h"

namespace lossd::telemetry {
namespace {

std::atomic<LogFormat> log_format = LogFormat::kText;
std::atomic<int> log_rank = -1;  // none
std::atomic<LogWriter*> log_writer = nullptr;

class WriterSink : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit WriterSink(LogWriter* writer) : writer_(writer) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    writer_->Write(std::string_view(line.data(), line.size()));
  }
  void flush_() override {}

  LogWriter* const writer_;
};

const char* Pattern(LogFormat format) {
  if (format == LogFormat::kJson) return R"({"time":"%Y-%m-%dT%H:%M:%S.%e%z","level":"%l","thread":%t,%v})";
  return "%Y-%m-%dT%H:%M:%S.%e%z %L %v";
}

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

// A line without its time and level.
std::string Text(const std::string& event, const std::vector<LogField>& fields) {
  std::string line;
  const int rank = log_rank;
  if (log_format == LogFormat::kJson) {
    line = "\"event\":" + LogValue(event).json();
    for (const auto& [name, value] : fields) line += "," + LogValue(name).json() + ":" + value.json();
    if (rank >= 0) line += ",\"rank\":" + std::to_string(rank);
  } else {
    line = event;
    for (const auto& [name, value] : fields) line += " " + std::string(name) + "=" + value.json();
    if (rank >= 0) line += " rank=" + std::to_string(rank);
  }
  return line;
}

std::string DroppedLine(int64_t lines) {
  const std::string text =
      Text("lines of the log were dropped: nothing read them in time", {{"lines", lines}});
  spdlog::memory_buf_t line;
  spdlog::pattern_formatter(Pattern(log_format))
      .format(spdlog::details::log_msg("lossd", spdlog::level::warn, text), line);
  return std::string(line.data(), line.size());
}

}  // namespace

LogValue::LogValue(double value) : LogValue(Of(value)) {}

LogValue::LogValue(std::string_view text) : LogValue(Of(text)) {}

LogValue LogValue::Of(const nlohmann::json& value) {
  LogValue made;
  made.json_ = value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return made;
}

void InitLogging(LogFormat format, LogLevel level, std::optional<int> rank) {
  log_format = format;
  log_rank = rank.value_or(-1);
  // Never destroyed: its thread may wait for a reader until the process ends.
  log_writer = std::make_unique<LogWriter>(STDERR_FILENO, DroppedLine).release();
  std::atexit(FlushLog);
  auto logger = std::make_shared<spdlog::logger>("lossd", std::make_shared<WriterSink>(log_writer));
  logger->set_level(ToSpdlog(level));
  logger->set_pattern(Pattern(format));
  spdlog::set_default_logger(std::move(logger));
}

void FlushLog() {
  constexpr std::chrono::seconds kPatience(2);
  if (const LogWriter* writer = log_writer; writer != nullptr) writer->Flush(kPatience);
}

int64_t DroppedLines() {
  const LogWriter* writer = log_writer;
  return writer == nullptr ? 0 : writer->dropped();
}

LogFormat Format() { return log_format; }

void Log(LogLevel level, const std::string& event, std::initializer_list<LogField> fields) {
  Log(level, event, std::vector<LogField>(fields));
}

void Log(LogLevel level, const std::string& event, const std::vector<LogField>& fields) {
  if (!Logs(level)) return;
  const std::string line = Text(event, fields);
  spdlog::default_logger_raw()->log(ToSpdlog(level), spdlog::string_view_t(line.data(), line.size()));
}

bool Logs(LogLevel level) { return spdlog::default_logger_raw()->should_log(ToSpdlog(level)); }

}  // namespace lossd::telemetry
