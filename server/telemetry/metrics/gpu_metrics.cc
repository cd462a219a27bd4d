// Metrics of the GPU, from NVML; none without a GPU.
#include <algorithm>
#include <optional>
#include <vector>

#include "server/telemetry/metrics/collect.h"

namespace lossd::telemetry {
namespace {

constexpr Metric kUtilization{"lossd_gpu_utilization_ratio",
                              "Share of the last moments in which a kernel ran on the GPU, whoever's.",
                              kGauge};
constexpr Metric kPower{"lossd_gpu_power_watts", "Power that the GPU draws.", kGauge};
constexpr Metric kTemperature{"lossd_gpu_temperature_celsius", "Temperature of the GPU.", kGauge};

}  // namespace

void CollectGpus(const GpusSensors& gpus, const engine::GroupReport& group, Exposition& out) {
  std::vector<GpuReadings> readings;
  for (size_t rank = 0; rank < group.ranks.size(); ++rank) {
    const bool is_there = rank < gpus.size() && gpus[rank] != nullptr;
    readings.push_back(is_there ? gpus[rank]->Read() : GpuReadings());
  }
  const auto collect = [&](const Metric& metric, std::optional<double> GpuReadings::*reading) {
    const auto tells = [reading](const GpuReadings& gpu) { return (gpu.*reading).has_value(); };
    if (std::none_of(readings.begin(), readings.end(), tells)) return;
    auto gpu = readings.begin();
    out.OfEachRank(metric, group, [&](const engine::RankReport& /*rank*/) {
      if (tells(*gpu)) out.Add({}, *((*gpu).*reading));
      ++gpu;
    });
  };
  collect(kUtilization, &GpuReadings::utilization);
  collect(kPower, &GpuReadings::power_watts);
  collect(kTemperature, &GpuReadings::temperature_celsius);
}

}  // namespace lossd::telemetry
