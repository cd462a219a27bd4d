#include "server/startup/group/stuck_ranks.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "server/telemetry/common/logging.h"

namespace lossd {
namespace {

// What ranks are at that may be why one is stuck: others have told of it a moment earlier or later.
nlohmann::json Suspects(const engine::GroupReport& group) {
  nlohmann::json stuck = nlohmann::json::array();
  for (size_t rank = 0; rank < group.ranks.size(); ++rank) {
    const engine::RankActivity& activity = group.ranks[rank].activity;
    if (absl::Seconds(activity.command_seconds) < group.patience / 2) continue;
    stuck.push_back({{"rank", rank}, {"command", activity.command}, {"seconds", activity.command_seconds}});
    if (activity.waits_at.has_value()) stuck.back()["waits_at"] = kernels::Name(*activity.waits_at);
  }
  return stuck;
}

}  // namespace

void StuckRanks::Look(const engine::GroupReport& group) {
  using telemetry::Log;
  using telemetry::LogLevel;
  const bool ready = std::none_of(group.ranks.begin(), group.ranks.end(),
                                  [&group](const engine::RankReport& rank) { return group.IsStuck(rank); });
  if (ready == ready_) return;
  ready_ = ready;
  if (ready_) {
    Log(LogLevel::kInfo, "all ranks come on with their commands again: ready");
  } else {
    Log(LogLevel::kWarning, "ranks do not come on with their commands: not ready",
        {{"ranks", telemetry::LogValue::Of(Suspects(group))}});
  }
  tell_(ready_);
}

}  // namespace lossd
