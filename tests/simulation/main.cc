// Runs simulated schedules, one for each seed, and sums up.
#include <CLI/CLI.hpp>
#include <chrono>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>

#include "tests/simulation/run.h"

int main(int argc, char** argv) {
  CLI::App app(
      "Simulated training runs against the real engine, with faults, judged by a sequential oracle. A seed "
      "always gives the same run; the first one that diverges is shown event by event.");
  lossd::simulation::RunOptions options;
  bool json = false;
  bool replicas = false;
  std::string sabotage = "none";
  app.add_option("--schedules", options.schedules, "how many, of seeds one after the other")
      ->capture_default_str();
  app.add_option("--seed", options.seed, "the first one")->capture_default_str();
  app.add_flag("--trace", options.trace, "show what happens in every schedule");
  app.add_flag("--replicas", replicas, "two replicas in every schedule");
  app.add_flag("--json", json, "the summary as JSON");
  app.add_option("--sabotage", sabotage, "a device that does what none may")
      ->check(
          CLI::IsMember({"none", "repeats_count", "chunk_lost", "reset_forgotten", "step_twice", "fold_lost",
                         "mark_before_ranks", "rank_skips_batch", "old_epoch_counts", "mark_without_lost",
                         "replica_left_out", "gather_forgotten", "broken_forgotten"}))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  if (replicas) options.replicas = lossd::simulation::Replicas::kAll;
  options.sabotage = lossd::simulation::SabotageOf(sabotage);

  const auto began = std::chrono::steady_clock::now();
  const lossd::simulation::Summary summary = lossd::simulation::RunSchedules(options);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  for (const std::string& line : summary.trace) std::cerr << line << "\n";
  nlohmann::json report = {{"schedules", summary.schedules},
                           {"seed", options.seed},
                           {"divergences", summary.divergent.size()},
                           {"seconds", seconds},
                           {"events", summary.events},
                           {"divergent", summary.divergent},
                           {"configurations", summary.configurations}};
  if (json) {
    std::cout << report.dump(2) << "\n";
  } else {
    std::cout << summary.schedules << " schedules from seed " << options.seed << " in " << seconds
              << " s: " << summary.divergent.size() << " divergences\n";
    for (const auto& [event, count] : summary.events) {
      std::cout << "  " << std::setw(9) << count << "  " << event << "\n";
    }
    for (const auto& [seed, what] : summary.divergent) std::cout << "  seed " << seed << ": " << what << "\n";
  }
  return summary.divergent.empty() ? 0 : 1;
}
