#include "server/engine/device/slice_checks.h"

#include "absl/strings/str_cat.h"
#include "kernels/collectives/communicator.h"

namespace lossd::engine {

absl::Status CheckStepped(const kernels::RowSpan& rows, const kernels::RowSpan& stepped) {
  if (stepped.Has(rows)) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("rows ", rows.first, " to ", rows.end(),
                                          " are not all stepped at this replica, which has ", stepped.first,
                                          " to ", stepped.end()));
}

absl::Status CheckReplicas(const HeadShard& shard, const ReplicaCommunicators& replicas) {
  if (shard.replicas > 1 && replicas.device->size() == shard.replicas &&
      replicas.device->rank() == shard.replica) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat("replica ", shard.replica, " of ", shard.replicas,
                                          " is asked to meet others as ", replicas.device->rank(), " of ",
                                          replicas.device->size()));
}

absl::Status NotSummed() { return absl::InternalError("the gradients of the replicas are not added up"); }

absl::Status SteppedBySlices() { return absl::InternalError("a head over replicas is stepped by slices"); }

}  // namespace lossd::engine
