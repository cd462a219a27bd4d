// Many schedules one after the other.
#ifndef LOSSD_TESTS_SIMULATION_RUN_H_
#define LOSSD_TESTS_SIMULATION_RUN_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/simulation/schedule.h"

namespace lossd::simulation {

struct RunOptions {
  uint64_t seed = 1;
  int64_t schedules = 100;
  int64_t most_divergences = 10;  // then it is enough
  bool trace = false;
  Replicas replicas = Replicas::kSome;
  Sabotage sabotage = Sabotage::kNone;
};

struct Summary {
  int64_t schedules = 0;
  int64_t sabotaged = 0;
  std::map<std::string, int64_t> events;
  std::map<std::string, int64_t> configurations;
  std::map<std::string, std::string> divergent;  // what was seen, by seed
  std::vector<std::string> trace;                // of the first that diverged, or of all
};

// By its name on the command line; kNone if there is no such one.
Sabotage SabotageOf(const std::string& name);
Summary RunSchedules(const RunOptions& options);

}  // namespace lossd::simulation

#endif  // LOSSD_TESTS_SIMULATION_RUN_H_
