// The state of the server as the status page and /status.json show it. Nothing in it is a secret: no id that
// would let anybody speak for a session or a flush, no key, no path.
#ifndef LOSSD_SERVER_TELEMETRY_STATUS_PAGE_SERVER_STATUS_H_
#define LOSSD_SERVER_TELEMETRY_STATUS_PAGE_SERVER_STATUS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/engine/engine.h"
#include "server/engine/memory/process_memory.h"
#include "server/telemetry/common/service_counters.h"
#include "server/telemetry/status_page/throughput.h"

namespace lossd::telemetry {

struct HeadStatus {
  std::string name;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  std::string weight_type;
  bool frozen = false;
  engine::HeadSnapshot snapshot;
  uint64_t tokens = 0;
  uint64_t loss_tokens = 0;  // whose losses count, and were finite
  double loss = 0;
  double gradient_norm = 0;
  int64_t queued_chunks = 0;
  int64_t staging_bytes = 0;
  engine::MemoryPlan memory;
  std::vector<engine::SessionSnapshot> sessions;
};

struct MethodStatus {
  std::string method;
  int64_t in_flight = 0;
};

struct ServerStatus {
  absl::Time now;
  std::string version;
  std::string device;
  std::string device_description;
  std::string incarnation;
  absl::Time started;
  bool serving = true;  // false: heads are still being loaded or restored
  bool draining = false;

  std::vector<HeadStatus> heads;
  std::map<std::string, int64_t> parked;  // bytes of the host's memory, by the name of the head
  int64_t sessions = 0;
  int64_t streams = 0;
  int64_t queued_chunks = 0;
  int64_t credit_bytes = 0;
  int64_t staging_reserved = 0;
  int64_t staging_limit = 0;

  int64_t memory_limit = 0;
  int64_t memory_reserved = 0;
  int64_t memory_peak = 0;
  engine::MemoryPlan memory;  // what is reserved; nothing that is zero
  engine::DeviceTotals device_memory;
  engine::PoolUsage pinned_pool;
  engine::ProcessMemory process;
  engine::GroupReport group;
  engine::ReplicaReport replicas;

  Throughput::Reading throughput;
  std::vector<MethodStatus> calls;  // methods that have calls under way
  std::vector<RecentError> errors;  // newest first
};

// Whether there were losses at all, finite or not.
bool HasLoss(const HeadStatus& head);

ServerStatus ReadStatus(const engine::Engine& engine, const ServiceCounters& counters,
                        const Throughput& throughput);

// Ages in seconds, times in RFC 3339; what there is none of is null.
std::string StatusJson(const ServerStatus& status);

}  // namespace lossd::telemetry

#endif  // LOSSD_SERVER_TELEMETRY_STATUS_PAGE_SERVER_STATUS_H_
