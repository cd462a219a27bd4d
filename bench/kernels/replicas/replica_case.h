// Times one step of replicas of a head, by what a server does, against the bare operations that any such step
// consists of, in the same run and in turns.
#ifndef LOSSD_BENCH_KERNELS_REPLICAS_REPLICA_CASE_H_
#define LOSSD_BENCH_KERNELS_REPLICAS_REPLICA_CASE_H_

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/kernels/optimizer_case.h"

namespace lossd::bench {

struct ReplicaCase {
  std::vector<std::string> devices;  // of the replicas, of one kind
  OptimizerCase step;                // each replica has a head like this
  std::string optimizer;             // its name, for reports

  int replicas() const { return static_cast<int>(devices.size()); }
};

// Forks a process for each replica, and calls `print` in one of them with what replica_report.h says of the
// case. False if it failed, which is said on stderr. This process must not have used a GPU or OpenMP.
bool RunReplicaCase(const ReplicaCase& of, const std::function<void(const nlohmann::ordered_json&)>& print);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_REPLICAS_REPLICA_CASE_H_
