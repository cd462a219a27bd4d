// What ranks found out of a case, for scripts and for people.
#ifndef LOSSD_BENCH_KERNELS_RANKS_RANK_REPORT_H_
#define LOSSD_BENCH_KERNELS_RANKS_RANK_REPORT_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "bench/kernels/kernel_case.h"
#include "bench/kernels/ranks/rank_step.h"

namespace lossd::bench {

// What one rank measured, round by round: milliseconds of a step.
struct RankTimes {
  std::vector<double> all_milliseconds;             // over all devices
  std::vector<double> all_one_device_milliseconds;  // the whole head here, while the others wait
  std::vector<double> all_busy_milliseconds;        // the same, while each of the others does so too
  std::vector<std::pair<std::string, std::vector<double>>> stages;
  RelativeErrors difference;  // from one device's results, as far as they are this rank's
  int64_t whole_tile_rows = 0;
  int64_t tile_rows = 0;
  bool uses_copy_engines = false;
  std::string hardware;

  // One round's. What has one name, as a stage has in every tile of rows, is added up.
  void Add(const StageTimes& round);
};

nlohmann::ordered_json ToJson(const RankTimes& times);

// What is said of a case, from what ToJson gave at each rank.
//
//   one_device_milliseconds   the whole head on one device, the others idle; busy_...: the others do the same
//   milliseconds, speedup     over all devices, and how many times as fast that is as one of them, idle
//   waits                     stages that wait for other ranks: milliseconds of a step at each rank
//
// Times are medians of rounds, and the slowest device counts: the others wait for it.
nlohmann::ordered_json Collect(const KernelCase& kernel_case, const DevicesOptions& options,
                               const std::vector<std::string>& of_ranks);
nlohmann::ordered_json Failed(const KernelCase& kernel_case, const DevicesOptions& options,
                              const std::string& problem);

// A line a case, then each case with the stages of its ranks.
void PrintTables(const std::vector<nlohmann::ordered_json>& cases);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_RANKS_RANK_REPORT_H_
