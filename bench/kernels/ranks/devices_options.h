// `lossd-bench kernels --devices`.
#ifndef LOSSD_BENCH_KERNELS_RANKS_DEVICES_OPTIONS_H_
#define LOSSD_BENCH_KERNELS_RANKS_DEVICES_OPTIONS_H_

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

namespace lossd::bench {

struct DevicesOptions {
  std::vector<std::string> devices;  // of the ranks, of one kind; empty: one device is measured
  int64_t steps = 4;                 // that follow each other in a round
  bool copies = true;                // GPUs: copy engines move rows and parts of dX, where they can
  bool rows_arrive = true;           // rows of each step go from rank 0 to all others

  int ranks() const { return static_cast<int>(devices.size()); }
};

// Empty, or why no ranks can be made of them, and what to name instead.
std::string ProblemOf(const std::vector<std::string>& devices);

// --devices, of which there have to be two or more, and no problem.
CLI::Option* AddDevicesOption(CLI::App& command, std::vector<std::string>& devices, const std::string& help);
// Beside --device of the command, which they exclude.
void AddDevicesOptions(CLI::App& command, DevicesOptions& options);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_RANKS_DEVICES_OPTIONS_H_
