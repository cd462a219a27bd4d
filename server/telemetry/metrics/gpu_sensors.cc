#include "server/telemetry/metrics/gpu_sensors.h"

#include <dlfcn.h>

#include <utility>

namespace lossd::telemetry {
namespace {

// The part of NVML's binary interface that is used; it has stayed the same since the driver 340.
using NvmlDevice = void*;
struct NvmlUtilization {
  unsigned int gpu;  // percent
  unsigned int memory;
};
constexpr int kNvmlSuccess = 0;
constexpr int kNvmlTemperatureOfGpu = 0;

struct NvmlCalls {
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*device_by_pci_bus_id)(const char*, NvmlDevice*) = nullptr;
  int (*utilization)(NvmlDevice, NvmlUtilization*) = nullptr;
  int (*power)(NvmlDevice, unsigned int*) = nullptr;  // milliwatts
  int (*temperature)(NvmlDevice, int, unsigned int*) = nullptr;
};

template <typename Call>
bool Find(void* library, const char* name, Call* call) {
  *call = reinterpret_cast<Call>(dlsym(library, name));
  return *call != nullptr;
}

// The first three are optional: a driver without one of them only lacks that reading.
bool FindAll(void* library, NvmlCalls* calls) {
  Find(library, "nvmlDeviceGetUtilizationRates", &calls->utilization);
  Find(library, "nvmlDeviceGetPowerUsage", &calls->power);
  Find(library, "nvmlDeviceGetTemperature", &calls->temperature);
  return Find(library, "nvmlInit_v2", &calls->init) && Find(library, "nvmlShutdown", &calls->shutdown) &&
         Find(library, "nvmlDeviceGetHandleByPciBusId_v2", &calls->device_by_pci_bus_id);
}

struct CloseLibrary {
  void operator()(void* library) const { dlclose(library); }
};
using Library = std::unique_ptr<void, CloseLibrary>;

class NvmlSensors : public GpuSensors {
 public:
  // NVML is initialized.
  NvmlSensors(Library library, const NvmlCalls& calls) : library_(std::move(library)), calls_(calls) {}
  ~NvmlSensors() override { calls_.shutdown(); }
  NvmlSensors(const NvmlSensors&) = delete;
  NvmlSensors& operator=(const NvmlSensors&) = delete;

  bool FindDevice(const std::string& pci_bus_id) {
    return calls_.device_by_pci_bus_id(pci_bus_id.c_str(), &device_) == kNvmlSuccess;
  }

  GpuReadings Read() const override {
    GpuReadings readings;
    NvmlUtilization utilization{};
    if (calls_.utilization != nullptr && calls_.utilization(device_, &utilization) == kNvmlSuccess) {
      readings.utilization = utilization.gpu / 100.0;
    }
    unsigned int value = 0;
    if (calls_.power != nullptr && calls_.power(device_, &value) == kNvmlSuccess) {
      readings.power_watts = value / 1000.0;
    }
    if (calls_.temperature != nullptr &&
        calls_.temperature(device_, kNvmlTemperatureOfGpu, &value) == kNvmlSuccess) {
      readings.temperature_celsius = value;
    }
    return readings;
  }

 private:
  const Library library_;
  const NvmlCalls calls_;
  NvmlDevice device_ = nullptr;
};

}  // namespace

std::unique_ptr<GpuSensors> GpuSensors::Open(const std::string& pci_bus_id, const std::string& library) {
  if (pci_bus_id.empty()) return nullptr;
  Library opened(dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL));
  NvmlCalls calls;
  if (opened == nullptr || !FindAll(opened.get(), &calls) || calls.init() != kNvmlSuccess) return nullptr;
  auto sensors = std::make_unique<NvmlSensors>(std::move(opened), calls);
  if (!sensors->FindDevice(pci_bus_id)) return nullptr;
  return sensors;
}

}  // namespace lossd::telemetry
