// What replicas measured, for scripts and for people.
#ifndef LOSSD_BENCH_KERNELS_REPLICAS_REPLICA_REPORT_H_
#define LOSSD_BENCH_KERNELS_REPLICAS_REPLICA_REPORT_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/kernels/replicas/replica_case.h"

namespace lossd::bench {

// The times of a round, in this order: the phases of a step, and the bare operations.
inline constexpr const char* kReplicaPhases[] = {"sum", "tally", "step"};
inline constexpr const char* kBareOperations[] = {"reduce_scatter", "optimizer", "all_gather"};
inline constexpr size_t kPhases = std::size(kReplicaPhases);
inline constexpr size_t kOperations = std::size(kBareOperations);

// Milliseconds of one replica, round by round.
struct ReplicaTimes {
  struct Round {
    double whole = 0;  // of the phases, as they follow each other
    double phases[kPhases] = {};
    double operations[kOperations] = {};
  };
  std::vector<Round> rounds;
  int64_t checked = 0;         // elements whose bits were compared
  int64_t reserved_bytes = 0;  // that the head holds on its device
  std::string hardware;
};

nlohmann::ordered_json ToJson(const ReplicaTimes& times);

// What a replica sends in a step, by the algorithm.
struct SentBytes {
  int64_t sum = 0;   // parts of its gradient
  int64_t step = 0;  // weights of its slice
};
SentBytes SentBy(const ReplicaCase& of, int replica);

// What is said of a case, from what ToJson gave at each replica. In each round the slowest replica counts:
// the others wait for it; times are medians of rounds.
nlohmann::ordered_json Collect(const ReplicaCase& of, const std::vector<std::string>& of_replicas);

void PrintReplicaTable(const nlohmann::ordered_json& result);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_REPLICAS_REPLICA_REPORT_H_
