// The process, under the names that all exporters use, and the build.
#include <sys/resource.h>

#include <filesystem>
#include <optional>
#include <system_error>

#include "server/engine/memory/process_memory.h"
#include "server/telemetry/common/logging.h"
#include "server/telemetry/metrics/collect.h"
#include "server/version.h"

namespace lossd::telemetry {
namespace {

constexpr Metric kBuild{
    "lossd_build_info", "Always 1; the labels say what runs.", kGauge, {"version", "device"}};
constexpr Metric kCpu{"process_cpu_seconds_total", "Processor time of the process, user and system.",
                      kCounter};
constexpr Metric kResident{"process_resident_memory_bytes", "Resident memory of the process.", kGauge};
constexpr Metric kVirtual{"process_virtual_memory_bytes", "Address space of the process.", kGauge};
constexpr Metric kOpenFiles{"process_open_fds", "Open files of the process.", kGauge};
constexpr Metric kMostFiles{"process_max_fds", "Most files that it may have open.", kGauge};
constexpr Metric kThreads{"process_threads", "Threads of the process.", kGauge};
constexpr Metric kLogLines{"lossd_log_lines_dropped_total",
                           "Lines of the log that nothing read in time, or that could not be written.",
                           kCounter};
constexpr Metric kStart{"process_start_time_seconds", "Start of the process, seconds since the epoch.",
                        kGauge};

// A value that cannot be read, without /proc or a free descriptor, is left out instead of 0.

std::optional<double> ReadCpuSeconds() {
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) != 0) return std::nullopt;
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// The engine tells what it cannot read as 0, which no process has.
std::optional<int64_t> NotZero(int64_t value) { return value == 0 ? std::nullopt : std::optional(value); }

// Does not count the descriptor that this look needs.
std::optional<int64_t> CountOpenFiles() {
  std::error_code error;
  int64_t files = 0;
  std::filesystem::directory_iterator folder("/proc/self/fd", error);
  while (!error && folder != std::filesystem::directory_iterator()) {
    ++files;
    folder.increment(error);
  }
  if (error) return std::nullopt;
  return files - 1;
}

std::optional<double> MostOpenFiles() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return std::nullopt;
  return static_cast<double>(limit.rlim_cur);
}

template <typename Number>
void OnlyIfKnown(const Metric& metric, const std::optional<Number>& value, Exposition& out) {
  if (value.has_value()) out.Only(metric, static_cast<double>(*value));
}

}  // namespace

void CollectProcess(const engine::Engine& engine, Exposition& out) {
  out.Begin(kBuild);
  out.Add({kVersion, engine.device().name()}, 1);
  OnlyIfKnown(kCpu, ReadCpuSeconds(), out);
  const engine::ProcessMemory memory = engine::ReadProcessMemory();
  OnlyIfKnown(kResident, NotZero(memory.resident_bytes), out);
  OnlyIfKnown(kVirtual, NotZero(memory.virtual_bytes), out);
  OnlyIfKnown(kOpenFiles, CountOpenFiles(), out);
  OnlyIfKnown(kMostFiles, MostOpenFiles(), out);
  OnlyIfKnown(kThreads, NotZero(memory.threads), out);
  out.Only(kLogLines, static_cast<double>(DroppedLines()));
  out.Only(kStart, absl::ToDoubleSeconds(engine.started() - absl::UnixEpoch()));
}

}  // namespace lossd::telemetry
