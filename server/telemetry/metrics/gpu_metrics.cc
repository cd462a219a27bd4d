// Metrics of the GPU, from NVML; none without a GPU.
#include <optional>

#include "server/telemetry/metrics/collect.h"

namespace lossd::telemetry {
namespace {

constexpr Metric kUtilization{"lossd_gpu_utilization_ratio",
                              "Share of the last moments in which a kernel ran on the GPU, whoever's.",
                              kGauge};
constexpr Metric kPower{"lossd_gpu_power_watts", "Power that the GPU draws.", kGauge};
constexpr Metric kTemperature{"lossd_gpu_temperature_celsius", "Temperature of the GPU.", kGauge};

}  // namespace

void CollectGpu(const GpuReadings& gpu, Exposition& out) {
  if (gpu.utilization.has_value()) out.Only(kUtilization, *gpu.utilization);
  if (gpu.power_watts.has_value()) out.Only(kPower, *gpu.power_watts);
  if (gpu.temperature_celsius.has_value()) out.Only(kTemperature, *gpu.temperature_celsius);
}

}  // namespace lossd::telemetry
