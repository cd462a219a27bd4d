// Times the step of a vocabulary over devices against that of one of them, in the same run and in turns.
#ifndef LOSSD_BENCH_KERNELS_RANKS_RANK_CASE_H_
#define LOSSD_BENCH_KERNELS_RANKS_RANK_CASE_H_

#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench/kernels/kernel_case.h"
#include "bench/kernels/ranks/rank_step.h"

namespace lossd::bench {

// Forks a process a device, runs the cases, and calls `print` in one of them with an object a case: `error`,
// or what rank_report.h prints. False if a case failed. This process must not have used a GPU or OpenMP.
bool RunCasesOverDevices(const std::vector<KernelCase>& cases, const DevicesOptions& options,
                         const std::function<void(const std::vector<nlohmann::ordered_json>&)>& print);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_RANKS_RANK_CASE_H_
