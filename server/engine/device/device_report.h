// What a device tells of itself, and where it is one of several, what each of them does.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_DEVICE_REPORT_H_
#define LOSSD_SERVER_ENGINE_DEVICE_DEVICE_REPORT_H_

#include <array>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "kernels/exchange.h"
#include "server/engine/common/counters.h"
#include "server/engine/memory/memory_budget.h"
#include "server/engine/memory/process_memory.h"

namespace lossd::engine {

struct DeviceTotals {
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;
};

// What a rank of a group does.
struct RankActivity {
  double uptime_seconds = 0;  // since it was ready
  // The oldest command that it was given and is not done with, and for how long it has been so; empty: it is
  // done with all.
  std::string command;
  double command_seconds = 0;
  // How long ago it was last done with a command or a batch; if it has had none, since when it is ready. The
  // leader sends one at least every few seconds (ProbeCommand).
  double last_done_seconds = 0;
  // At what its thread waits for other ranks at this moment; none where it does not, or its device does.
  std::optional<kernels::Exchange> waits_at;
  // How long it has waited, in the order of kernels::kExchanges.
  std::array<HistogramReading<kDurationBounds>, kernels::kExchanges.size()> waits;

  double waited_seconds() const {
    return std::accumulate(waits.begin(), waits.end(), 0.0,
                           [](double sum, const auto& one) { return sum + one.sum(); });
  }
};

// What a rank of a group is, has and does.
struct RankReport {
  std::string device;  // "cpu", "cuda:1"
  std::string description;
  std::string pci_bus_id;  // as Device's
  std::string host;        // by the name that it has for itself
  int64_t memory_limit = 0;
  int64_t memory_peak = 0;  // most that was reserved at once
  MemoryUsage memory;       // of its part of every head
  DeviceTotals totals;
  ProcessMemory process;
  RankActivity activity;
};

struct GroupReport {
  int64_t epoch = 1;  // another one when all ranks are started again; on one host the next number
  // A command that takes longer is one that does not come on, as far as anybody can tell.
  absl::Duration patience = absl::InfiniteDuration();
  std::vector<RankReport> ranks;  // by rank, the leader's first

  bool IsGroup() const { return ranks.size() > 1; }
  bool IsStuck(const RankReport& rank) const {
    return absl::Seconds(rank.activity.command_seconds) > patience;
  }
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_DEVICE_REPORT_H_
