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
// head_metrics.cc: each head's.
void CollectHeads(const engine::Engine& engine, const engine::GroupReport& group, Exposition& out);
// memory_metrics.cc: queue, credits, memory.
void CollectMemory(const engine::Engine& engine, const engine::GroupReport& group, Exposition& out);
void CollectGpus(const GpusSensors& gpus, const engine::GroupReport& group,
                 Exposition& out);                                        // gpu_metrics.cc
void CollectGroup(const engine::GroupReport& group, Exposition& out);     // group_metrics.cc: ranks
void CollectReplicas(const engine::ReplicaReport& set, Exposition& out);  // replica_metrics.cc
void CollectCalls(const ServiceCounters& counters, Exposition& out);      // call_metrics.cc: calls and access
void CollectProcess(const engine::Engine& engine, Exposition& out);       // process_metrics.cc

// All of them, in Prometheus' text format.
std::string MetricsText(const engine::Engine& engine, const ServiceCounters& counters,
                        const GpusSensors& gpus = {});

}  // namespace lossd::telemetry

#endif  // LOSSD_SERVER_TELEMETRY_METRICS_COLLECT_H_
