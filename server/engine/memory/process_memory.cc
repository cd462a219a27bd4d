#include "server/engine/memory/process_memory.h"

#include <malloc.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "server/engine/memory/control_group.h"

namespace lossd::engine {
namespace {

// Each keeps up to 64 MiB at its end. glibc would make eight for each processor.
constexpr int kMostArenas = 16;

// A line such as "VmRSS:     1234 kB" or "Threads: 5".
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

int64_t SystemAvailable() { return KilobyteField("/proc/meminfo", "MemAvailable"); }

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

int64_t DefaultStagingBytes(int64_t available) {
  return std::clamp(available / 4, std::min(int64_t{2} << 30, available / 2), int64_t{64} << 30);
}

int64_t DefaultHeadBytes(int64_t available, int64_t staging_bytes) {
  const int64_t left = std::max<int64_t>(available - staging_bytes, 0);
  return left - std::max(left / 10, std::min(int64_t{1} << 30, left / 4));
}

int64_t AvailableMemory() { return std::min(SystemAvailable(), ReadControlGroupMemory().available_bytes); }

std::string MemoryBound() {
  const ControlGroupMemory group = ReadControlGroupMemory();
  return group.available_bytes < SystemAvailable() ? group.tightest : "";
}

int64_t TotalMemory() {
  return std::min(KilobyteField("/proc/meminfo", "MemTotal"), ReadControlGroupMemory().limit_bytes);
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
  resident_after_ = std::min(resident_after_, resident);  // heads that went are no room for malloc
  if (unused <= kept_bytes_ || resident - resident_after_ <= kept_bytes_) return;
  malloc_trim(0);
  resident_after_ = ReadProcessMemory().resident_bytes;
}

}  // namespace lossd::engine
