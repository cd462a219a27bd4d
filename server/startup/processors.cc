#include "server/startup/processors.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "kernels/threads.h"
#include "server/engine/memory/control_group.h"
#include "server/telemetry/common/logging.h"

namespace lossd {
namespace {

// Processors of the affinity mask; those of the machine if the mask has more than a cpu_set_t.
int64_t MaskedProcessors() {
  cpu_set_t processors;
  if (sched_getaffinity(0, sizeof(processors), &processors) != 0) return sysconf(_SC_NPROCESSORS_ONLN);
  return CPU_COUNT(&processors);
}

// True if this call has set the variable.
bool SetIfUnset(const char* name, const std::string& value) {
  return getenv(name) == nullptr && setenv(name, value.c_str(), 1) == 0;
}

struct FewThreads {
  std::string reason;
  std::string remedy;
};

FewThreads Explain(int64_t threads) {
  const double quota = std::ceil(engine::ReadControlGroupProcessors());
  const int64_t masked = MaskedProcessors();
  if (static_cast<double>(threads) >= quota) {
    return {"the CPU quota of its control group", "raise the quota (CPUQuota, --cpus, limits.cpu)"};
  }
  if (threads >= masked) {
    return {"the affinity mask that it was started with, OMP_PLACES or GOMP_CPU_AFFINITY",
            "start lossd from a process that is not bound to processors, or by taskset"};
  }
  return {"OMP_NUM_THREADS or OMP_THREAD_LIMIT",
          "start lossd with OMP_NUM_THREADS=" + std::to_string(masked) +
              "; torchrun sets 1 for its trainers and all that they start"};
}

}  // namespace

bool SetUpOpenMp() {
  kernels::UnbindInitialThread();
  bool changed = SetIfUnset("OMP_WAIT_POLICY", "passive");
  const double quota = std::ceil(engine::ReadControlGroupProcessors());
  if (quota < static_cast<double>(MaskedProcessors())) {
    changed |= SetIfUnset("OMP_NUM_THREADS", std::to_string(static_cast<int64_t>(quota)));
  }
  return changed;
}

void LogOddThreads() {
  const int64_t threads = kernels::LoopThreads();
  const double usable =
      std::min(std::ceil(engine::ReadControlGroupProcessors()), static_cast<double>(MaskedProcessors()));
  if (static_cast<double>(threads) > usable) {
    telemetry::Log(telemetry::LogLevel::kWarning, "the CPU computes with more threads than processors",
                   {{"threads", threads},
                    {"processors", static_cast<int64_t>(usable)},
                    {"remedy", "start lossd without OMP_NUM_THREADS"}});
  }
  const int64_t processors = sysconf(_SC_NPROCESSORS_ONLN);
  if (threads >= processors) return;
  const FewThreads why = Explain(threads);
  telemetry::Log(
      telemetry::LogLevel::kInfo, "the CPU computes with fewer threads than the machine has processors",
      {{"threads", threads}, {"processors", processors}, {"reason", why.reason}, {"remedy", why.remedy}});
}

}  // namespace lossd
