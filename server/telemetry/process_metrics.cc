// The process, under the names that all exporters use, and the build.
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "server/engine/process_memory.h"
#include "server/telemetry/collect.h"
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
constexpr Metric kStart{"process_start_time_seconds", "Start of the process, seconds since the epoch.",
                        kGauge};

double ReadCpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// A line of /proc/self/status; 0 if there is none.
int64_t ReadStatus(const std::string& name) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name + ":")) return std::atoll(line.c_str() + name.size() + 1);
  }
  return 0;
}

// But for the one that it is looked at with.
int64_t CountOpenFiles() {
  std::error_code error;
  int64_t files = 0;
  std::filesystem::directory_iterator folder("/proc/self/fd", error);
  while (!error && folder != std::filesystem::directory_iterator()) {
    ++files;
    folder.increment(error);
  }
  return std::max<int64_t>(files - 1, 0);
}

int64_t MostOpenFiles() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  return static_cast<int64_t>(limit.rlim_cur);
}

}  // namespace

void CollectProcess(const engine::Engine& engine, Exposition& out) {
  out.Begin(kBuild);
  out.Add({kVersion, engine.device().name()}, 1);
  out.Only(kCpu, ReadCpuSeconds());
  out.Only(kResident, engine::ReadProcessMemory().resident_bytes);
  out.Only(kVirtual, ReadStatus("VmSize") * 1024);
  out.Only(kOpenFiles, CountOpenFiles());
  out.Only(kMostFiles, MostOpenFiles());
  out.Only(kThreads, ReadStatus("Threads"));
  out.Only(kStart, absl::ToDoubleSeconds(engine.started() - absl::UnixEpoch()));
}

}  // namespace lossd::telemetry
