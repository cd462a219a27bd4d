// The process, under the names that all exporters use, and the build.
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <system_error>

#include "server/telemetry/collect.h"
#include "server/version.h"

namespace lossd::telemetry {
namespace {

constexpr double kKibibyte = 1024;

constexpr Metric kBuild{
    "lossd_build_info", "Always 1; the labels say what runs.", kGauge, {"version", "device"}};
constexpr Metric kCpu{"process_cpu_seconds_total", "Processor time of the process, user and system.",
                      kCounter};
constexpr Metric kResident{"process_resident_memory_bytes", "Resident memory of the process.", kGauge};
constexpr Metric kVirtual{"process_virtual_memory_bytes", "Address space of the process.", kGauge};
constexpr Metric kOpenFiles{"process_open_fds", "Open files of the process.", kGauge};
constexpr Metric kMostFiles{"process_max_fds", "Most files that it may have open.", kGauge};
constexpr Metric kThreads{"process_threads", "Threads of the process.", kGauge};
constexpr Metric kStart{"process_start_time_seconds", "Start of the process, seconds since the epoch.",
                        kGauge};

// What cannot be read, since there is no /proc or no file can be opened, is nothing, not 0.

std::optional<double> ReadCpuSeconds() {
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) != 0) return std::nullopt;
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// A line of /proc/self/status.
std::optional<int64_t> ReadStatus(const std::string& name) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name + ":")) return std::atoll(line.c_str() + name.size() + 1);
  }
  return std::nullopt;
}

// But for the one that it is looked at with.
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
void OnlyIfKnown(const Metric& metric, const std::optional<Number>& value, double unit, Exposition& out) {
  if (value.has_value()) out.Only(metric, static_cast<double>(*value) * unit);
}

}  // namespace

void CollectProcess(const engine::Engine& engine, Exposition& out) {
  out.Begin(kBuild);
  out.Add({kVersion, engine.device().name()}, 1);
  OnlyIfKnown(kCpu, ReadCpuSeconds(), 1, out);
  OnlyIfKnown(kResident, ReadStatus("VmRSS"), kKibibyte, out);
  OnlyIfKnown(kVirtual, ReadStatus("VmSize"), kKibibyte, out);
  OnlyIfKnown(kOpenFiles, CountOpenFiles(), 1, out);
  OnlyIfKnown(kMostFiles, MostOpenFiles(), 1, out);
  OnlyIfKnown(kThreads, ReadStatus("Threads"), 1, out);
  out.Only(kStart, absl::ToDoubleSeconds(engine.started() - absl::UnixEpoch()));
}

}  // namespace lossd::telemetry
