#include "server/startup/group/parted_ranks.h"

#include <utility>

#include "absl/time/time.h"

namespace lossd {
namespace {

// Empty if a rank does not wait, or there is but one.
std::vector<double> WaitedByAll(const engine::GroupReport& group) {
  std::vector<double> waited;
  if (!group.IsGroup()) return waited;
  for (const engine::RankReport& rank : group.ranks) {
    if (!rank.activity.waits_at.has_value()) return {};
    waited.push_back(rank.activity.waited_seconds());
  }
  return waited;
}

}  // namespace

void PartedRanks::Look(const engine::GroupReport& group, Clock::time_point now) {
  std::vector<double> waited = WaitedByAll(group);
  if (waited.empty() || waited != waited_) {
    waited_ = std::move(waited);
    since_ = now;
  } else if (absl::FromChrono(now - since_) > group.patience) {
    parted_();
  }
}

}  // namespace lossd
