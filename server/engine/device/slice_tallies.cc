#include "server/engine/device/slice_tallies.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/slices.h"
#include "server/engine/device/rank_status.h"

namespace lossd::engine {

namespace {

template <class Value>
bool SameValue(Value a, Value b) {
  return a == b || (std::isnan(a) && std::isnan(b));
}

bool SameTally(const kernels::GradientTally& a, const kernels::GradientTally& b) {
  return SameValue(a.squares, b.squares) && SameValue(a.largest, b.largest) && a.non_finite == b.non_finite;
}

bool SameTallies(const GradientTallies& a, const GradientTallies& b) {
  return std::equal(a.dw.begin(), a.dw.end(), b.dw.begin(), SameTally) &&
         std::equal(a.db.begin(), a.db.end(), b.db.begin(), SameTally);
}

}  // namespace

absl::StatusOr<GradientTallies> MergeSlices(const SliceTallies& own,
                                            kernels::collectives::Communicator* host) {
  static_assert(std::is_trivially_copyable_v<SliceTallies>);
  std::vector<SliceTallies> all(static_cast<size_t>(host->size()));
  const std::vector<int64_t> bytes(all.size(), sizeof(SliceTallies));
  const absl::Status gathered = ToStatus(host->AllGatherV(&own, bytes, all.data(), nullptr));
  if (!gathered.ok()) return gathered;
  const kernels::SliceLayout layout(0, host->size());
  GradientTallies sum;
  for (int32_t slice = 0; slice < layout.replicas(); ++slice) {
    const GradientTallies& owners = all[static_cast<size_t>(slice)].own;
    const int32_t mirror = layout.MirrorOf(slice);
    if (layout.HasMirrors() && !SameTallies(owners, all[static_cast<size_t>(mirror)].mirrored)) {
      return absl::InternalError(absl::StrCat("the gradient's sum of slice ", slice,
                                              " is not the same at replica ", slice, " and at ", mirror,
                                              ", which mirrors it"));
    }
    sum.Add(owners);
  }
  return sum;
}

}  // namespace lossd::engine
