// What people and scripts read of cases.
#ifndef LOSSD_BENCH_KERNELS_KERNEL_REPORT_H_
#define LOSSD_BENCH_KERNELS_KERNEL_REPORT_H_

#include <nlohmann/json.hpp>
#include <vector>

#include "bench/kernels/kernel_case.h"

namespace lossd::bench {

// One part: name, milliseconds, tflops, bytes, gigabytes_per_second; null where nothing is to be said.
nlohmann::ordered_json ToJson(const Measurement& part);
// One case. `error` is there if it failed; what was not measured is null or empty.
nlohmann::ordered_json ToJson(const KernelCase& kernel_case, const KernelResult& result);

// A line a case, then each case in parts.
void PrintTables(const std::vector<KernelCase>& cases, const std::vector<KernelResult>& results);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_KERNEL_REPORT_H_
