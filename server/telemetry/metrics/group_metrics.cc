// The ranks of a group: what they do. None without a group.
#include <string>

#include "server/telemetry/metrics/collect.h"

namespace lossd::telemetry {
namespace {

constexpr Metric kRanks{"lossd_group_ranks", "Ranks of the group.", kGauge};
constexpr Metric kEpoch{"lossd_group_epoch", "Number of this start of the ranks, another one after each.",
                        kGauge};
constexpr Metric kCommandAge{"lossd_rank_command_age_seconds",
                             "How long ago a rank was given the oldest command that it is not done with; 0: "
                             "it is done with all.",
                             kGauge};
constexpr Metric kWaits{"lossd_exchange_wait_seconds",
                        "Time that a rank waited at exchanges with the others, moving bytes included.",
                        kHistogram,
                        {"exchange"}};

}  // namespace

void CollectGroup(const engine::GroupReport& group, Exposition& out) {
  if (!group.IsGroup()) return;
  out.Only(kRanks, group.ranks.size());
  out.Only(kEpoch, group.epoch);
  out.OfEachRank(kCommandAge, group,
                 [&out](const engine::RankReport& rank) { out.Add({}, rank.activity.command_seconds); });
  out.OfEachRank(kWaits, group, [&out](const engine::RankReport& rank) {
    for (const kernels::Exchange exchange : kernels::kExchanges) {
      out.Add({kernels::Name(exchange)}, rank.activity.waits[static_cast<size_t>(exchange)]);
    }
  });
}

}  // namespace lossd::telemetry
