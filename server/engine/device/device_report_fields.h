// The members of a rank's report, by name (common/fields.h).
#ifndef LOSSD_SERVER_ENGINE_DEVICE_DEVICE_REPORT_FIELDS_H_
#define LOSSD_SERVER_ENGINE_DEVICE_DEVICE_REPORT_FIELDS_H_

#include <cstddef>
#include <type_traits>

#include "server/engine/common/fields.h"
#include "server/engine/device/device_report.h"

namespace lossd::engine {

template <class Visit>
void Fields(Visit& visit, Is<DeviceTotals> auto& totals) {
  auto& [total_bytes, free_bytes] = totals;
  visit("total_bytes", total_bytes, "free_bytes", free_bytes);
}

template <class Visit>
void Fields(Visit& visit, Is<ProcessMemory> auto& memory) {
  auto& [resident_bytes, peak_bytes, virtual_bytes, threads] = memory;
  visit("resident_bytes", resident_bytes, "peak_bytes", peak_bytes, "virtual_bytes", virtual_bytes, "threads",
        threads);
}

template <class Visit>
void Fields(Visit& visit, Is<MemoryItem> auto& item) {
  auto& [purpose, bytes, place] = item;
  visit("purpose", purpose, "bytes", bytes, "place", place);
}
inline const char* FaultOf(const MemoryItem& item) {
  return static_cast<int>(item.place) < kMemoryPlaceCount ? nullptr : "is at a place that no process has";
}

template <class Visit>
void Fields(Visit& visit, Is<MemoryUsage> auto& usage) {
  auto& [reserved, heads, shared] = usage;
  visit("reserved", reserved, "heads", heads, "shared", shared);
}

using DurationReading = HistogramReading<kDurationBounds>;
template <class Visit, Is<DurationReading> Reading>
void Fields(Visit& visit, Reading& reading) {
  DurationReading::Buckets buckets{};
  for (size_t i = 0; i < buckets.size(); ++i) buckets[i] = reading.bucket(i);
  double sum = reading.sum();
  visit("buckets", buckets, "sum", sum);
  if constexpr (!std::is_const_v<Reading>) reading = DurationReading(buckets, sum);
}

template <class Visit>
void Fields(Visit& visit, Is<RankActivity> auto& activity) {
  auto& [uptime_seconds, command, command_seconds, last_done_seconds, waits_at, waits] = activity;
  visit("uptime_seconds", uptime_seconds, "command", command, "command_seconds", command_seconds,
        "last_done_seconds", last_done_seconds, "waits_at", waits_at, "waits", waits);
}

template <class Visit>
void Fields(Visit& visit, Is<RankReport> auto& report) {
  auto& [device, description, pci_bus_id, host, memory_limit, memory_peak, memory, totals, process,
         activity] = report;
  visit("device", device, "description", description, "pci_bus_id", pci_bus_id, "host", host, "memory_limit",
        memory_limit, "memory_peak", memory_peak, "memory", memory, "totals", totals, "process", process,
        "activity", activity);
}

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_DEVICE_REPORT_FIELDS_H_
