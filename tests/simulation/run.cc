#include "tests/simulation/run.h"

#include <unistd.h>

#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"

namespace lossd::simulation {
namespace {

// In memory where that can be had: checkpoints are written as durably as ever.
std::filesystem::path Folder() {
  const std::filesystem::path memory = "/dev/shm";
  std::error_code error;
  const bool usable = std::filesystem::is_directory(memory, error) && access(memory.c_str(), W_OK) == 0;
  return (usable ? memory : std::filesystem::temp_directory_path()) /
         absl::StrCat("lossd-simulation-", getpid());
}

}  // namespace

Sabotage SabotageOf(const std::string& name) {
  static const std::map<std::string, Sabotage> kNames = {{"repeats_count", Sabotage::kRepeatsCount},
                                                         {"chunk_lost", Sabotage::kChunkLost},
                                                         {"reset_forgotten", Sabotage::kResetForgotten},
                                                         {"step_twice", Sabotage::kStepTwice},
                                                         {"fold_lost", Sabotage::kFoldLost},
                                                         {"mark_before_ranks", Sabotage::kMarkBeforeRanks},
                                                         {"rank_skips_batch", Sabotage::kRankSkipsBatch},
                                                         {"old_epoch_counts", Sabotage::kOldEpochCounts},
                                                         {"mark_without_lost", Sabotage::kMarkWithoutLost},
                                                         {"replica_left_out", Sabotage::kReplicaLeftOut},
                                                         {"gather_forgotten", Sabotage::kGatherForgotten},
                                                         {"broken_forgotten", Sabotage::kBrokenForgotten}};
  const auto found = kNames.find(name);
  return found == kNames.end() ? Sabotage::kNone : found->second;
}

Summary RunSchedules(const RunOptions& options) {
  Summary summary;
  const std::filesystem::path folder = Folder();
  const uint64_t end = options.seed + static_cast<uint64_t>(options.schedules);
  for (uint64_t seed = options.seed; seed < end; ++seed) {
    ScheduleOptions schedule{seed, options.sabotage, options.trace ? Tracing::kYes : Tracing::kNo,
                             options.replicas, folder};
    Outcome outcome = RunSchedule(schedule);
    ++summary.schedules;
    ++summary.configurations[outcome.configuration];
    summary.sabotaged += outcome.sabotaged;
    for (const auto& [event, count] : outcome.events) summary.events[event] += count;
    if (!outcome.divergence.empty()) {
      summary.divergent.emplace(absl::StrCat(seed),
                                absl::StrCat(outcome.divergence, " (", outcome.configuration, ")"));
      if (summary.divergent.size() == 1 && !options.trace) {
        schedule.tracing = Tracing::kYes;
        outcome.trace = RunSchedule(schedule).trace;
      } else if (!options.trace) {
        outcome.trace.clear();
      }
    }
    for (std::string& line : outcome.trace) summary.trace.push_back(absl::StrCat(seed, ": ", line));
    if (static_cast<int64_t>(summary.divergent.size()) >= options.most_divergences) break;
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  return summary;
}

}  // namespace lossd::simulation
