#include "server/engine/device/slice_tallies.h"

#include <cstdint>
#include <type_traits>
#include <vector>

#include "server/engine/device/rank_status.h"

namespace lossd::engine {

absl::StatusOr<GradientTallies> MergeTallies(const GradientTallies& own,
                                             kernels::collectives::Communicator* host) {
  static_assert(std::is_trivially_copyable_v<GradientTallies>);
  std::vector<GradientTallies> all(static_cast<size_t>(host->size()));
  const std::vector<int64_t> bytes(all.size(), sizeof(GradientTallies));
  const absl::Status gathered = ToStatus(host->AllGatherV(&own, bytes, all.data(), nullptr));
  if (!gathered.ok()) return gathered;
  GradientTallies sum;
  for (const GradientTallies& tallies : all) sum.Add(tallies);
  return sum;
}

}  // namespace lossd::engine
