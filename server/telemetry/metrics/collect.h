// The metrics by subject, one file each; what they mean is in docs/metrics.md. All of it is read at each
// scrape: from counters, or under locks that are held for moments.
#ifndef LOSSD_SERVER_TELEMETRY_METRICS_COLLECT_H_
#define LOSSD_SERVER_TELEMETRY_METRICS_COLLECT_H_

#include "server/engine/engine.h"
#include "server/telemetry/common/service_counters.h"
#include "server/telemetry/metrics/exposition.h"
#include "server/telemetry/metrics/gpu_sensors.h"

namespace lossd::telemetry {

void CollectWork(const engine::Engine& engine, Exposition& out);  // work_metrics.cc: chunks, tokens, logits
void CollectWindows(const engine::Engine& engine,
                    Exposition& out);  // window_metrics.cc: flushes, steps, checkpoints
void CollectHeads(const engine::Engine& engine, Exposition& out);  // head_metrics.cc: each head's
void CollectMemory(const engine::Engine& engine,
                   Exposition& out);  // memory_metrics.cc: queue, credits, memory
void CollectCalls(const ServiceCounters& counters, Exposition& out);  // call_metrics.cc: calls and access
void CollectGpu(const GpuReadings& gpu, Exposition& out);             // gpu_metrics.cc
void CollectProcess(const engine::Engine& engine, Exposition& out);   // process_metrics.cc

// All of them, in Prometheus' text format. `gpu` may be null.
std::string MetricsText(const engine::Engine& engine, const ServiceCounters& counters,
                        const GpuSensors* gpu = nullptr);

}  // namespace lossd::telemetry

#endif  // LOSSD_SERVER_TELEMETRY_METRICS_COLLECT_H_
