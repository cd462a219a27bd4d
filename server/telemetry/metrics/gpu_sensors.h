// Sensors of a GPU that CUDA does not read: use, temperature and power.
#ifndef LOSSD_SERVER_TELEMETRY_METRICS_GPU_SENSORS_H_
#define LOSSD_SERVER_TELEMETRY_METRICS_GPU_SENSORS_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lossd::telemetry {

// Readings that the GPU or its driver does not give are empty.
struct GpuReadings {
  std::optional<double> utilization;  // share of the last moments in which a kernel ran, 0 to 1
  std::optional<double> power_watts;
  std::optional<double> temperature_celsius;
};

// One GPU by NVML, the driver's own library. It is opened at run time: a server without a GPU needs none of
// it.
class GpuSensors {
 public:
  // The GPU at this PCI address, "00000000:1b:00.0". Null if the address is empty, if `library` cannot be
  // opened (it is looked for as dlopen does) or if it does not know the GPU.
  static std::unique_ptr<GpuSensors> Open(const std::string& pci_bus_id,
                                          const std::string& library = "libnvidia-ml.so.1");

  virtual ~GpuSensors() = default;

  // Takes about a millisecond. From any thread.
  virtual GpuReadings Read() const = 0;
};

// By rank; null, or not there: the rank has none.
using GpusSensors = std::vector<std::unique_ptr<GpuSensors>>;

}  // namespace lossd::telemetry

#endif  // LOSSD_SERVER_TELEMETRY_METRICS_GPU_SENSORS_H_
