// A libnvidia-ml that knows one GPU. Its power cannot be read while LOSSD_FAKE_NVML_NO_POWER is set.
#include <cstdlib>
#include <cstring>

namespace {

int users = 0;
int gpu = 0;

struct Utilization {
  unsigned int gpu;
  unsigned int memory;
};

}  // namespace

extern "C" {

int nvmlInit_v2() { return users++ == 0 ? 0 : 999; }
int nvmlShutdown() { return --users == 0 ? 0 : 999; }

int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, void** device) {
  if (users == 0 || std::strcmp(bus_id, "00000000:1b:00.0") != 0) return 6;
  *device = &gpu;
  return 0;
}

int nvmlDeviceGetUtilizationRates(void* device, Utilization* utilization) {
  if (users == 0 || device != &gpu) return 2;
  utilization->gpu = 87;
  utilization->memory = 12;
  return 0;
}

int nvmlDeviceGetPowerUsage(void* device, unsigned int* milliwatts) {
  if (users == 0 || device != &gpu || std::getenv("LOSSD_FAKE_NVML_NO_POWER") != nullptr) return 3;
  *milliwatts = 412500;
  return 0;
}

int nvmlDeviceGetTemperature(void* device, int sensor, unsigned int* celsius) {
  if (users == 0 || device != &gpu || sensor != 0) return 2;
  *celsius = 61;
  return 0;
}

}  // extern "C"
