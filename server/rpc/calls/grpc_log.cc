#include "server/rpc/calls/grpc_log.h"

#include <grpc/support/log.h>

#include <chrono>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "server/engine/common/mutex.h"
#include "server/rpc/calls/call_reports.h"
#include "server/rpc/calls/rate_limit.h"
#include "server/telemetry/common/logging.h"

namespace lossd::rpc {
namespace {

using telemetry::LogLevel;

LogLevel LevelOf(gpr_log_severity severity) {
  switch (severity) {
    case GPR_LOG_SEVERITY_DEBUG:
      return LogLevel::kDebug;
    case GPR_LOG_SEVERITY_INFO:
      return LogLevel::kInfo;
    case GPR_LOG_SEVERITY_ERROR:
      return LogLevel::kWarning;
  }
  return LogLevel::kWarning;
}

std::optional<uint64_t> TakeLine() {
  static engine::Mutex mutex;
  static RateLimit limit ABSL_GUARDED_BY(mutex)(CallReports::kBurst, CallReports::kPerSecond);
  const engine::MutexLock lock(mutex);
  return limit.Take(std::chrono::steady_clock::now());
}

void Log(gpr_log_func_args* said) {
  const LogLevel level = LevelOf(said->severity);
  if (!telemetry::Logs(level)) return;
  const std::optional<uint64_t> left_out = TakeLine();
  if (!left_out.has_value()) return;
  std::vector<telemetry::LogField> fields = {{"message", said->message},
                                             {"source", absl::StrCat(said->file, ":", said->line)}};
  if (*left_out > 0) fields.emplace_back("lines_left_out", *left_out);
  telemetry::Log(level, "gRPC", fields);
}

}  // namespace

void LogWhatGrpcSays() { gpr_set_log_function(Log); }

}  // namespace lossd::rpc
