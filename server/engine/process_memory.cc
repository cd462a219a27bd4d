#include "server/engine/process_memory.h"

#include <malloc.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"

namespace lossd::engine {
namespace {

// Each keeps up to 64 MiB at its end. glibc would make eight for each processor.
constexpr int kMostArenas = 16;

// Of a line such as "VmRSS:     1234 kB" or "Threads: 5".
struct Field {
  absl::string_view name;
  absl::string_view unit = " kB";
  int64_t scale = 1024;
  int64_t value = 0;  // times the scale; stays as it is if there is no such line
};

void ReadFields(const char* path, absl::Span<Field> fields) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    for (Field& field : fields) {
      absl::string_view text = line;
      int64_t value = 0;
      if (absl::ConsumePrefix(&text, field.name) && absl::ConsumePrefix(&text, ":") &&
          absl::ConsumeSuffix(&text, field.unit) && absl::SimpleAtoi(text, &value)) {
        field.value = value * field.scale;
      }
    }
  }
}

// In bytes; 0 if there is no such line.
int64_t KilobyteField(const char* path, absl::string_view name) {
  Field field{.name = name};
  ReadFields(path, {&field, 1});
  return field.value;
}

// A control group's file of one number; the largest there is if it says "max" or is not there.
int64_t ControlGroupValue(const char* path) {
  std::ifstream file(path);
  std::string text;
  int64_t value = 0;
  if (std::getline(file, text) && absl::SimpleAtoi(text, &value)) return value;
  return std::numeric_limits<int64_t>::max();
}

}  // namespace

ProcessMemory ReadProcessMemory() {
  std::array fields = {Field{.name = "VmRSS"}, Field{.name = "VmHWM"}, Field{.name = "VmSize"},
                       Field{.name = "Threads", .unit = "", .scale = 1}};
  ReadFields("/proc/self/status", absl::MakeSpan(fields));
  return {.resident_bytes = fields[0].value,
          .peak_bytes = fields[1].value,
          .virtual_bytes = fields[2].value,
          .threads = fields[3].value};
}

int64_t RaiseFileLimit() {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return 0;
  if (files.rlim_cur < files.rlim_max) {
    const rlimit raised{files.rlim_max, files.rlim_max};
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0) files = raised;
  }
  return static_cast<int64_t>(std::min<rlim_t>(files.rlim_cur, 1 << 30));
}

int64_t DefaultStagingBytes() {
  return std::clamp(AvailableMemory() / 4, int64_t{2} << 30, int64_t{64} << 30);
}

int64_t AvailableMemory() {
  int64_t available = KilobyteField("/proc/meminfo", "MemAvailable");
  const int64_t limit = ControlGroupValue("/sys/fs/cgroup/memory.max");
  const int64_t used = ControlGroupValue("/sys/fs/cgroup/memory.current");
  if (limit != std::numeric_limits<int64_t>::max() && used <= limit) {
    available = std::min(available, limit - used);
  }
  return available;
}

int64_t TotalMemory() {
  return std::min(KilobyteField("/proc/meminfo", "MemTotal"), ControlGroupValue("/sys/fs/cgroup/memory.max"));
}

void RaiseMallocThresholds() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that glibc takes
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 16 << 20);
  mallopt(M_ARENA_MAX, kMostArenas);
}

void FreedMemory::Look() {
  unused_[next_++ % kLooks] = static_cast<int64_t>(mallinfo2().fordblks);
  const int64_t unused = *std::min_element(unused_.begin(), unused_.end());
  // What has been returned still counts as unused: only more of it than then is worth the time.
  const int64_t resident = ReadProcessMemory().resident_bytes;
  if (unused <= kept_bytes_ || resident - resident_after_ <= kept_bytes_) return;
  malloc_trim(0);
  resident_after_ = ReadProcessMemory().resident_bytes;
}

}  // namespace lossd::engine
